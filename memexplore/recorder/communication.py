"""Decide the categories of blocks of communication between ranks, from ops of collectives and of FSDP.

What an op does with a block decides its category, never its size or the name of a variable:

- **gathered parameter**: what FSDP gathers parameters into and copies them out to, and what any all-gather of a
  parameter writes to.
- **gradient bucket**: the buckets of DistributedDataParallel's Reducer, what FSDP reduces and scatters, and a copy of
  gradients that an all-reduce or a reduce-scatter reads. A gradient that is a view of a bucket is part of it.
- **communication buffer**: what a collective requests for itself or receives into, unless it has another category for
  certain or is an activation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch

from memexplore.tape import Category, Communicator, Meta
from memexplore.torch_internals.dispatch import schema_of
from memexplore.torch_internals.sharded import (
    GATHERS_PARAMETERS,
    MAKES_BUCKETS,
    REDUCES_GRADIENTS,
    group_of,
    rank_and_world,
)

_NAMESPACES = ("c10d", "_c10d_functional", "fsdp")
_FUNCTIONAL = "_c10d_functional"
_DERIVED = (Category.TEMPORARY, Category.UNKNOWN)
"""Categories that a block has for want of a better one."""
LASTING = (Category.GATHERED_PARAMETER, Category.GRADIENT_BUCKET)
"""Categories that a parameter or gradient keeps which is a view of such a block."""
_OWN = "memexplore."
_DEPTH = 40
"""Frames between a collective and the method of FSDP that calls it are fewer."""


class Communication:
    """The blocks that collectives of one recording read and write."""

    def __init__(self, row_of: Callable[[torch.Tensor], int], tags: dict[int, int]) -> None:
        self._row_of, self._tags = row_of, tags
        self._written: set[int] = set()
        self._reduced: set[int] = set()
        self._gathers: list[tuple[int, int]] = []
        """Rows of an output and of the input that all ranks gather into it."""
        self._scatters: list[tuple[int, int]] = []
        """Rows of an input and of the output that has the sum of this rank's part."""
        self._functional: list[tuple[int, str, int]] = []
        """Number of events before a functional collective, its name, and the row of its input."""
        self._groups: dict[str, Communicator] = {}
        self._place: tuple[int, int] | None = None

    def meta(self, meta: Meta) -> Meta:
        """Return metadata with the rank of this process, and the groups that have communicated on the device."""
        rank, world = self._place or rank_and_world() or (meta.rank, meta.world)
        return meta._replace(rank=rank, world=world, communicators=tuple(self._groups.values()))

    def op(self, func: Any, args: Any, events: int) -> None:
        """Note a collective or an op of FSDP that is about to run after a number of events.

        `args` has the keyword arguments at its end.
        """
        self._place = self._place or rank_and_world()  # the program may destroy its groups before it ends
        namespace, name = schema_of(func).name.split("::")
        if namespace == "fsdp":
            self._fsdp(name, args)
        elif namespace == _FUNCTIONAL:
            if name != "wait_tensor":
                rows = [self._row(tensor) for tensor in _flat(args[:1])]
                self._functional.append((events, name, next(iter(rows), -1)))
                self._communicates(name, args, rows)
        else:
            self._collective(func, name, args)

    def _fsdp(self, name: str, args: Any) -> None:
        """Follow the ops of torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py."""
        if name == "all_gather_copy_in":
            # Parameters, or copies of them in the type of the all-gather.
            self._written.update(self._row(tensor) for tensor in _flat(args[:1]))
            self._tag(args[1:2], Category.GATHERED_PARAMETER)
        elif name == "split_with_sizes_copy":
            self._tag((args[0], args[-1]), Category.GATHERED_PARAMETER)
        elif name.startswith("chunk_cat"):
            self._tag(args[-1:], Category.GRADIENT_BUCKET)

    def _collective(self, func: Any, name: str, args: Any) -> None:
        arguments = dict(zip((argument.name for argument in schema_of(func).arguments), args, strict=False))
        inputs = [value for key, value in arguments.items() if key.startswith("input")]
        outputs = [value for key, value in arguments.items() if not key.startswith("input")]
        written = [self._row(tensor) for tensor in _flat(outputs)]
        self._communicates(name, args, written)
        if name == "send":
            return
        if name.startswith("recv") or "barrier" in name:
            self._tag(outputs, Category.COMMUNICATION_BUFFER)
            return
        self._written.update(written)
        if name.startswith("allreduce"):
            self._reduced.update(written)
        elif "allgather" in name:
            self._gathers += [(self._row(to), self._row(of)) for to, of in _pairs(outputs, inputs)]
            if _called_by(GATHERS_PARAMETERS):
                self._tag(outputs, Category.GATHERED_PARAMETER)
        elif "reduce_scatter" in name:
            self._scatters += [(self._row(of), self._row(to)) for of, to in _pairs(inputs, outputs)]
            if _called_by(REDUCES_GRADIENTS):
                self._tag(inputs, Category.GRADIENT_BUCKET)

    def _communicates(self, name: str, args: Any, rows: list[int]) -> None:
        """Note the group of a collective on tensors of the device; send and receive have a communicator per pair."""
        if all(row < 0 for row in rows):
            return
        group_and_size = group_of(args)
        if group_and_size is None:
            return
        group, size = group_and_size
        to_all = "alltoall" in name or "all_to_all" in name
        before = self._groups.get(group)
        self._groups[group] = Communicator(size, to_all or (before is not None and before.all_to_all))

    def decide(
        self, category: Any, certain: Mapping[int, Category], copied: Iterable[int], op: Any, ops: Mapping[str, int]
    ) -> None:
        """Replace derived categories of blocks of communication.

        `category` and `op` have one entry per event. `certain` are the categories of blocks that are not derived,
        `copied` the rows of copies of gradients, `ops` the number of each op in `op`.
        """
        for before, name, source in self._functional:
            number = ops.get(f"{_FUNCTIONAL}::{name}", -2)
            # A mark may stand before the output.
            row = next((row for row in range(before, min(before + 3, len(op))) if op[row] == number), -1)
            self._written.add(row)
            if name.startswith("all_gather"):
                self._gathers.append((row, source))
            elif name.startswith("reduce_scatter"):
                self._scatters.append((source, row))
        chosen = {row: Category.COMMUNICATION_BUFFER for row in self._written if _is(category, row, _DERIVED)}
        of_gradients = set(copied)
        buckets = {row for row in self._reduced if row in of_gradients}
        buckets |= {of for of, to in self._scatters if _is(category, to, (Category.GRADIENT,))}
        buckets |= {of for of, _ in self._scatters if of in of_gradients}
        chosen |= {row: Category.GRADIENT_BUCKET for row in buckets if row >= 0 and row not in certain}
        for to, of in self._gathers:
            if to >= 0 and to != of and _is(category, of, (Category.PARAMETER,)) and certain.get(to) not in LASTING:
                chosen[to] = Category.GATHERED_PARAMETER
        for row, kind in chosen.items():
            category[row] = kind

    def renumber(self, new_row: Callable[[int], int]) -> None:
        """Change the numbers of all rows."""
        self._written = {new_row(row) for row in self._written}
        self._reduced = {new_row(row) for row in self._reduced}
        self._gathers = [(new_row(to), new_row(of)) for to, of in self._gathers]
        self._scatters = [(new_row(of), new_row(to)) for of, to in self._scatters]
        self._functional = [(new_row(events), name, new_row(row)) for events, name, row in self._functional]

    def _row(self, tensor: torch.Tensor) -> int:
        return self._row_of(tensor)

    def _tag(self, values: Any, category: Category) -> None:
        for tensor in _flat(values):
            row = self._row(tensor)
            if row >= 0 and (category in LASTING or row not in self._tags):
                self._tags[row] = category


def is_followed(func: Any) -> bool:
    """Return whether an op is a collective or one of FSDP's.

    >>> is_followed(torch.ops.aten.mm.default)
    False
    """
    return getattr(func, "namespace", "") in _NAMESPACES


def _is(category: Any, row: int, kinds: tuple[Category, ...]) -> bool:
    return 0 <= row < len(category) and category[row] in kinds


def _flat(values: Any) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def _pairs(several: list[Any], single: list[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each tensor of `several` with its tensor of `single`: lists of both, or lists of lists and a list."""
    singles = list(_flat(single))
    parts = several[0] if several and isinstance(several[0], list | tuple) else several
    return [(tensor, of) for part, of in zip(parts, singles, strict=False) for tensor in _flat([part])]


def makes_bucket() -> bool:
    """Return whether the running C++ code is DistributedDataParallel's Reducer, which requests buckets."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    return frame is not None and _names(frame) in MAKES_BUCKETS


def _called_by(functions: frozenset[tuple[str, str]]) -> bool:
    """Return whether one of the running functions is one of these."""
    frame: Any = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if _names(frame) in functions:
            return True
        frame = frame.f_back
    return False


def _names(frame: FrameType) -> tuple[str, str]:
    return frame.f_globals.get("__name__", ""), frame.f_code.co_name
