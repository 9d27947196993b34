"""What to try next: the largest batch that fits, and which knobs to turn together. No run happens here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from memexplore.analysis.tradeoffs import frontier
from memexplore.gpu_catalogue import Gpu
from memexplore.knobs.apply import micro_batch_notes
from memexplore.knobs.checkpoints.blocks import repeated
from memexplore.knobs.knobs import Knobs, Optimizer, Precision, conflicts
from memexplore.steps.step import Step
from memexplore.steps.step_record import built_model

# --- the largest batch ----------------------------------------------------------------------------------------------

MOST_SAMPLES = 1 << 30
"""No larger batch is looked for."""
_GUESSES = 2
"""Batches guessed from needs before it is closed in on the last: the first is far off where needs grow by steps."""


class Tried(NamedTuple):
    """One batch that was tried: whether it fits, and the bytes it needs (None where that is not known)."""

    fits: bool
    needs: int | None
    likely: int | None = None
    """The largest batch that fits, where there is a better guess than from what was needed."""


class Largest(NamedTuple):
    """The largest batch found, 0 where none fits; `proven` where the next larger one was run and does not fit."""

    samples: int
    proven: bool


def largest_batch(
    start: int,
    capacity: int,
    *,
    unit: int = 1,
    most: int = MOST_SAMPLES,
    constant: int = 0,
    hint: int | None = None,
) -> Generator[int, Tried, Largest]:
    """Ask for batches to try, and return the largest of those that fit; it and the next were asked for.

    After `start` it asks for the `hint`, or for what would fit if memory grew evenly from `constant` bytes without any
    sample; then for what two needs say, and closes in from there, by bisection at last. So guesses save runs and are
    never an answer. `unit` divides every batch asked for.

    >>> asking = largest_batch(8, capacity=100, constant=30)
    >>> asked, answer = [], next(asking)
    >>> try:
    ...     while True:
    ...         asked.append(answer)
    ...         answer = asking.send(Tried(fits=30 + answer * 7 <= 100, needs=30 + answer * 7))
    ... except StopIteration as end:
    ...     print(asked, end.value)  # 30 + 10 * 7 = 100
    [8, 10, 11] Largest(samples=10, proven=True)
    """
    start, most = max(unit, start // unit * unit), max(unit, most // unit * unit)
    fitting: list[_Known] = [_Known(0, constant)]
    above: list[_Known] = []
    batch, guesses, reach = start, 0, 0
    while True:
        tried = yield batch
        if tried.fits:
            fitting.append(_Known(batch, tried.needs))
        else:
            above.append(_Known(batch, tried.needs))
        low, beyond = fitting[-1], above[-1] if above else None
        if beyond is not None and beyond.batch - low.batch <= unit:
            return Largest(low.batch, True)
        if beyond is None and low.batch >= most:
            return Largest(low.batch, False)
        farthest = min(low.batch * 16, most) if beyond is None else beyond.batch - unit
        middle = low.batch * 2 if beyond is None else (low.batch + beyond.batch) // 2
        hint = hint or tried.likely
        if beyond is None:
            one, other = fitting[-2:]
        else:
            # The constant is a guess itself: two runs know better.
            one, other = (low, beyond) if low.batch or len(above) < 2 else (beyond, above[-2])
        wanted = hint or _even(one, other, capacity)
        if wanted is not None and guesses < _GUESSES:
            # A leap that is cut short is no guess yet, and after a hint there is nothing to be guessed.
            if beyond is not None or wanted <= farthest:
                guesses, hint = _GUESSES if hint else guesses + 1, None
        elif guesses:
            # Near the last guess first, then ever further from it, until the middle is nearer.
            reach = max(unit, reach * 4)
            if beyond is None:
                wanted = low.batch + reach
            else:
                wanted = min(low.batch + reach, middle) if tried.fits else max(beyond.batch - reach, middle)
        else:
            wanted = middle
        batch = min(max(wanted // unit * unit, low.batch + unit), farthest)


class _Known(NamedTuple):
    batch: int
    needs: int | None


def _even(one: _Known, other: _Known, capacity: int) -> int | None:
    """The batch that would need just the capacity if needs grew evenly; None where that cannot be told."""
    if one.needs is None or other.needs is None or other.needs <= one.needs:
        return None
    return int(one.batch + (capacity - one.needs) * (other.batch - one.batch) / (other.needs - one.needs))


# --- which knobs ----------------------------------------------------------------------------------------------------


class Move(NamedTuple):
    """One knob turned."""

    field: str
    knobs: Knobs
    alters: bool = False
    """Whether the training is another one then: another batch, fewer weights, another optimizer, no fp32 weights.

    Autocast counts as the same training, as it is meant to be."""


ALTERING = ("batch", "optimizer", "lora", "frozen", "input_size", "mode")
"""Fields that make another training of it."""


def altered(knobs: Knobs, model: nn.Module | None = None) -> frozenset[str]:
    """The fields by which a setting trains something else than the step as written; a model tells of micro-batches.

    >>> altered(Knobs(checkpoint="sqrt", accumulation=2)), altered(Knobs(precision="all bf16"))
    (frozenset(), frozenset({'precision'}))
    >>> altered(Knobs(accumulation=2), nn.Sequential(nn.BatchNorm1d(4)))
    frozenset({'accumulation'})
    """
    found = set(ALTERING) & set(knobs.changed())
    if knobs.precision is Precision.ALL_BF16:
        found.add("precision")
    if model is not None and micro_batch_notes(knobs, model):
        found.add("accumulation")
    return frozenset(found)


def moves(step: Step, gpu: Gpu) -> tuple[Move, ...]:
    """The single knobs that may save memory in a step, those that keep the training first."""
    found = [
        Knobs(inplace="on"),  # type: ignore[arg-type]
        *(Knobs(checkpoint=text) for text in ("keep matmuls", "norms", "every 2", "sqrt", "every 1")),  # type: ignore[arg-type]
        # Before compute capability 8.0 a GPU has no units for bf16.
        Knobs(precision="bf16" if gpu.compute_capability >= (8, 0) else "fp16"),  # type: ignore[arg-type]
        *(Knobs(accumulation=count) for count in accumulations(step.batch_size)[:1]),
        *(Knobs(update=text) for text in ("per tensor", "fused", "in backward")),  # type: ignore[arg-type]
        Knobs(offload="saved tensors on the CPU"),  # type: ignore[arg-type]
        Knobs(settings="expandable_segments:True"),
    ]
    if step.size_dimensions.stop - step.size_dimensions.start == 2:
        found.append(Knobs(memory_format="channels last"))  # type: ignore[arg-type]
    if gpu.compute_capability >= (8, 0):
        found.append(Knobs(precision="all bf16"))  # type: ignore[arg-type]
    found += [Knobs(optimizer=kind) for kind in (Optimizer.ADAFACTOR, Optimizer.MOMENTUM)]
    # Adapters go where the repeated blocks are, not onto the head that is trained for the task.
    parents = dict.fromkeys(name.rpartition(".")[0] or name for name in repeated(built_model(step)))
    if parents:
        found.append(Knobs(lora=tuple(parents)))
    found += [Knobs(frozen=names) for names in first_blocks(built_model(step))]
    found += [Knobs(input_size=size) for size in input_sizes(step)]
    return tuple(move_of(knobs, built_model(step)) for knobs in found)


def move_of(knobs: Knobs, model: nn.Module) -> Move:
    """One knob that is turned, as a move."""
    return Move(next(iter(knobs.changed())), knobs, bool(altered(knobs, model)))


def first_blocks(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Layers to freeze: those up to the middle of the repeated blocks, and those up to their last quarter.

    All that was registered before goes with them: while an embedding trains, backward comes down to it, and the frozen
    blocks in between keep their activations.

    >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(4)]
    >>> first_blocks(nn.Sequential(nn.Embedding(9, 4), *layers, nn.LayerNorm(4)))
    (('0', '1', '2'), ('0', '1', '2', '3'))
    """
    names = repeated(model)
    counts = dict.fromkeys((len(names) // 2, len(names) - max(1, len(names) // 4))) if len(names) > 1 else ()
    return tuple(_up_to(model, model.get_submodule(names[count - 1])) for count in counts)


def _up_to(model: nn.Module, last: nn.Module) -> tuple[str, ...]:
    """As few layers as have all weights that were registered before the end of one."""
    weights = list(model.parameters())
    ends = {id(weight) for weight in last.parameters()}
    end = max(number for number, weight in enumerate(weights) if id(weight) in ends)
    left = {id(weight) for weight in weights[: end + 1]}
    whole = frozenset(left)
    found: list[str] = []
    for name, module in model.named_modules():
        own = {id(weight) for weight in module.parameters()}
        # A layer below one that was found has none left, and neither has one whose weights are another's.
        if own & left and own <= whole:
            found.append(name)
            left -= own
    return tuple(found)


def input_sizes(step: Step) -> tuple[int, ...]:
    """About three quarters and half of the input size, in steps of up to 32 that divide it, as models may need it.

    >>> import torch
    >>> input_sizes(Step(nn.Conv2d(3, 8, 3), torch.zeros(2, 3, 224, 224)))
    (160, 128)
    """
    size = step.input_size
    if size is None:
        return ()
    grain = math.gcd(size, 32)
    near = (max(1, int(size * share / grain + 0.5)) * grain for share in (0.75, 0.5))
    return tuple(dict.fromkeys(found for found in near if found < size))


_FINEST = 64
"""So many micro-batches are tried at most: each is traced."""


def accumulations(batch: int) -> tuple[int, ...]:
    """Numbers of micro-batches to try: divisors of the batch from 2 to 64, each at least twice the one before.

    >>> accumulations(48), accumulations(7), accumulations(1)
    ((2, 4, 8, 16, 48), (7,), ())
    """
    found: list[int] = []
    for count in range(2, min(batch, _FINEST) + 1):
        if batch % count == 0 and (not found or count >= 2 * found[-1]):
            found.append(count)
    return tuple(found)


class Place(NamedTuple):
    """A setting in the search: expected time of a sample (as written 1), bytes needed."""

    time: float
    needs: int
    fits: bool
    constant: int = 0
    """Bytes of weights, gradients and optimizer state, which are needed whatever the batch."""


def useful(found: Iterable[Move], places: Mapping[Knobs, Place]) -> tuple[Move, ...]:
    """The moves worth combining: quicker or smaller than as written, not beaten by the same knob turned otherwise."""
    written = places[Knobs()]
    tried = [move for move in found if move.knobs in places]
    better = [
        move
        for move in tried
        if places[move.knobs].needs < written.needs or places[move.knobs].time < written.time * 0.99
    ]
    kept: set[Knobs] = set()
    for field, altering in dict.fromkeys((move.field, move.alters) for move in better):
        rivals = [move.knobs for move in better if (move.field, move.alters) == (field, altering)]
        best = frontier([(places[knobs].time, places[knobs].needs) for knobs in rivals])
        kept |= {rivals[number] for number in best}
    return tuple(move for move in better if move.knobs in kept)


BEARABLE = 1.5
"""Times as long as written: what trains the same and takes longer is no reason to try nothing else."""


def combined(
    found: Iterable[Move], places: Mapping[Knobs, Place], failed: Iterable[Knobs], capacity: int, count: int
) -> list[Knobs]:
    """The next `count` settings to run: what was tried with one more knob turned, the most promising first.

    The order is that of a guess from the single knobs' ratios: what promises to fit comes first, and of that what
    trains the same; ways to alter the training take turns. What is answered is always a run. Left out are:

    - knobs that make a setting that fits no quicker: anything else would cost and gain nothing;
    - settings that alter more of the training than one that fits at a bearable pace;
    - more micro-batches than fit, or promise to.
    """
    written, found = places[Knobs()], tuple(found)
    altering = [(move.knobs.changed().items(), move.field) for move in found if move.alters]

    def alterations(knobs: Knobs) -> tuple[str, ...]:
        return tuple(field for its, field in altering if its <= knobs.changed().items())

    bearable = [knobs for knobs, place in places.items() if place.fits and place.time <= written.time * BEARABLE]
    most = min((len(alterations(knobs)) for knobs in bearable), default=len(altering))
    fits_cut = {knobs.replace(accumulation=None) for knobs, place in places.items() if place.fits}
    seen = {*places, *failed}
    candidates: dict[Knobs, tuple[Any, ...]] = {}
    useful_ones = {change for move in found for change in move.knobs.changed().items()}
    for knobs, place in places.items():
        if not knobs.changed().items() <= useful_ones:
            continue
        for move in found:
            single = places[move.knobs]
            if move.field in knobs.changed() or (place.fits and single.time >= written.time):
                continue
            both = knobs.replace(**move.knobs.changed())
            if both in seen or conflicts(both) or len(alterations(both)) > most:
                continue
            if both.accumulation and both.replace(accumulation=None) in fits_cut:
                continue
            time, needs = place.time * single.time, place.needs * single.needs / max(written.needs, 1)
            constant = place.constant * single.constant / max(written.constant, 1)
            promising = needs <= capacity
            # Where weights, gradients and optimizer state alone are too much, no saving of activations helps.
            merit = (constant > capacity, not promising, len(alterations(both)), time if promising else needs)
            order = (*merit, len(both.changed()), str(both))
            candidates[both] = min(order, candidates.get(both, order))
    ordered = sorted(candidates, key=lambda knobs: candidates[knobs])
    cut: dict[Knobs, list[Knobs]] = {}
    for knobs in ordered:
        cut.setdefault(knobs.replace(accumulation=None), []).append(knobs)
    chosen = {_cut_enough(rivals, [knobs for knobs in rivals if not candidates[knobs][1]]) for rivals in cut.values()}
    # Ways to alter the training take turns: which of them a person can accept is not for the search to say.
    turns: Counter[tuple[Any, ...]] = Counter()
    places_of: dict[Knobs, tuple[Any, ...]] = {}
    for knobs in filter(chosen.__contains__, ordered):
        merit = candidates[knobs][:3]
        turns[merit, alterations(knobs)] += 1
        places_of[knobs] = (merit, turns[merit, alterations(knobs)])
    return sorted(places_of, key=lambda knobs: places_of[knobs])[:count]


def _cut_enough(rivals: list[Knobs], promising: list[Knobs]) -> Knobs:
    """Of settings that differ in their micro-batches, that with the fewest that promises to fit, else with the most."""
    if promising:
        return min(promising, key=lambda knobs: knobs.accumulation or 1)
    return max(rivals, key=lambda knobs: knobs.accumulation or 1)
