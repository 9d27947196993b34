"""Extrapolate the tape of a batch that was not run from the traces of two others, in a hundredth of a run's time.

Every size and shape is extrapolated linearly in the batch, and the requests are placed by the allocator of the GPU. It
is a picture until the run has ended, never a result: ops may take another path from some size on.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.picture import with_whole
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import Machine
from memexplore.run.programs.step_record import TracedSetting, record_of
from memexplore.run.programs.trace_reuse import ACTION, BLOCK, CODE, PHASE, FirstStep, Trace
from memexplore.tape import Action, Category, Tape
from memexplore.text.tensor_text import dtype_of, shape_of, tensor_text

if TYPE_CHECKING:
    from memexplore.run.programs.step import Step

_OF_OP = slice(PHASE, CODE.stop)
"""Columns of `FirstStep.compared` that name the op of a request: phase, step, op, layer and stack."""
_NEAREST = 4
"""Batches among which two are sought that make the same requests but for their sizes."""


def expected_tape(step: Step, knobs: Knobs, machine: Machine) -> Tape | None:
    """Return the tape that a setting will probably have, from runs of two other batches with the same other knobs.

    None where no two of the nearest batches that were traced make the same requests but for their sizes, and for a
    setting that was traced itself. `machine` is virtual, with the GPU and the settings of the knobs.
    """
    gpu, batch = machine.virtual_gpu(), knobs.batch or step.batch_size
    by_batch = record_of(step).settings_by_batch(knobs, gpu, step.batch_size)
    if batch in by_batch or len(by_batch) < 2:
        return None
    nearest = sorted(by_batch, key=lambda near: abs(near - batch))[:_NEAREST]
    settings = (_between(by_batch, batch, *pair) for pair in itertools.combinations(nearest, 2))
    setting = next(filter(None, settings), None)
    if setting is None:
        return None
    tape = setting.tape_on(gpu)
    if tape is not None:
        return tape
    tape, unlimited = setting.tape_until_failure(gpu), setting.tape_on(machine.unlimited().virtual_gpu())
    return None if tape is None or unlimited is None else with_whole(tape, unlimited)


def _between(by_batch: dict[int, TracedSetting], batch: int, near: int, other: int) -> TracedSetting | None:
    share = (batch - near) / (other - near)
    near_trace, other_trace = by_batch[near].trace, by_batch[other].trace
    trace = (
        extrapolated(near_trace, other_trace, share)
        if isinstance(near_trace, Trace) and isinstance(other_trace, Trace)
        else None
    )
    return None if trace is None else by_batch[near]._replace(trace=trace)


def extrapolated(near: Trace, other: Trace, share: float) -> Trace | None:
    """Return the trace whose sizes and shapes are those of `near` plus a share of the difference to `other`.

    Scratch memory of an op that takes it more or less often in the other trace, as sums over many samples do, is as in
    `near`, and which other sizes a workspace may have is unknown. None where the traces differ in more than that, and
    where a size would be negative.
    """
    first, second = near.first, other.first
    rows, others = _common_rows(first, second)
    if len(rows) != len(others) or not np.array_equal(_compared(first, rows), _compared(second, others)):
        return None
    size, tensor = first.size.copy(), first.tensor.copy()
    size[rows] = np.rint(first.size[rows] + share * (second.size[others] - first.size[rows])).astype(np.int64)
    if (size < 0).any():
        return None
    texts = _extrapolated_texts(first.tensor[rows], second.tensor[others], share)
    if texts is None:
        return None
    tensor[rows] = texts
    unknown = np.full_like(first.workspace, None)
    return near.resized(first._replace(size=size, tensor=tensor, workspace=unknown))


def _common_rows(first: FirstStep, second: FirstStep) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the rows of two first steps without the scratch of ops that do not take it equally often in both."""
    scratch = [_scratch(first_step) for first_step in (first, second)]
    counts = [Counter(_codes(first_step, rows)) for first_step, rows in zip((first, second), scratch, strict=True)]
    unequal = {code for code in counts[0].keys() | counts[1].keys() if counts[0][code] != counts[1][code]}
    return _rows_without(first, scratch[0], unequal), _rows_without(second, scratch[1], unequal)


def _scratch(first: FirstStep) -> list[int]:
    """Return the rows of requests that the op itself frees: no other op requests memory in between."""
    action, block = first.compared[:, ACTION], first.compared[:, BLOCK]
    allocs = np.flatnonzero(action == Action.ALLOC)
    codes = first.compared[allocs, CODE]
    call = np.append(0, np.cumsum((codes[1:] != codes[:-1]).any(axis=1)))
    frees = np.flatnonzero((action == Action.FREE_REQUESTED) & (block >= 0))
    freed_in = call[np.searchsorted(allocs, frees) - 1]
    made_in = call[np.searchsorted(allocs, block[frees])]
    rows = block[frees[freed_in == made_in]]
    return [int(row) for row in rows if first.category[row] in (Category.TEMPORARY, Category.WORKSPACE)]


def _codes(first: FirstStep, rows: list[int]) -> list[tuple[int, ...]]:
    return list(map(tuple, first.compared[rows, _OF_OP].tolist()))


def _rows_without(first: FirstStep, scratch: list[int], unequal: set[tuple[int, ...]]) -> NDArray[np.int64]:
    left_out = {row for row, code in zip(scratch, _codes(first, scratch), strict=True) if code in unequal}
    if not left_out:
        return np.arange(len(first.size))
    block = first.compared[:, BLOCK]
    of_scratch = np.isin(block, list(left_out)) & (first.compared[:, ACTION] == Action.FREE_REQUESTED)
    of_scratch[list(left_out)] = True
    return np.flatnonzero(~of_scratch)


def _compared(first: FirstStep, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the compared columns of rows, with blocks by their number among these."""
    compared = first.compared[rows]
    block = compared[:, BLOCK]
    is_free = (compared[:, ACTION] == Action.FREE_REQUESTED) & (block >= 0)
    compared[is_free, BLOCK] = np.searchsorted(rows, block[is_free])
    return compared


def _extrapolated_texts(
    near: NDArray[np.object_], other: NDArray[np.object_], share: float
) -> NDArray[np.object_] | None:
    if np.array_equal(near, other):
        return near
    pairs = list(zip(near.tolist(), other.tolist(), strict=True))
    texts = {pair: _extrapolated_text(*pair, share) for pair in set(pairs)}
    result = np.empty(len(pairs), dtype=object)
    result[:] = [texts[pair] for pair in pairs]
    return None if None in texts.values() else result


def _extrapolated_text(near: str, other: str, share: float) -> str | None:
    if near == other:
        return near
    shape, longer = shape_of(near), shape_of(other)
    if shape is None or longer is None or len(shape) != len(longer) or dtype_of(near) != dtype_of(other):
        return None
    extents = [round(low + share * (high - low)) for low, high in zip(shape, longer, strict=True)]
    return tensor_text(tuple(extents), dtype_of(near))
