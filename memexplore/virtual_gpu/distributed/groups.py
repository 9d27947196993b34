"""Make process groups of one rank: `init_process_group` and `new_group` of any backend, without other processes.

torch's own functions stay in place: only the meeting of the processes and the backend are replaced. The groups are of
the backend `fake`, and report the backend they were made for. A group of the user's that exists when the virtual GPU is
turned on is left alone and keeps working for CPU tensors.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from memexplore.torch_internals.distributed import (
    GROUP_STATE,
    MONITORED_BARRIER,
    NEW_GROUP,
    RENDEZVOUS,
    c10d,
    unregister_group,
    update_default_group,
    use_custom_backend,
    world,
)
from memexplore.virtual_gpu.distributed import ranks
from memexplore.virtual_gpu.patches.install import Call, Keep, Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import DeviceState
from memexplore.virtual_gpu.values import notes

ASSUMED = "every rank of a process group has tensors of the same sizes and values as this rank"
_EXCEPTION_HOOK = "_distributed_excepthook"
"""Name of the function that `init_process_group` sets as `sys.excepthook`."""
_DEVICES = ("cpu", "cuda")
SPLIT_GROUP = "split_group"
_NCCL_TIMEOUT = timedelta(minutes=10)
"""kProcessGroupNCCLDefaultTimeout in ProcessGroupNCCL.hpp; a build without NCCL has none."""

_ours: weakref.WeakSet[Any] = weakref.WeakSet()
"""Groups made here, which communicate with nobody."""


def patches(prepare: Callable[[], object]) -> list[Patch]:
    """Return the patches of process groups; `prepare` is called before the first group is made."""
    return [
        *(Keep(functools.partial(getattr, *state, None), functools.partial(setattr, *state)) for state in GROUP_STATE),
        Keep(lambda: sys.excepthook, _restore_exception_hook),
        Call(unmake=functools.partial(_remove_groups_except, tuple(world.pg_map), world.group_count)),
        Replace(RENDEZVOUS.owner, RENDEZVOUS.name, _rendezvous),
        Replace(NEW_GROUP.owner, NEW_GROUP.name, _new_group(NEW_GROUP.value, prepare)),
        Replace(MONITORED_BARRIER.owner, MONITORED_BARRIER.name, _meeting(MONITORED_BARRIER.value)),
        *(
            Replace(module, SPLIT_GROUP, _splitting(getattr(module, SPLIT_GROUP)))
            for module in (torch.distributed, c10d, torch.distributed.device_mesh)
            if hasattr(module, SPLIT_GROUP)
        ),
        Replace(c10d, "default_pg_nccl_timeout", c10d.default_pg_nccl_timeout or _NCCL_TIMEOUT),
        *(Replace(module, "is_nccl_available", _yes) for module in (c10d, torch.distributed)),
        *(Replace(module, "is_mpi_available", _yes) for module in (c10d, torch.distributed)),
    ]


def is_ours(group: Any) -> bool:
    """Return whether a group, None for the default one, was made here and communicates with nobody."""
    return (c10d.GroupMember.WORLD if group is None else group) in _ours


def _yes() -> bool:
    return True


def _restore_exception_hook(before: Any) -> None:
    if getattr(sys.excepthook, "__name__", "") == _EXCEPTION_HOOK:
        sys.excepthook = before


def _rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Stand in for `rendezvous`: return this rank and a store that nobody else reads."""
    number, world = ranks.of_rendezvous(url, rank, world_size)
    return iter([(torch.distributed.HashStore(), number, world)])


def _new_group(original: Callable[..., Any], prepare: Callable[[], object]) -> Callable[..., Any]:
    """Return `_new_process_group_helper`, which makes a group of the backend `fake` and names the one asked for."""

    def make(size: int, rank: int, members: Any, backend: Any, *rest: Any, **options: Any) -> Any:
        default = c10d.GroupMember.WORLD
        if default is not None and default not in _ours:
            return original(size, rank, members, backend, *rest, **options)
        prepare()
        if size < 0:
            # MPI's own launcher gives rank and size.
            rank, size = ranks.of_rendezvous("")
        for name in ("backend_options", "pg_options"):
            if name in options:
                options[name] = None
        requested = c10d.BackendConfig(backend)
        devices = [device for device in requested.get_device_backend_map() if device in _DEVICES]
        fake = ",".join(f"{device}:fake" for device in devices or _DEVICES)
        made = original(size, rank, members, c10d.Backend(fake), *rest, **options)
        group = made[0]
        if group is not c10d.GroupMember.NON_GROUP_MEMBER:
            _ours.add(group)
            use_custom_backend(group)
            world.pg_map[group] = (backend, world.pg_map[group][1])
            world.pg_backend_config[group] = str(requested)
            if not members:
                DeviceState.ranks = size
            if size > 1 and not members:
                notes.add(f"assumed: {ASSUMED}; this is rank {rank} of {size}")
        return made

    return make


def _meeting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `monitored_barrier` of a group, which only the backend gloo has: nobody is waited for."""

    def monitored_barrier(group: Any, *args: Any, **kwargs: Any) -> None:
        if group not in _ours:
            original(group, *args, **kwargs)

    return monitored_barrier


def _splitting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `split_group`, which makes the group of this rank only: a group of the backend `fake` cannot be split."""

    @functools.wraps(original)
    def split(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        **rest: Any,
    ) -> Any:
        if not split_ranks or not is_ours(parent_pg):
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **rest)
        parent = c10d.GroupMember.WORLD if parent_pg is None else parent_pg
        own = next((ranks for ranks in split_ranks if parent.rank() in ranks), None)
        if own is None:
            return None
        members = sorted(torch.distributed.get_global_rank(parent, rank) for rank in own)
        backend = rest.get("backend") or world.pg_map[parent][0]
        return c10d.new_group(members, timeout=timeout, backend=backend, group_desc=group_desc)

    return split


def _remove_groups_except(kept: tuple[Any, ...], count: int) -> None:
    """Remove all groups but those that existed before. May be interrupted and repeated."""
    default = c10d.GroupMember.WORLD
    if default is not None and default not in kept:
        update_default_group(None)
    names = dict(world.pg_names)
    for group, name in names.items():
        if group in kept:
            continue
        tag = world.pg_to_tag.get(group)
        for entries in (world.tags_to_pg.get(tag, []), world.tags_to_pg.get("", [])):
            while group in entries:
                entries.remove(group)
        if tag in world.tags_to_pg and not world.tags_to_pg[tag]:
            del world.tags_to_pg[tag]
        unregister_group(name)
        for table in (
            world.pg_to_tag,
            world.pg_map,
            world.pg_group_ranks,
            world.pg_backend_config,
            world.pg_coalesce_state,
            world.pg_names,
        ):
            table.pop(group, None)
    world.group_count = count
