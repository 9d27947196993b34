"""Keep what recordings know of the blocks that outlive them, for later recordings of the same real device.

A later recording gets the origin of such a storage, and categories for the older blocks in its history.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from memexplore.analysis.curves import lifetimes
from memexplore.recorder.events import Origin
from memexplore.tape import COLUMNS, Action, Category, Phase, Tape
from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.device import release_of
from memexplore.virtual_gpu.kernels.cublas_workspace import cublas_size, cublaslt_size

Block = tuple[int, int]
"""Address and size."""

_HANDLES = 2
"""Threads that multiply on each stream: the main thread and the autograd engine's."""
_storages: dict[int, tuple[weakref.ref[Any], Origin]] = {}
"""Key of a storage that a recording left -> the storage, and its origin."""
_workspaces: dict[int, frozenset[Block]] = {}
"""Device -> the workspaces that were allocated at the end of its last recording."""


class Untouched(enum.Enum):
    """What older blocks are that no earlier recording had and that the recorded code does not use."""

    INPUTS = "inputs"
    """Inputs if the forward pass begins with them, as on a virtual GPU."""
    KEPT = "kept"
    """Of no category: tensors kept from steps of the run that were not recorded are no inputs."""


class Earlier(NamedTuple):
    """What is known of the blocks that are older than a recording."""

    origins: dict[Block, Origin]
    workspaces: frozenset[Block]
    workspace_sizes: frozenset[int]
    """Bytes that cuBLAS requests for each handle and stream, and cuBLASLt where it has workspaces of its own."""
    untouched: Untouched = Untouched.INPUTS


NOTHING_EARLIER = Earlier({}, frozenset(), frozenset())


def keep_storages(refs: Iterable[Any]) -> None:
    """Keep the origins of the storages that a recording left, `StorageRef`s with an origin, while they live."""
    for ref in list(refs):
        storage = ref()
        if storage is not None and ref.origin is not None:
            _storages[ref.key] = weakref.ref(storage, functools.partial(_forget, ref.key)), ref.origin


def _forget(key: int, dead: Any) -> None:
    # Another storage may have the key of a freed one by now.
    if key in _storages and _storages[key][0] is dead:
        del _storages[key]


def origin_of(storage: torch.UntypedStorage) -> Origin | None:
    """Return the origin of a storage that an earlier recording had, None for any other."""
    known = _storages.get(storage_key(storage))
    return None if known is None or known[0]() is not storage else known[1]


def keep_workspaces(device: torch.device, tape: Tape) -> None:
    """Keep the workspaces that are allocated at the end of the tape of a device."""
    life = lifetimes(tape)
    left = life.born[(life.requested == len(tape)) & (tape.category[life.born] == Category.WORKSPACE)]
    _workspaces[device.index or 0] = frozenset(zip(tape.address[left].tolist(), tape.size[left].tolist(), strict=True))


def earlier(device: torch.device, untouched: Untouched = Untouched.INPUTS) -> Earlier:
    """Return what is known of the older blocks of a GPU."""
    origins = {}
    for ref, origin in list(_storages.values()):
        storage = ref()
        if storage is not None and storage.device == device:
            origins[storage.data_ptr(), storage.nbytes()] = origin
    release = release_of(torch.__version__)
    size = cublas_size(torch.cuda.get_device_capability(device), release)
    sizes = frozenset({size, cublaslt_size(release, size)} - {0})
    return Earlier(origins, _workspaces.get(device.index or 0, frozenset()), sizes, untouched)


def classified(tape: Tape, rows: NDArray[np.int64], known: Earlier) -> Tape:
    """Return the tape with categories for some older blocks; layer, op and line too if an earlier recording had them.

    A block of the size of a workspace of cuBLAS or cuBLASLt that is never freed is one, up to two on each stream.
    """
    rows = rows[tape.size[rows] > 0]
    columns = {name: getattr(tape, name).copy() for name in ("category", "op", "module", "stack")}
    ops, modules, stacks = list(tape.ops), list(tape.modules), list(tape.stacks)
    life = lifetimes(tape)
    freed = np.full(len(tape), len(tape), dtype=np.int64)
    freed[life.born] = life.requested
    forward = np.flatnonzero((tape.action == Action.MARK) & (tape.phase == Phase.FORWARD))
    begins = int(forward[0]) if len(forward) else len(tape)
    workspaces: Counter[tuple[int, int]] = Counter()
    for row in rows.tolist():
        place = int(tape.address[row]), int(tape.size[row])
        origin, is_left = known.origins.get(place), freed[row] == len(tape)
        kind = Category.UNKNOWN if origin is None else origin.category
        if origin is not None:
            columns["op"][row] = _position(ops, origin.op)
            columns["module"][row] = _position(modules, origin.module)
            columns["stack"][row] = _position(stacks, origin.stack)
        elif place in known.workspaces:
            kind = Category.WORKSPACE
        elif is_left and place[1] in known.workspace_sizes and workspaces[int(tape.stream[row]), place[1]] < _HANDLES:
            workspaces[int(tape.stream[row]), place[1]] += 1
            kind = Category.WORKSPACE
        if kind == Category.UNKNOWN and known.untouched is Untouched.INPUTS:
            if freed[row] > begins:
                kind = Category.INPUT
            elif not is_left:
                kind = Category.TEMPORARY
        columns["category"][row] = kind
    return tape.with_rows(
        {name: columns.get(name, getattr(tape, name)) for name in COLUMNS},
        ops=ops,
        modules=modules,
        stacks=stacks,
        classes=[*tape.classes, *[""] * (len(modules) - len(tape.modules))] if tape.classes else (),
    )


def _position(table: list[Any], entry: Any) -> int:
    """Return the position of an entry in a table, which gets it if it is new; -1 for an empty one."""
    if not entry:
        return -1
    if entry not in table:
        table.append(entry)
    return table.index(entry)
