"""Private names of `torch.distributed`: process groups, works and the C++ part of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.table import look_up, replaceable

AVAILABLE: bool = torch.distributed.is_available()
"""Whether this build of torch has `torch.distributed`."""
is_initialized: Callable[[], bool] = torch.distributed.is_initialized if AVAILABLE else bool
"""Whether this process is a rank of a default group."""
NO_PROCESS_GROUPS = "`init_process_group` on a virtual GPU"
NO_DATA_PARALLEL = "DistributedDataParallel on a virtual GPU"

c10d: Any = look_up(
    "torch.distributed.distributed_c10d",
    "the functions of `torch.distributed`, in the module that calls them; no page documents it",
    NO_PROCESS_GROUPS,
)
world: Any = look_up(
    "torch.distributed.distributed_c10d._world",
    "the process groups of this process by name, rank and tag, from which virtual ones are removed",
    NO_PROCESS_GROUPS,
    probe=lambda value: all(hasattr(value, name) for name in ("pg_map", "pg_names", "tags_to_pg", "group_count")),
)
update_default_group: Callable[[Any], None] = look_up(
    "torch.distributed.distributed_c10d._update_default_pg", "removes a virtual default group", NO_PROCESS_GROUPS
)
unregister_group: Callable[[str], None] = look_up(
    "torch.distributed.distributed_c10d._unregister_process_group", "removes a virtual group", NO_PROCESS_GROUPS
)
GROUP_STATE = tuple(
    replaceable(
        f"torch.distributed.distributed_c10d.{name}",
        "state that `init_process_group` sets, and that is restored",
        "the arguments of a virtual default group are left behind",
    )
    for name in ("_backend", "_default_pg_init_method")
)
RENDEZVOUS = replaceable(
    "torch.distributed.distributed_c10d.rendezvous",
    "meets the other processes; one rank of a virtual group has none to meet",
    NO_PROCESS_GROUPS,
)
NEW_GROUP = replaceable(
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "makes every process group, whatever its backend; a virtual one communicates with nobody",
    NO_PROCESS_GROUPS,
)
MONITORED_BARRIER = replaceable(
    "torch.distributed.ProcessGroup.monitored_barrier",
    "waits for each other process; the backend `fake` has none",
    "`torch.distributed.monitored_barrier` on a virtual GPU",
)
fake_process_groups: Any = look_up(
    "torch.testing._internal.distributed.fake_pg",
    "importing it registers the backend `fake`: a group of any size with one process",
    NO_PROCESS_GROUPS,
)
work_from_future: Callable[[Any], Any] = look_up(
    "torch._C._distributed_c10d._create_work_from_future",
    "a finished work whose future holds the outputs; that of a fake group holds nothing",
    NO_PROCESS_GROUPS,
)
resolve_group: Callable[[str], Any] = look_up(
    "torch.distributed.distributed_c10d._resolve_process_group",
    "the group of a functional collective, which has its name only",
    "bytes that DTensors send on a virtual GPU",
)
WAIT = replaceable(
    "torch._C._distributed_c10d.Work.wait",
    "the end of an asynchronous collective, until which it keeps its inputs",
    "memory of asynchronous collectives on a virtual GPU",
)
SOURCE_RANK = replaceable(
    "torch._C._distributed_c10d.Work._source_rank",
    "the rank that sent what `recv` from any rank got; a finished work of a virtual group has none",
    "`torch.distributed.recv` from any rank on a virtual GPU",
)
ACCELERATOR = replaceable(
    "torch._C._get_accelerator",
    "the device of collectives without tensors and of device meshes; a build for the CPU has none",
    NO_PROCESS_GROUPS,
)
VERIFY_PARAMETERS = replaceable(
    "torch.distributed._verify_params_across_processes",
    "compares the parameters of all ranks by their values",
    NO_DATA_PARALLEL,
)
REBUILD_BUCKETS = replaceable(
    "torch.distributed.Reducer._rebuild_buckets",
    "reads the bucket of each parameter back from the GPU",
    NO_DATA_PARALLEL,
)
BUILTIN_HOOK = replaceable(
    "torch.nn.parallel.DistributedDataParallel._register_builtin_comm_hook",
    "communication hooks of C++, which read the result of a work of C++",
    NO_DATA_PARALLEL,
)
COPY_STREAMS = replaceable(
    "torch.nn.parallel._functions._streams",
    "a stream for each GPU by which inputs are copied, made once in a process; virtual ones are left to nobody",
    NO_DATA_PARALLEL,
)
object_to_tensor: Callable[..., tuple[torch.Tensor, torch.Tensor]] = look_up(
    "torch.distributed.distributed_c10d._object_to_tensor",
    "the tensors by which a collective of objects sends one",
    "collectives of objects on a virtual GPU",
)


def use_custom_backend(group: Any) -> None:
    """Make the backend of a class outside torch's list, such as `fake`, the default one of a process group."""
    group._set_default_backend(c10d.ProcessGroup.BackendType.CUSTOM)


look_up(
    "torch.distributed.ProcessGroup._set_default_backend",
    "tells a group that names other backends that it has the backend `fake`",
    NO_PROCESS_GROUPS,
)
device_of_objects: Callable[[Any], str] = look_up(
    "torch.distributed.distributed_c10d._get_object_coll_device",
    "the device of the tensors by which a collective of objects sends them",
    "collectives of objects on a virtual GPU",
)
_module_states: Any = look_up(
    "torch.distributed._composable_state._module_state_mapping",
    "the state of modules that `fully_shard` wrapped, which refuses to wrap a module again that was restored",
    "FSDP2 as a knob",
)


def forget_module_states(modules: list[torch.nn.Module]) -> None:
    """Forget that modules were wrapped by `fully_shard`."""
    for module in modules:
        _module_states.pop(module, None)
