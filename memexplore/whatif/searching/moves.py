"""What to try next: the largest batch that fits, and which knobs to turn together. No run happens here."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import NamedTuple

from torch import nn

from memexplore.devices import Gpu
from memexplore.tradeoffs import frontier
from memexplore.whatif.apply import micro_batch_notes
from memexplore.whatif.checkpoints.blocks import repeated
from memexplore.whatif.knobs import Knobs, Optimizer, Precision, conflicts
from memexplore.whatif.step import Step
from memexplore.whatif.trial import built

# --- the largest batch ----------------------------------------------------------------------------------------------

MOST_SAMPLES = 1 << 16
"""No larger batch is looked for."""


class Tried(NamedTuple):
    """One batch that was tried: whether it fits, and the bytes it needs (None where that is not known)."""

    fits: bool
    needs: int | None


class Largest(NamedTuple):
    """The largest batch found, 0 where none fits; `proven` where the next larger one was run and does not fit."""

    samples: int
    proven: bool


def largest_batch(
    start: int, capacity: int, *, unit: int = 1, most: int = MOST_SAMPLES
) -> Generator[int, Tried, Largest]:
    """Ask for batches to try, and return the largest of those that fit; it and the next were asked for.

    It grows until one does not fit, guesses from the needs of two as if memory grew evenly, and closes in from there,
    by bisection at last: so the guess saves runs and is never an answer. `unit` divides every batch asked for.

    >>> asking = largest_batch(8, capacity=100)
    >>> asked, answer = [], next(asking)
    >>> try:
    ...     while True:
    ...         asked.append(answer)
    ...         answer = asking.send(Tried(fits=answer * 7 <= 100, needs=answer * 7))
    ... except StopIteration as end:
    ...     print(asked, end.value)  # 14 * 7 = 98
    [8, 16, 14, 15] Largest(samples=14, proven=True)
    """
    start, most = max(unit, start // unit * unit), max(unit, most // unit * unit)
    fitting: list[_Known] = [_Known(0, None)]
    beyond: _Known | None = None
    batch, reach = start, 0
    while True:
        tried = yield batch
        if tried.fits:
            fitting.append(_Known(batch, tried.needs))
        else:
            beyond = _Known(batch, tried.needs)
        low = fitting[-1]
        if beyond is None:
            if low.batch >= most:
                return Largest(low.batch, False)
            # Twice as many, and more where two needs say that there is room.
            wanted = _even(fitting[-2], low, capacity) or low.batch * 2
            batch = min(max(wanted // unit * unit, low.batch + unit), low.batch * 16, most)
            continue
        if beyond.batch - low.batch <= unit:
            return Largest(low.batch, True)
        wanted = (low.batch + beyond.batch) // 2
        if reach:
            # Near the guess first, then ever further from it, until the middle is nearer.
            wanted = min(low.batch + reach, wanted) if tried.fits else max(beyond.batch - reach, wanted)
            reach *= 4
        elif (guess := _even(low, beyond, capacity)) is not None:
            wanted, reach = guess, unit
        batch = min(max(wanted // unit * unit, low.batch + unit), beyond.batch - unit)


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


def alters(knobs: Knobs, model: nn.Module | None = None) -> bool:
    """Whether a setting trains something else than the step as written; a model tells whether micro-batches do.

    >>> alters(Knobs(checkpoint="sqrt", accumulation=2)), alters(Knobs(precision="all bf16"))
    (False, True)
    >>> alters(Knobs(accumulation=2), nn.Sequential(nn.BatchNorm1d(4)))
    True
    """
    changed = knobs.changed()
    if any(name in changed for name in ALTERING) or knobs.precision is Precision.ALL_BF16:
        return True
    return model is not None and bool(micro_batch_notes(knobs, model))


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
    if step.sized.stop - step.sized.start == 2:
        found.append(Knobs(memory_format="channels last"))  # type: ignore[arg-type]
    if gpu.compute_capability >= (8, 0):
        found.append(Knobs(precision="all bf16"))  # type: ignore[arg-type]
    found += [Knobs(optimizer=kind) for kind in (Optimizer.ADAFACTOR, Optimizer.MOMENTUM)]
    # Adapters go where the repeated blocks are, not onto the head that is trained for the task.
    parents = dict.fromkeys(name.rpartition(".")[0] or name for name in repeated(built(step)))
    if parents:
        found.append(Knobs(lora=tuple(parents)))
    return tuple(move_of(knobs, built(step)) for knobs in found)


def move_of(knobs: Knobs, model: nn.Module) -> Move:
    """One knob that is turned, as a move."""
    return Move(next(iter(knobs.changed())), knobs, alters(knobs, model))


def accumulations(batch: int) -> tuple[int, ...]:
    """Numbers of micro-batches to try: divisors of the batch beyond 1, each at least twice the one before.

    >>> accumulations(48), accumulations(7), accumulations(1)
    ((2, 4, 8, 16, 48), (7,), ())
    """
    found: list[int] = []
    for count in range(2, batch + 1):
        if batch % count == 0 and (not found or count >= 2 * found[-1]):
            found.append(count)
    return tuple(found)


class Place(NamedTuple):
    """A setting in the search: expected time of a sample (as written 1), bytes needed."""

    time: float
    needs: int
    fits: bool


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


def combined(
    found: Iterable[Move], places: Mapping[Knobs, Place], failed: Iterable[Knobs], capacity: int, count: int
) -> list[Knobs]:
    """The next `count` settings to run: what was tried with one more knob turned, the most promising first.

    A setting that fits gets only knobs that make it quicker: anything else would cost and gain nothing. The order is
    that of a guess from the single knobs' ratios; what is answered is always a run.
    """
    written = places[Knobs()]
    found = tuple(found)
    turned = [(move.knobs.changed().items(), move.alters) for move in found]
    other_training = {
        knobs for knobs in places if any(altering and its <= knobs.changed().items() for its, altering in turned)
    }
    seen = {*places, *failed}
    candidates: dict[Knobs, tuple[object, ...]] = {}
    useful_ones = {change for changes, _ in turned for change in changes}
    for knobs, place in places.items():
        if not knobs.changed().items() <= useful_ones:
            continue
        for move in found:
            single = places[move.knobs]
            if move.field in knobs.changed() or (place.fits and single.time >= written.time):
                continue
            both = knobs.replace(**move.knobs.changed())
            if both in seen or conflicts(both):
                continue
            time, needs = place.time * single.time, place.needs * single.needs / max(written.needs, 1)
            promising = needs <= capacity
            altering = move.alters or knobs in other_training
            order = (altering, not promising, time if promising else needs, len(both.changed()), str(both))
            candidates[both] = min(order, candidates.get(both, order))  # type: ignore[type-var]
    return sorted(candidates, key=lambda knobs: candidates[knobs])[:count]  # type: ignore[arg-type, return-value]
