"""The largest batch of settings, searched side by side."""

from __future__ import annotations

from collections.abc import Generator

from memexplore.analysis.tradeoffs import frontier
from memexplore.knobs.knobs import Knobs
from memexplore.search import candidates as search
from memexplore.search.batch_extrapolation import likely_batch
from memexplore.search.candidates import Largest, Tried
from memexplore.search.run_log import Runs

_SMALLER = 4
"""So many of the settings that do not fit are tried with a smaller batch."""
_RUNS = 4
"""Runs that the search for a largest batch takes, about: for the estimate of the time left."""
_DEAR = 4
"""From so many micro-batches on, the largest batch is first looked for without them: a run takes that much less."""


def expect(runs: Runs, count: int, settings: int | None = None) -> None:
    """Have the progress tell of largest batches that are to be found, after so many runs in all of other settings."""
    runs.expected = (runs.done if settings is None else settings) + _RUNS * count


def promising(runs: Runs) -> list[Knobs]:
    """Settings that do not fit and may with a smaller batch, what trains the same first; the step as written always."""
    if runs.suits():
        return [Knobs()]
    places, capacity = runs.places(), runs.device.capacity
    # A smaller batch needs no micro-batches, and helps nothing where weights and their gradients are too much.
    hopeful = [
        knobs
        for knobs, place in places.items()
        if not place.fits and not knobs.accumulation and place.constant < capacity
    ]
    best = [hopeful[number] for number in frontier([places[knobs][:2] for knobs in hopeful])]
    best.sort(key=lambda knobs: (len(search.altered(knobs, runs.model)), places[knobs].time))
    return list(dict.fromkeys([Knobs(), *best[:_SMALLER]]))


def largest(runs: Runs, settings: list[Knobs]) -> dict[Knobs, Largest]:
    """The largest batch of each setting, all of which were run with the batch of the step."""
    dear = [knobs for knobs in settings if (knobs.accumulation or 1) >= _DEAR]
    plain = {knobs: knobs.replace(accumulation=None) for knobs in dear}
    expect(runs, len({*settings, *plain.values()}))
    first = dict.fromkeys([*(knobs for knobs in settings if knobs not in plain), *plain.values()])
    found = _side_by_side(runs, {knobs: _search(runs, knobs) for knobs in first})
    expect(runs, len(dear))
    again = {
        knobs: _search(runs, knobs, (knobs.accumulation or 1) * found[whole].samples) for knobs, whole in plain.items()
    }
    found |= _side_by_side(runs, again)
    return {knobs: found[knobs] for knobs in settings}


def _search(runs: Runs, knobs: Knobs, hint: int | None = None) -> Generator[int, Tried, Largest]:
    unit = knobs.accumulation or 1
    known = runs.found.get(knobs)
    if known is None:
        # Micro-batches of what fits with them are the best guess of what fits without.
        others = [one for one in runs.found if one.replace(accumulation=None, batch=None) == knobs and one.accumulation]
        count = max((one.accumulation or 1 for one in others), default=1)
        return search.largest_batch(max(1, runs.samples // count), runs.device.capacity)
    return search.largest_batch(runs.samples, known.capacity, unit=unit, constant=known.constant, hint=hint or None)


def _side_by_side(runs: Runs, searches: dict[Knobs, Generator[int, Tried, Largest]]) -> dict[Knobs, Largest]:
    found: dict[Knobs, Largest] = {}
    asked = {knobs: next(asking) for knobs, asking in searches.items()}
    answered: dict[Knobs, dict[int, Knobs]] = {knobs: {} for knobs in searches}
    while asked:
        settings = {
            knobs: knobs if batch == runs.samples and knobs in runs.found else knobs.replace(batch=batch)
            for knobs, batch in asked.items()
        }
        runs.run(settings.values())
        for knobs, batch in list(asked.items()):
            one = runs.found.get(settings[knobs])
            answered[knobs][batch] = settings[knobs]
            # A batch that cannot be run, such as one too large for an index, does not fit.
            tried = Tried(one.fits, one.peak_reserved, _likely(runs, answered[knobs])) if one else Tried(False, None)
            try:
                asked[knobs] = searches[knobs].send(tried)
            except StopIteration as end:
                del asked[knobs]
                found[knobs] = end.value
    return found


def _likely(runs: Runs, answered: dict[int, Knobs]) -> int | None:
    """What two runs say of the largest batch; more are nearer to it than a guess."""
    if len(answered) != 2 or not all(knobs in runs.tapes for knobs in answered.values()):
        return None
    *_, knobs = answered.values()
    tapes = {batch: runs.tapes[setting] for batch, setting in answered.items()}
    return likely_batch(tapes, runs.found[knobs].capacity, knobs.accumulation or 1)
