"""The search for settings of a step that fit a GPU, each of them run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Executor

from memexplore import gpu_catalogue, targets
from memexplore.capture import release_or_installed
from memexplore.codegen import lines
from memexplore.knobs.knobs import Knobs
from memexplore.search import batch_search
from memexplore.search import candidates as search
from memexplore.search.advice import Advice, Option
from memexplore.search.candidates import Largest
from memexplore.search.executors import running
from memexplore.search.larger_gpus import larger
from memexplore.search.run_log import Runs
from memexplore.search.sweep import Progress, print_progress
from memexplore.steps.outcome import run_unlimited
from memexplore.steps.step import Step

_ROUND = 8
"""Settings run at once: enough for several processes, few enough to learn from."""
_IDLE = 2
"""Rounds without anything better after which the search ends where nothing fits that trains the same."""
_NEARER = 0.98
"""A round has come nearer where a setting needs less than this share of what the nearest before it needs."""


def advise(
    step: Step,
    gpu: str | None = None,
    *,
    release: str | None = None,
    executor: Executor | None = None,
    budget: int = 60,
    progress: Callable[[Progress], object] | None = print_progress,
) -> Advice:
    """Search the knobs for settings with which a step fits a GPU, and run each that is told.

    First the step as written and every knob alone, then knobs together where they promise to fit, until nothing better
    is found: at most `budget` runs. Beyond these are run, as many as it takes: the step on larger GPUs, smallest memory
    first, where it does not fit as written; and for every setting that is told, batches, until the largest that fits
    and the next one, which does not, were both run. Where nothing fits at a bearable pace, the most promising settings
    are told with the largest batch that does. The order of the answer: as written where that fits; then what trains the
    same (autocast counts as the same, and micro-batches where there is no batch norm); then what trains something else
    (a smaller batch or input, frozen layers, adapters, another optimizer, no fp32 weights); each by expected time, then
    by the number of knobs; a larger GPU last. Inference is no training and never the advice for a training step.

    Default: the real GPU if usable, else a virtual T4. Advice is always predicted: ``cuda`` stands for the
    virtual GPU with the numbers of this machine's. For `executor` and `progress` see `sweep`; the total of `progress`
    is an estimate until the last run is done.

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=torch.mean, optimizer=torch.optim.SGD)
    >>> advice = advise(step, "T4", budget=4, progress=None)
    >>> advice.fits, str(advice.options[0].knobs)
    (True, 'as written')

    Raises what the step raises as written, ValueError for a budget below 1 and for the CPU, and as `sweep` does.
    """
    if budget < 1:
        raise ValueError(f"budget={budget} allows no run: give the number of runs that the search may take")
    gpu = _virtual(gpu or targets.default_target())
    device = gpu_catalogue.find(gpu).under(release_or_installed(release))
    with running(
        step, gpu=gpu, release=release, executor=executor, expected=budget, run_setting=run_unlimited
    ) as run_all:
        runs = Runs(run_all, step, device, progress)
        runs.expected = budget
        runs.run([Knobs()])
        if Knobs() in runs.errors:
            raise runs.errors[Knobs()]
        _search(runs, search.moves(step, device), budget)
        bigger, too_small = larger(runs, release)
        options, largest = _with_batches(runs, bigger)
        runs.end()
    # Batches that were tried on the way to the largest are no settings that somebody asked for.
    tried = [one for knobs, one in runs.found.items() if knobs.gpu is None and knobs.batch is None]
    smaller = [option.outcome for option in options if option.knobs.batch is not None]
    return Advice(
        gpu=device,
        as_written=runs.found[Knobs()],
        options=tuple(option._replace(code=lines.lines(step, option.knobs)) for option in options),
        tried=(*tried, *smaller),
        errors={knobs: error for knobs, error in runs.errors.items() if knobs.batch is None and knobs.gpu is None},
        largest=largest,
        same=frozenset(one.knobs for one in tried if not search.altered(one.knobs, runs.model)),
        too_small=too_small,
    )


def _virtual(gpu: str) -> str:
    """The catalogue's name of the GPU that is searched for."""
    if gpu == targets.CPU:
        raise ValueError("advice is what fits a GPU: give gpu= the name of one, such as T4")
    return targets.gpu_of(gpu).key if targets.is_real(gpu) else gpu


def _search(runs: Runs, moves: tuple[search.Move, ...], budget: int) -> None:
    """Run every knob alone, then several together, until that is of no more use."""
    batch_search.expect(runs, 1, budget)
    runs.run([move.knobs for move in moves][: budget - runs.done])
    moves = (*moves, *_micro_batches(runs, budget))
    idle, best = 0, _best(runs)
    while runs.done < budget and idle < (1 if runs.suits() else _IDLE):
        # All that the budget allows, and the batches of what is told by now.
        batch_search.expect(runs, len(runs.told()) + 1, budget)
        count = min(_ROUND, budget - runs.done)
        useful = search.useful(moves, runs.places())
        following = search.combined(useful, runs.places(), runs.errors, runs.device.capacity, count)
        if not following:
            return
        runs.run(following)
        before, best = best, _best(runs)
        better = best[0] != before[0] or (not best[0] and best[1] < before[1] * _NEARER)
        idle = 0 if better else idle + 1


def _best(runs: Runs) -> tuple[list[Knobs], int]:
    """The settings that will be told, and the bytes that the nearest needs."""
    return [option.knobs for option in runs.told()], min(place.needs for place in runs.places().values())


def _micro_batches(runs: Runs, budget: int) -> list[search.Move]:
    """Cut the batch into ever more parts, for as long as it does not fit and each cut helps."""
    found: list[search.Move] = []
    counts, least = search.accumulations(runs.samples), runs.written.peak_reserved
    for before, count in itertools.pairwise(counts):
        one = runs.found.get(Knobs(accumulation=before))
        if one is None or one.fits or one.peak_reserved >= least * _NEARER or runs.done >= budget:
            break
        least = one.peak_reserved
        knobs = Knobs(accumulation=count)
        runs.run([knobs])
        found.append(search.move_of(knobs, runs.model))
    return found


def _with_batches(runs: Runs, bigger: list[Knobs]) -> tuple[list[Option], dict[Knobs, Largest]]:
    """The options, each with its largest batch; and the largest batches of some settings that do not fit."""
    wanted = list(dict.fromkeys([*batch_search.promising(runs), *(option.knobs for option in runs.told()), *bigger]))
    largest: dict[Knobs, Largest] = {}
    while True:
        largest |= batch_search.largest(runs, [knobs for knobs in wanted if knobs not in largest])
        smaller = {
            knobs.replace(batch=found.samples): found
            for knobs, found in largest.items()
            if not runs.found[knobs].fits and 0 < found.samples < runs.samples
        }
        options = [*runs.told(smaller), *map(runs.option, bigger)]
        # What a smaller batch has beaten may have hidden something.
        wanted = [option.knobs for option in options if option.knobs not in largest and option.knobs not in smaller]
        if not wanted:
            break
    known = largest | smaller
    return [option._replace(largest=known[option.knobs]) for option in options], largest
