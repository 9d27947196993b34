"""What need not be traced again: the second step of a setting whose first step is like one that was seen.

A run is two steps. When the first step of a new setting makes the same requests and frees as the first step of a
setting seen before, row for row and in all but their sizes, then its second step is that setting's second step with the
new sizes. Where one row differs, the second step is traced. A change of the GPU or of the allocator's settings alone
changes no request, so nothing is traced at all where the same kernels run.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from memexplore.allocator import Settings, assign_addresses
from memexplore.recorder.recorder import Event
from memexplore.tape import Action, Category, Meta, Phase, Tape

_FIELD = {name: number for number, name in enumerate(Event._fields)}
_SAME = [_FIELD[name] for name in ("action", "phase", "step", "op", "module", "stack", "grad")]
_SEGMENTS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
_GIVEN_BACK = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


class First(NamedTuple):
    """The first step as the recorder noted it, without segments; rows are events."""

    like: NDArray[np.int64]
    """What has to be equal: action, phase, step, op, module, stack, gradients on or off, and what a free frees."""
    size: NDArray[np.int64]
    optimizer: NDArray[np.bool_]


def first(events: list[tuple[int, ...]]) -> First:
    """The first step from a recorder's events so far."""
    table = np.array(events, dtype=np.int64).reshape(len(events), len(_FIELD))
    kept = ~np.isin(table[:, _FIELD["action"]], _SEGMENTS)
    place_of = np.cumsum(kept) - 1
    call = table[:, _FIELD["call"]].copy()
    is_free = (table[:, _FIELD["action"]] == Action.FREE_REQUESTED) & (call >= 0)
    call[is_free] = place_of[call[is_free]]
    like = np.column_stack((table[:, _SAME], call))[kept]
    return First(like, table[kept, _FIELD["size"]], table[kept, _FIELD["phase"]] == Phase.OPTIMIZER)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """All requests of two steps, and which of them has the size of which request of the first step."""

    first: First
    tape: Tape
    """Without segments; a free is two rows."""
    event: NDArray[np.int64]
    """For each row the event of the first step that it is, or that it repeats; -1 where it keeps its own size."""

    def again(self, now: First) -> Program | None:
        """The program of a setting whose first step is `now`; None where it has to be traced."""
        before = self.first
        if now.like.shape != before.like.shape or not np.array_equal(now.like, before.like):
            return None
        if not np.array_equal(now.size[now.optimizer], before.size[before.optimizer]):
            return None
        size = np.where(self.event >= 0, now.size[self.event], self.tape.size)
        return Program(now, self.tape.replace(size=size), self.event)

    def placed(self, meta: Meta, settings: Settings) -> Tape | None:
        """The tape on a GPU and under allocator settings; None where a request does not fit.

        Running out of memory unwinds the Python code, which frees in an order of its own.
        """
        tape = assign_addresses(self.tape.replace(meta=meta), settings)
        if len(tape) and tape.action[-1] == Action.OOM:
            return None
        segments = np.isin(tape.action, _SEGMENTS)
        none = {name: np.where(segments, -1, getattr(tape, name)) for name in ("op", "module", "stack")}
        return tape.replace(category=np.where(segments, Category.UNKNOWN, tape.category).astype(np.uint8), **none)


def program(begun: First, tape: Tape) -> Program | None:
    """What can be repeated of two traced steps; None where nothing can.

    `begun` is the first step of that run. A request of the second step repeats the one of the first step that has the
    same op, layer, line and place among those that share them; where its size is another, nothing can be repeated.
    The optimizer's requests depend on the parameters alone and keep their sizes.
    """
    if np.isin(tape.action, (*_GIVEN_BACK, Action.OOM, Action.PREEXISTING, Action.SNAPSHOT)).any():
        return None
    rows = np.flatnonzero(~np.isin(tape.action, _SEGMENTS))
    kept = Tape.from_columns(
        {name: getattr(tape, name)[rows] for name in _COLUMNS},
        meta=tape.meta,
        ops=tape.ops,
        modules=tape.modules,
        stacks=tape.stacks,
    )
    # A free is one event and two rows.
    is_event = kept.action != Action.FREE_COMPLETED
    number = np.cumsum(is_event) - 1
    count = len(begun.size)
    event = np.where(number < count, number, -1)
    later = np.flatnonzero((kept.action == Action.ALLOC) & (number >= count))
    allocs = np.flatnonzero(kept.action == Action.ALLOC)
    table = pd.DataFrame({name: getattr(kept, name)[allocs] for name in ("phase", "op", "module", "stack")})
    # cuBLAS takes its workspace at the first product of a thread, and only there.
    table["workspace"] = kept.category[allocs] == Category.WORKSPACE
    table["row"] = allocs
    keys = ["phase", "op", "module", "stack", "workspace"]
    early = table[number[allocs] < count].copy()
    late = table[number[allocs] >= count].copy()
    early["nth"], late["nth"] = early.groupby(keys).cumcount(), late.groupby(keys).cumcount()
    matched = late.merge(early, on=[*keys, "nth"], how="left", suffixes=("", "_of"))
    source = matched["row_of"].fillna(-1).to_numpy(np.int64).copy()
    by_parameters = kept.phase[later] == Phase.OPTIMIZER
    source[by_parameters] = -1
    if ((source < 0) & ~by_parameters).any():
        return None
    repeats = source >= 0
    if not np.array_equal(kept.size[later[repeats]], kept.size[source[repeats]]):
        return None
    event[later[repeats]] = number[source[repeats]]
    return Program(begun, kept, _with_frees(kept, event))


def _with_frees(tape: Tape, event: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give the rows that free a block the event of the block."""
    block: dict[int, int] = {}
    told = event.tolist()
    for row, (action, address) in enumerate(zip(tape.action.tolist(), tape.address.tolist(), strict=True)):
        if action == Action.ALLOC:
            block[address] = told[row]
        elif action in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            told[row] = block.get(address, -1)
    return np.array(told, dtype=np.int64)


_COLUMNS = ("time", "action", "address", "size", "stream", "category", "phase", "step", "op", "module", "stack")
