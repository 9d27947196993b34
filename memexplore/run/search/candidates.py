"""Candidates of a search: the batch to try next, and the knobs to try next. Nothing is run here.

`largest_batch` is a generator: it yields batches and is sent a `BatchResult` for each. `single_candidates` lists the
knobs of a step one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

from torch import nn

from memexplore.hardware.catalogue import Gpu
from memexplore.run.knobs.checkpoints.blocks import repeated
from memexplore.run.knobs.checkpoints.setting import Checkpoint, CheckpointKind
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_record import built_model

# --- the largest batch ----------------------------------------------------------------------------------------------

MAX_BATCH = 1 << 30
"""Upper end of the search for the largest batch."""
_ESTIMATES = 2
"""Batches estimated from bytes needed before the last estimate is closed in on: the first is often far off, as memory
may grow in steps."""
_GIVEN_ESTIMATES = 3
"""Estimates given with results that the search follows: a wrong one may be given again and again."""


class BatchResult(NamedTuple):
    """The result of running one batch: whether it fits and the bytes it needs (None if unknown)."""

    fits: bool
    needed: int | None
    estimate: Callable[[], int | None] | None = None
    """Returns a better estimate of the largest batch that fits than `needed` gives, if any; called where one is of
    use, as it takes time."""


class LargestBatch(NamedTuple):
    """The largest batch found, 0 where none fits; `proven` if the next larger one was run and does not fit."""

    samples: int
    proven: bool
    error: str = ""
    """Why no other batch than that of the step can be run, such as a state of the program that has its size; then
    nothing is known of other batches."""


def largest_batch(
    start: int,
    capacity: int,
    *,
    unit: int = 1,
    max_batch: int = MAX_BATCH,
    constant: int = 0,
    estimate: int | None = None,
) -> Generator[int, BatchResult, LargestBatch]:
    """Yield batches to run, and return the largest of those that fit; it and the next larger one were yielded.

    `start` comes first, then the `estimate`, or the batch that would fill `capacity` if memory grew linearly from
    `constant` bytes for no sample. Then the bytes needed by two batches give a better estimate, from which the search
    closes in, by bisection in the end. Estimates save runs and are never the answer. Every batch is a multiple of
    `unit`.

    >>> search = largest_batch(8, capacity=100, constant=30)
    >>> batches, batch = [], next(search)
    >>> try:
    ...     while True:
    ...         batches.append(batch)
    ...         batch = search.send(BatchResult(fits=30 + batch * 7 <= 100, needed=30 + batch * 7))
    ... except StopIteration as end:
    ...     print(batches, end.value)  # 30 + 10 * 7 = 100
    [8, 10, 11] LargestBatch(samples=10, proven=True, error='')
    """
    start, max_batch = max(unit, start // unit * unit), max(unit, max_batch // unit * unit)
    fitting: list[_Need] = [_Need(0, constant)]
    too_large: list[_Need] = []
    batch, estimates, given, reach = start, 0, 0, 0
    while True:
        result = yield batch
        (fitting if result.fits else too_large).append(_Need(batch, result.needed))
        low, high = fitting[-1], too_large[-1] if too_large else None
        if high is not None and high.batch - low.batch <= unit:
            return LargestBatch(low.batch, True)
        if high is None and low.batch >= max_batch:
            return LargestBatch(low.batch, False)
        farthest = min(low.batch * 16, max_batch) if high is None else high.batch - unit
        middle = low.batch * 2 if high is None else (low.batch + high.batch) // 2
        better = result.estimate() if result.estimate is not None and given < _GIVEN_ESTIMATES else None
        if better is not None:
            given, estimate = given + 1, better
        if high is None:
            one, other = fitting[-2:]
        else:
            # The constant is itself an estimate: two runs are more exact.
            one, other = (low, high) if low.batch or len(too_large) < 2 else (high, too_large[-2])
        target = estimate or _linear_estimate(one, other, capacity)
        if target is not None and (estimate is not None or estimates < _ESTIMATES):
            # A leap cut short at `farthest` does not count as an estimate; after a given estimate none is computed.
            if high is not None or target <= farthest:
                estimates, estimate = _ESTIMATES if estimate else estimates + 1, None
        elif estimates:
            # Near the last estimate first, then ever further from it, until the middle is nearer.
            reach = max(unit, reach * 4)
            if high is None:
                target = low.batch + reach
            else:
                target = min(low.batch + reach, middle) if result.fits else max(high.batch - reach, middle)
        else:
            target = middle
        batch = min(max(target // unit * unit, low.batch + unit), farthest)


class _Need(NamedTuple):
    batch: int
    needed: int | None


def _linear_estimate(one: _Need, other: _Need, capacity: int) -> int | None:
    """The batch that needs `capacity` bytes if memory grows linearly through two points; None if it does not grow."""
    if one.needed is None or other.needed is None or other.needed <= one.needed:
        return None
    return int(one.batch + (capacity - one.needed) * (other.batch - one.batch) / (other.needed - one.needed))


# --- which knobs ----------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """One knob with one value."""

    field: str
    knobs: Knobs
    alters: bool = False
    """Whether the value changes what is trained: the batch, the weights that train, the optimizer, no fp32 weights.

    Autocast is not counted as a change: it is designed to train the same."""


def altered(knobs: Knobs, model: nn.Module | None = None) -> frozenset[str]:
    """Return the fields by which a setting changes what is trained; with a `model`, micro-batches under batch norm too.

    >>> altered(Knobs(checkpoint="sqrt", accumulation=2)), altered(Knobs(precision="all bf16"))
    (frozenset(), frozenset({'precision'}))
    >>> altered(Knobs(accumulation=2), nn.Sequential(nn.BatchNorm1d(4)))
    frozenset({'accumulation'})
    """
    return frozenset(
        name for name, value in knobs.changed().items() if KNOBS[name].alters_training(value, model, knobs)
    )


def single_candidates(step: Step, gpu: Gpu, base: Knobs | None = None) -> tuple[Candidate, ...]:
    """Return the knobs that may save memory in a step, one at a time, those that train the same first.

    `base` has the batch and the input size of the step, by default as written.
    """
    base, model = base or Knobs(), built_model(step)
    explored = Explored(
        model=model,
        batch=base.batch or step.batch_size,
        input_size=base.input_size or step.input_size,
        are_images=step.size_dimensions.stop - step.size_dimensions.start == 2,
    )
    settings = [Knobs(**{name: value}) for name, knob in KNOBS.items() for value in knob.candidates(explored, gpu)]
    return tuple(sorted((candidate(knobs, model) for knobs in settings), key=lambda one: one.alters))


def small_moves(step: Step) -> tuple[Candidate, ...]:
    """Return settings that save little memory and cost little, for a step that misses few bytes: one block recomputed.

    >>> import torch
    >>> blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(4)]
    >>> [str(one.knobs) for one in small_moves(Step(nn.Sequential(*blocks), torch.zeros(2, 4), loss=torch.mean))]
    ['checkpoint layers 2']
    """
    names = repeated(built_model(step))
    if len(names) < 2:
        return ()
    # Not the last: it is recomputed at the start of backward, at the peak.
    checkpoint = Checkpoint(CheckpointKind.LAYERS, layers=(names[len(names) // 2],))
    return (candidate(Knobs(checkpoint=checkpoint), built_model(step)),)


def candidate(knobs: Knobs, model: nn.Module) -> Candidate:
    """Return a setting of one knob as a `Candidate`."""
    return Candidate(next(iter(knobs.changed())), knobs, bool(altered(knobs, model)))
