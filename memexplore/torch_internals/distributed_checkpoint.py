"""Private names of `torch.distributed.checkpoint`. Importing this module takes 0.2 s."""

from __future__ import annotations

from typing import Any

from memexplore.torch_internals.table import look_up, replaceable

NO_CHECKPOINTS = "`torch.distributed.checkpoint` on one rank of a virtual GPU"

Messages: Any = look_up(
    "torch.distributed.checkpoint.utils._DistWrapper",
    "sends the plans of all ranks to one of them, which joins them",
    NO_CHECKPOINTS,
)
VALIDATE_PLAN = replaceable(
    "torch.distributed.checkpoint.default_planner._validate_global_plan",
    "checks that the parts of all ranks fill each tensor; one rank has its own part only",
    NO_CHECKPOINTS,
)
EmptyMetadata: Any = look_up(
    "torch.distributed.checkpoint.metadata.Metadata", "an argument of that check", NO_CHECKPOINTS
)
BROADCAST_STATES = replaceable(
    "torch.distributed._state_dict_utils._broadcast_state_dict",
    "receives the names and shapes of a state dict from rank 0",
    "`broadcast_from_rank0` on a virtual GPU",
)
BROADCAST_STATES_IN_USE = replaceable(
    "torch.distributed.checkpoint.state_dict._broadcast_state_dict",
    "the same function, in the module that calls it",
    "`broadcast_from_rank0` on a virtual GPU",
)
TensorInfo: Any = look_up(
    "torch.distributed._state_dict_utils._TensorInfo",
    "shape and dtype of a tensor that rank 0 sends",
    "`broadcast_from_rank0` on a virtual GPU",
)
STAGE_TENSOR = replaceable(
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager._offload_tensor",
    "copies a tensor to the CPU by its storage, which a virtual tensor does not have",
    "`torch.distributed.checkpoint.async_save` on a virtual GPU",
)
_NO_FLAT_STATES = "optimizer states of FSDP1 on one rank of a virtual GPU"
FLAT_STATE_KEYS = replaceable(
    "torch.distributed.fsdp._optim_utils._map_param_key_to_optim_keys",
    "gathers the names of the parameters of which each rank has a state",
    _NO_FLAT_STATES,
)
FLAT_STATE_INFO = replaceable(
    "torch.distributed.fsdp._optim_utils._allgather_state_info",
    "gathers the shapes of the states of each rank",
    _NO_FLAT_STATES,
)
_NO_SHARDED_TENSORS = "LOCAL_STATE_DICT of FSDP1 on one rank of a virtual GPU"
FROM_LOCAL_SHARDS = replaceable(
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor._init_from_local_shards",
    "makes a tensor of the shards of all ranks; knows the group whose shards are described",
    _NO_SHARDED_TENSORS,
)
GLOBAL_METADATA = replaceable(
    "torch.distributed._shard.sharded_tensor.api.build_global_metadata",
    "joins the descriptions of the shards of all ranks",
    _NO_SHARDED_TENSORS,
)
ShardMetadata: Any = look_up(
    "torch.distributed._shard.metadata.ShardMetadata", "describes the shard of a rank", _NO_SHARDED_TENSORS
)
ShardedTensorMetadata: Any = look_up(
    "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
    "describes all shards of a rank",
    _NO_SHARDED_TENSORS,
)
FlatStateKey: Any = look_up(
    "torch.distributed.fsdp._optim_utils._OptimStateKey", "the name of a state of FSDP1", _NO_FLAT_STATES
)
look_up(
    "torch.distributed.fsdp._flat_param._ShardParamInfo",
    "whether this rank has a part of a parameter",
    _NO_FLAT_STATES,
    probe=lambda value: "in_shard" in value._fields,
)


def has_part(flat_parameter: Any, index: int) -> bool:
    """Return whether this rank has a part of the parameter at an index of a flat parameter."""
    return bool(flat_parameter._shard_param_infos[index].in_shard)
