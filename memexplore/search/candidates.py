"""Candidates of a search: the batch to try next, and the knobs to try next. Nothing is run here.

`largest_batch` is a generator: it yields batches and is sent a `BatchResult` for each. `single_candidates` lists the
knobs of a step one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import NamedTuple

from torch import nn

from memexplore.gpu_catalogue import Gpu
from memexplore.knobs.apply import micro_batch_notes
from memexplore.knobs.checkpoints.blocks import repeated
from memexplore.knobs.choices import CheckpointKind, Optimizer, Precision, Update
from memexplore.knobs.knobs import Checkpoint, Knobs
from memexplore.steps.step import Step
from memexplore.steps.step_record import built_model

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


ALTERING = ("batch", "optimizer", "lora", "frozen", "input_size", "mode")
"""Fields of `Knobs` that change what is trained."""


def altered(knobs: Knobs, model: nn.Module | None = None) -> frozenset[str]:
    """Return the fields by which a setting changes what is trained; with a `model`, micro-batches under batch norm too.

    >>> altered(Knobs(checkpoint="sqrt", accumulation=2)), altered(Knobs(precision="all bf16"))
    (frozenset(), frozenset({'precision'}))
    >>> altered(Knobs(accumulation=2), nn.Sequential(nn.BatchNorm1d(4)))
    frozenset({'accumulation'})
    """
    fields = set(ALTERING) & set(knobs.changed())
    if knobs.precision is Precision.ALL_BF16:
        fields.add("precision")
    if model is not None and micro_batch_notes(knobs, model):
        fields.add("accumulation")
    return frozenset(fields)


def single_candidates(step: Step, gpu: Gpu, base: Knobs | None = None) -> tuple[Candidate, ...]:
    """Return the knobs that may save memory in a step, one at a time, those that train the same first.

    `base` has the batch and the input size of the step, by default as written.
    """
    base = base or Knobs()
    settings = [
        Knobs(inplace="on"),
        *(Knobs(checkpoint=text) for text in ("keep matmuls", "norms", "every 2", "sqrt", "every 1")),
        # Before compute capability 8.0 a GPU has no units for bf16.
        Knobs(precision="bf16" if gpu.compute_capability >= (8, 0) else "fp16"),
        *(Knobs(accumulation=count) for count in micro_batch_counts(base.batch or step.batch_size)),
        *(Knobs(update=update) for update in (Update.PER_TENSOR, Update.FUSED, Update.IN_BACKWARD)),
        Knobs(offload="saved tensors on the CPU"),
        Knobs(settings="expandable_segments:True"),
    ]
    if step.size_dimensions.stop - step.size_dimensions.start == 2:
        settings.append(Knobs(memory_format="channels last"))
    if gpu.compute_capability >= (8, 0):
        settings.append(Knobs(precision="all bf16"))
    settings += [Knobs(optimizer=kind) for kind in (Optimizer.ADAFACTOR, Optimizer.MOMENTUM)]
    # Adapters belong in the repeated blocks, not on the head that is trained for the task.
    parents = dict.fromkeys(name.rpartition(".")[0] or name for name in repeated(built_model(step)))
    if parents:
        settings.append(Knobs(lora=tuple(parents)))
    settings += [Knobs(frozen=names) for names in blocks_to_freeze(built_model(step))]
    settings += [Knobs(input_size=size) for size in smaller_input_sizes(step, base.input_size)]
    return tuple(candidate(knobs, built_model(step)) for knobs in settings)


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


def blocks_to_freeze(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return layers to freeze: the first half of the repeated blocks, and all but the last quarter of them.

    All layers registered before these blocks are included: while an embedding trains, backward reaches down to it, and
    the frozen blocks in between keep their activations.

    >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(4)]
    >>> blocks_to_freeze(nn.Sequential(nn.Embedding(9, 4), *layers, nn.LayerNorm(4)))
    (('0', '1', '2'), ('0', '1', '2', '3'))
    """
    names = repeated(model)
    counts = dict.fromkeys((len(names) // 2, len(names) - max(1, len(names) // 4))) if len(names) > 1 else ()
    return tuple(_layers_through(model, model.get_submodule(names[count - 1])) for count in counts)


def _layers_through(model: nn.Module, last: nn.Module) -> tuple[str, ...]:
    """The fewest layers that together have all weights registered up to the end of `last`."""
    weights = list(model.parameters())
    ends = {id(weight) for weight in last.parameters()}
    end = max(number for number, weight in enumerate(weights) if id(weight) in ends)
    remaining = {id(weight) for weight in weights[: end + 1]}
    wanted = frozenset(remaining)
    names: list[str] = []
    for name, module in model.named_modules():
        own = {id(weight) for weight in module.parameters()}
        # Layers inside a chosen one, and layers whose weights are shared with one, have no remaining weight.
        if own & remaining and own <= wanted:
            names.append(name)
            remaining -= own
    return tuple(names)


def smaller_input_sizes(step: Step, size: int | None = None) -> tuple[int, ...]:
    """Return about three quarters and half of the input size, as multiples of its common divisor with 32.

    `size` is the input size, by default that of the step.

    >>> import torch
    >>> smaller_input_sizes(Step(nn.Conv2d(3, 8, 3), torch.zeros(2, 3, 224, 224)))
    (160, 128)
    """
    size = step.input_size if size is None else size
    if size is None:
        return ()
    grain = math.gcd(size, 32)
    rounded = (max(1, int(size * share / grain + 0.5)) * grain for share in (0.75, 0.5))
    return tuple(dict.fromkeys(smaller for smaller in rounded if smaller < size))


_MAX_MICRO_BATCHES = 64
"""Each micro-batch is traced: more of them would take too long."""


def micro_batch_counts(batch: int) -> tuple[int, ...]:
    """Return numbers of micro-batches to try: divisors of the batch from 2 to 64, each at least twice the one before.

    >>> micro_batch_counts(48), micro_batch_counts(7), micro_batch_counts(1)
    ((2, 4, 8, 16, 48), (7,), ())
    """
    counts: list[int] = []
    for count in range(2, min(batch, _MAX_MICRO_BATCHES) + 1):
        if batch % count == 0 and (not counts or count >= 2 * counts[-1]):
            counts.append(count)
    return tuple(counts)
