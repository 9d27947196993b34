"""The search for settings of a step that fit a GPU, each of them run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from memexplore import devices
from memexplore.tradeoffs import frontier
from memexplore.whatif import code
from memexplore.whatif.knobs import Knobs
from memexplore.whatif.searching import moves as search
from memexplore.whatif.searching.advice import Advice, Option, rank, unbeaten
from memexplore.whatif.searching.measured import Measured, extra_flops, slow_down
from memexplore.whatif.searching.moves import Largest, Place, Tried
from memexplore.whatif.searching.sweep import Progress, RunAll, left, print_progress, running
from memexplore.whatif.searching.workers import Done
from memexplore.whatif.step import Step
from memexplore.whatif.trial import built

if TYPE_CHECKING:
    import torch

_ROUND = 8
"""Settings run at once: enough for several processes, few enough to learn from."""
_SIDE_BY_SIDE = 2
"""Settings whose largest batch is looked for at once: so the first ones have theirs when the budget is used up."""
_SMALLER = 4
"""So many of the settings that do not fit are tried with a smaller batch."""


def advise(
    step: Step,
    gpu: str = "T4",
    *,
    release: str | None = None,
    executor: Executor | None = None,
    budget: int = 100,
    progress: Callable[[Progress], object] | None = print_progress,
) -> Advice:
    """Search the knobs for settings with which a step fits a GPU, and run each that is told.

    First the step as written and every knob alone, then knobs together where they promise to fit, until nothing better
    is found; then larger GPUs for the step as written, smallest memory first; then the largest batch of each setting.
    `budget` is the most runs of all these together. The order of the answer: as written where that fits; then what
    trains the same (autocast counts as the same, and micro-batches where there is no batch norm); then what trains
    something else; each by expected time, then by the number of knobs; a larger GPU last. For `executor` and `progress`
    see `sweep`.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=torch.mean, optimizer=torch.optim.SGD)
    >>> advice = advise(step, "T4", budget=4, progress=None)
    >>> advice.fits, str(advice.options[0].knobs)
    (True, 'as written')

    Raises what the step raises as written, ValueError for a budget below 1, and as `sweep` does.
    """
    if budget < 1:
        raise ValueError(f"budget={budget} allows no run: give the number of runs that the search may take")
    device = devices.find(gpu)
    with running(step, gpu=gpu, release=release, executor=executor, expected=budget) as run_all:
        runs = _Runs(run_all, built(step), budget, progress)
        runs.run([Knobs()])
        if Knobs() in runs.errors:
            raise runs.errors[Knobs()]
        _search(runs, search.moves(step, device), device.capacity)
        bigger = [] if runs.found[Knobs()].fits else _bigger(runs, device)
        largest = _largest(runs, _chosen(runs), step.batch_size, device.capacity)
        runs.end()
    # Batches that were tried on the way to the largest are no settings that somebody asked for.
    tried = [measured for knobs, measured in runs.found.items() if knobs.gpu is None and knobs.batch is None]
    written = runs.found[Knobs()]
    smaller = [
        runs.found[knobs.replace(batch=found.samples)]
        for knobs, found in largest.items()
        if not runs.found[knobs].fits and 0 < found.samples < step.batch_size
    ]
    candidates = [*(measured for measured in tried if measured.fits), *smaller]
    options = [_option(step, measured, written, largest.get(measured.knobs)) for measured in candidates]
    options = unbeaten(sorted(options, key=rank))
    options += [_option(step, measured, written, None) for measured in bigger]
    return Advice(device, written, tuple(options), (*tried, *smaller), runs.errors, largest)


class _Runs:
    """All that has been run, and how much more may be."""

    def __init__(
        self, run_all: RunAll, model: torch.nn.Module, budget: int, progress: Callable[[Progress], object] | None
    ) -> None:
        self.model = model
        self._run_all = run_all
        self._progress = progress
        self._budget = budget
        self._finished: list[float] = []
        self._start = time.monotonic()
        self.found: dict[Knobs, Measured] = {}
        self.errors: dict[Knobs, BaseException] = {}

    @property
    def left(self) -> int:
        """Runs that may still be made."""
        return self._budget - len(self._finished)

    def run(self, settings: Iterable[Knobs]) -> None:
        """Run settings that were not, in order, as many as may be."""
        new = [knobs for knobs in dict.fromkeys(settings) if knobs not in self.found and knobs not in self.errors]
        new = new[: self.left]
        results: dict[Knobs, Measured | BaseException] = {}
        for result in self._run_all(new) if new else ():
            if isinstance(result, Done):
                results[result.measured.knobs] = result.measured
            else:
                results[result.knobs] = result.error
            self._finished.append(time.monotonic() - self._start)
            self._tell(self._budget, sum(isinstance(result, BaseException) for result in results.values()))
        # In the order asked, whatever the order in which processes answered: the same search every time.
        for knobs in new:
            value = results[knobs]
            if isinstance(value, Measured):
                self.found[knobs] = value
            else:
                self.errors[knobs] = value

    def end(self) -> None:
        """Tell that no more will be run."""
        if self.left:
            self._tell(len(self._finished), 0)

    def _tell(self, total: int, failed: int) -> None:
        if self._progress is not None:
            seconds = self._finished[-1]
            done = len(self._finished)
            self._progress(Progress(done, len(self.errors) + failed, total, seconds, left(self._finished, total)))

    def places(self) -> dict[Knobs, Place]:
        """The settings of the batch and the GPU asked for, in the search."""
        written = self.found[Knobs()]
        return {
            knobs: Place(slow_down(measured, written), measured.peak_reserved, measured.fits)
            for knobs, measured in self.found.items()
            if knobs.batch is None and knobs.gpu is None
        }


def _search(runs: _Runs, moves: tuple[search.Move, ...], capacity: int) -> None:
    """Run every knob alone, then several together."""
    runs.run(move.knobs for move in moves)
    moves = (*moves, *_micro_batches(runs))
    # Half of what is left is for batches and larger GPUs.
    enough = runs.left // 2
    while runs.left > enough:
        told = _told(runs)
        useful = search.useful(moves, runs.places())
        following = search.combined(useful, runs.places(), runs.errors, capacity, min(_ROUND, runs.left - enough))
        runs.run(following)
        if not following or (told and _told(runs) == told):
            return


def _micro_batches(runs: _Runs) -> list[search.Move]:
    """Cut the batch into ever more parts, for as long as it does not fit and each cut helps."""
    found: list[search.Move] = []
    counts, least = search.accumulations(runs.found[Knobs()].samples), runs.found[Knobs()].peak_reserved
    for before, count in itertools.pairwise(counts):
        measured = runs.found.get(Knobs(accumulation=before))
        if measured is None or measured.fits or measured.peak_reserved >= least:
            break
        least = measured.peak_reserved
        knobs = Knobs(accumulation=count)
        runs.run([knobs])
        found.append(search.move_of(knobs, runs.model))
    return found


def _told(runs: _Runs) -> list[Knobs]:
    """The settings of the batch asked for that fit and will be told, in order."""
    written = runs.found[Knobs()]
    fitting = [
        _plain_option(runs.found[knobs], written, runs.model) for knobs, place in runs.places().items() if place.fits
    ]
    return [option.knobs for option in unbeaten(sorted(fitting, key=rank))]


def _chosen(runs: _Runs) -> list[Knobs]:
    """Settings whose largest batch is worth knowing: those that are told, and some that may fit with a smaller one."""
    places = runs.places()
    others = [knobs for knobs, place in places.items() if not place.fits]
    best = [others[number] for number in frontier([places[knobs][:2] for knobs in others])]
    # Where the step fits as written it is the first of those told.
    return list(dict.fromkeys([Knobs(), *_told(runs), *best[:_SMALLER]]))


def _largest(runs: _Runs, chosen: list[Knobs], samples: int, capacity: int) -> dict[Knobs, Largest]:
    """The largest batch of each setting, a few looked for at a time."""
    if len(chosen) > _SIDE_BY_SIDE:
        first = _largest(runs, chosen[:_SIDE_BY_SIDE], samples, capacity)
        return first | _largest(runs, chosen[_SIDE_BY_SIDE:], samples, capacity)
    found: dict[Knobs, Largest] = {}
    searches: dict[Knobs, Generator[int, Tried, Largest]] = {}
    asked: dict[Knobs, int] = {}
    for knobs in chosen:
        searches[knobs] = search.largest_batch(samples, capacity, unit=knobs.accumulation or 1)
        asked[knobs] = next(searches[knobs])
    while asked:
        settings = {knobs: knobs if batch == samples else knobs.replace(batch=batch) for knobs, batch in asked.items()}
        runs.run(settings.values())
        # Where the budget is used up, the rest of the searches has no answer.
        for knobs in list(asked):
            measured = runs.found.get(settings[knobs])
            if measured is None and settings[knobs] not in runs.errors:
                del asked[knobs]
                continue
            tried = Tried(measured.fits, measured.peak_reserved) if measured is not None else Tried(False, None)
            try:
                asked[knobs] = searches[knobs].send(tried)
            except StopIteration as end:
                del asked[knobs]
                found[knobs] = end.value
    return found


def _bigger(runs: _Runs, device: devices.Gpu) -> list[Measured]:
    """The step as written on the GPU of least memory, beyond the one asked for, on which it fits."""
    needs: dict[Any, int] = {}
    for name in devices.gpus().index:
        gpu = devices.find(name)
        # What is allocated depends on the compute capability and not on the capacity, so it has to be run once.
        if gpu.capacity <= device.capacity or gpu.capacity < needs.get(gpu.compute_capability, 0):
            continue
        knobs = Knobs(gpu=name)
        if not runs.left:
            return []
        runs.run([knobs])
        measured = runs.found.get(knobs)
        if measured is None:
            continue
        if measured.fits:
            return [measured]
        needs[gpu.compute_capability] = measured.peak_allocated
    return []


def _plain_option(measured: Measured, written: Measured, model: torch.nn.Module) -> Option:
    pace, more = slow_down(measured, written), extra_flops(measured, written)
    return Option(measured, pace, more, search.alters(measured.knobs, model), None, "")


def _option(step: Step, measured: Measured, written: Measured, largest: Largest | None) -> Option:
    plain = _plain_option(measured, written, built(step))
    return plain._replace(largest=largest, code=code.lines(step, measured.knobs))
