"""Private names of `torch.distributed`: process groups, works and the C++ part of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.table import look_up, replaceable

AVAILABLE: bool = torch.distributed.is_available()
"""Whether this build of torch has `torch.distributed`."""
NO_PROCESS_GROUPS = "`init_process_group` on a virtual GPU"
NO_DATA_PARALLEL = "DistributedDataParallel on a virtual GPU"

c10d: Any = look_up(
    "torch.distributed.distributed_c10d",
    "the process groups of this process and the functions that make one; no page documents the module",
    NO_PROCESS_GROUPS,
    probe=lambda module: all(
        hasattr(module, name)
        for name in ("_world", "_new_process_group_helper", "_update_default_pg", "_unregister_process_group")
    ),
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
fake_process_groups: Any = look_up(
    "torch.testing._internal.distributed.fake_pg",
    "registers the backend `fake`: a group of any size with one process",
    NO_PROCESS_GROUPS,
    probe=lambda module: hasattr(module, "FakeStore"),
)
work_from_future: Callable[[Any], Any] = look_up(
    "torch._C._distributed_c10d._create_work_from_future",
    "a finished work whose future holds the outputs; that of a fake group holds nothing",
    NO_PROCESS_GROUPS,
)
WAIT = replaceable(
    "torch._C._distributed_c10d.Work.wait",
    "the end of an asynchronous collective, until which it keeps its inputs",
    "memory of asynchronous collectives on a virtual GPU",
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
object_to_tensor: Callable[..., tuple[torch.Tensor, torch.Tensor]] = look_up(
    "torch.distributed.distributed_c10d._object_to_tensor",
    "the tensors by which a collective of objects sends one",
    "collectives of objects on a virtual GPU",
)
