"""Search for settings with which a step fits a GPU; every setting of the answer is run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

from memexplore.hardware import catalogue, rented
from memexplore.hardware.rented import RentedSet
from memexplore.run.knobs.checkpoints.setting import CheckpointKind
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.machine import Kind, Machine, machine_of
from memexplore.run.programs.outcome import Outcome
from memexplore.run.programs.step import Step
from memexplore.run.run import Want
from memexplore.run.search import batch_search, candidates, combinations
from memexplore.run.search.advice import Advice, Option, Rented, misses_little
from memexplore.run.search.candidates import Candidate, LargestBatch
from memexplore.run.search.estimates import SearchPoint, cannot_fit, estimated
from memexplore.run.search.larger_gpus import smallest_larger_gpu
from memexplore.run.search.progress import Progress, Reporting, report_of, shown_in_place
from memexplore.run.search.run_log import RunLog, Wanted
from memexplore.run.search.runners import runner_of
from memexplore.run.search.searching import run_all
from memexplore.run.search.setting_text import on_other_gpus
from memexplore.run.search.several_gpus import cheapest_rented, fewest_gpus
from memexplore.tape import Os

BUDGET = 60
"""Runs that a search may take, without those for other GPUs and for largest batches."""
_OF_BASE = ("batch", "input_size")
_ROUND = 4
"""Settings run at once: enough for several processes, few enough to learn from each round."""
_MAX_IDLE_ROUNDS = 2
"""Rounds without improvement after which the search ends, one less where something fits."""
_IMPROVEMENT = 0.98
"""A round improves on the smallest setting if one needs less than this share of its bytes."""
_BY_FAR = 1.2
"""A setting expected to need this many times the bytes of a faster one that fits is not run by itself."""
_STRONGEST = (Knobs(checkpoint="every 1"), Knobs(checkpoint="keep matmuls"), Knobs(checkpoint="norms"))
"""Knobs run in any case if they may fit: combinations are made of them."""
_EXPANDABLE = "expandable_segments:True"


def advise(
    step: Step,
    gpu: str | None = None,
    *,
    release: str | None = None,
    os: str = Os.LINUX,
    executor: Executor | None = None,
    budget: int = BUDGET,
    progress: Reporting = "shown",
    found: Callable[[Advice], object] | None = None,
    base: Knobs | None = None,
    prices: Mapping[str, float] | None = None,
) -> Advice:
    """Search the knobs for settings with which a step fits a GPU; every setting of the answer is run.

    First the step as written and every knob that may fit by itself are run, those expected to fit first, then
    combinations expected to fit, until nothing better is found: at most `budget` runs. A knob whose savings cannot be
    enough, because what it leaves as it is exceeds the GPU, is run in combinations only. Where at most 5 % of the bytes
    are missing, small changes come first. Further runs, not counted in the budget: if the step does not fit as written,
    the step on larger GPUs in ascending memory, sharded by FSDP2 on 2, 4 and 8 of the given GPU, and on sets that can
    be rented in ascending price; and for every option the largest batch that fits and the next larger one.
    If nothing fits within an acceptable time, the best settings get the largest batch that does.

    The order of the options: as written if that fits; then settings that train the same (autocast counts as the
    same, and micro-batches without batch norm); then settings that change the training (a smaller batch or input,
    frozen layers, adapters, another optimizer, no fp32 weights); each by expected time, then by the number of knobs;
    several GPUs, the cheapest set to rent and a larger GPU last. Inference is never advice for a training step.

    Default: the real GPU if usable, else a virtual T4. Advice is always predicted: ``cuda`` stands for the
    virtual GPU with the numbers of this machine's. For `executor` and `progress` see `sweep`; the total of `progress`
    is an estimate until the last run is done; a notebook also shows the options found so far. `found` is called with
    the advice so far after every run, before `progress`. `base` has the batch and the input size for which advice is
    wanted, by default those of the step: "as written" then means the step with these. `prices` maps sets to rent, such
    as ``"8xH100"`` or ``"p4d.24xlarge"``, to dollars an hour, by default those of a provider (`rented.SOURCE`).

    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=torch.mean, optimizer=torch.optim.SGD)
    >>> advice = advise(step, "T4", budget=4, progress=None)
    >>> advice.fits, str(advice.options[0].knobs)
    (True, 'as written')

    An interrupt (Ctrl-C, or the notebook's stop button) ends the search; the advice then has what was found so far.

    Raises what the step raises as written, ValueError for a budget below 1, for the CPU and for other knobs in `base`,
    and as `sweep` does.
    """
    search = StepSearch(step, machine_of(gpu, release=release, os=os), budget=budget, base=base, prices=prices)
    report, show = report_of(progress), shown_in_place() if progress == "shown" else None
    runner = runner_of(step, search.machine, executor, Want.NUMBERS, budget)
    with contextlib.closing(runner):
        try:
            for _ in run_all(search, runner):
                if found is not None and (advice := search.advice()) is not None:
                    found(advice)
                if show is not None:
                    show(search.advice())
                if report is not None:
                    report(search.progress())
        except KeyboardInterrupt:
            if search.advice() is None:
                raise
            search.cancel()
            if report is not None:
                report(search.progress())
        finally:
            if show is not None:
                show(None)
    advice = search.advice()
    assert advice is not None
    return advice


class StepSearch:
    """A search for settings with which a step fits a machine, as `advise` describes it; `run_all` runs them."""

    def __init__(
        self,
        step: Step,
        machine: Machine,
        *,
        budget: int = BUDGET,
        base: Knobs | None = None,
        prices: Mapping[str, float] | None = None,
    ) -> None:
        self._step, self._budget, self._base = step, budget, base or Knobs()
        if others := set(self._base.changed()) - set(_OF_BASE):
            raise ValueError(f"base= may have {' and '.join(_OF_BASE)} only, not {', '.join(sorted(others))}")
        if budget < 1:
            raise ValueError(f"budget={budget} allows no run: give the number of runs that the search may take")
        self._sets = rented.rented_sets(prices)
        self._prices = rented.SOURCE if prices is None else "prices as given"
        self.machine, limit = _virtual(machine)
        """The virtual machine on which the settings are run."""
        self._gpu = dataclasses.replace(self.machine.gpu.for_release(self.machine.release), limit=limit)
        self._log: RunLog | None = None
        self._result: Advice | None = None

    def steps(self) -> Wanted[None]:
        """Search. Raises what the step raises as written."""
        log = self._log = RunLog(self._step, self._gpu, self._base)
        log.expected_runs = self._budget
        yield from log.run([Knobs()])
        if Knobs() in log.errors:
            raise log.errors[Knobs()]
        single = candidates.single_candidates(self._step, self._gpu, self._base)
        yield from _search(log, self._step, single, self._budget)
        others = _elsewhere(log, self._sets, self.machine.release)
        options, largest, elsewhere = yield from _with_largest_batches(log, others)
        advice = _advice(log, options, largest, elsewhere.on_largest)
        to_rent = None if elsewhere.rented is None else Rented(*elsewhere.rented, self._prices)
        self._result = dataclasses.replace(advice, rented=to_rent)

    def cancel(self) -> None:
        """End the search with what was found."""
        advice = self.advice()
        self._result = advice and dataclasses.replace(advice, cancelled=True)

    def progress(self) -> Progress:
        """Return how far the search is, after its first run."""
        assert self._log is not None
        return self._log.progress(has_ended=self._result is not None)

    def advice(self) -> Advice | None:
        """Return the advice so far, in the end all of it; None before the step as written was run."""
        log = self._log
        if self._result is not None or log is None or Knobs() not in log.outcomes:
            return self._result
        return _advice(log, log.options())


def _advice(
    log: RunLog,
    options: list[Option],
    largest: dict[Knobs, LargestBatch] | None = None,
    too_small: Outcome | None = None,
) -> Advice:
    # The batches run in the search for the largest are not settings that were tried as advice.
    tried = [one for knobs, one in log.outcomes.items() if not on_other_gpus(knobs) and knobs.batch is None]
    smaller = [option.outcome for option in options if option.knobs.batch is not None]
    return Advice(
        gpu=log.gpu,
        as_written=log.as_written,
        options=tuple(option._replace(code=log.code(option.knobs)) for option in options),
        tried=(*tried, *smaller),
        errors={
            knobs: error for knobs, error in log.errors.items() if knobs.batch is None and not on_other_gpus(knobs)
        },
        largest=largest or {},
        same_training=frozenset(one.knobs for one in tried if not candidates.altered(one.knobs, log.model)),
        too_small=too_small,
        base=log.base,
    )


def _virtual(machine: Machine) -> tuple[Machine, int | None]:
    """Return the virtual machine that predicts a machine, and the limit of the process.

    A process that may not use all of the real GPU gets a GPU of the size of the limit.
    """
    if machine.kind is Kind.CPU:
        raise ValueError("advice is what fits a GPU: give gpu= the name of one, such as T4")
    if machine.is_virtual:
        return machine, None
    gpu = machine.gpu
    if gpu.limit != gpu.capacity:
        return machine.with_gpu(catalogue.find(gpu.key)), None
    return machine.with_gpu(catalogue.find(f"{gpu.limit}B")), gpu.limit


def _search(log: RunLog, step: Step, single: tuple[Candidate, ...], budget: int) -> Wanted[None]:
    """Run every candidate by itself that may fit, then combinations, until they improve nothing or end the budget."""
    batch_search.expect_searches(log, 1, budget)
    capacity, written = log.gpu.capacity, log.points()[Knobs()]
    small_first = misses_little(log.as_written)
    every = (*(candidates.small_moves(step) if small_first else ()), *single)
    size = log.base.input_size or step.input_size
    estimates = {one.knobs: estimated(one.knobs, log.need(Knobs()), written, size) for one in every}
    counts = [one.knobs for one in every if one.field == "accumulation"]
    expected = [knobs for knobs in counts if estimates[knobs].needed <= capacity]
    first_count = next(iter(expected or counts), None)
    alone = [one for one in every if one.field != "accumulation" or one.knobs == first_count]
    if not written.fits:
        alone = [one for one in alone if not cannot_fit(written, one.knobs, capacity)]
    alone.sort(key=lambda one: _order(one, estimates[one.knobs], capacity, small_first))
    yield from _run(log, [one.knobs for one in alone[:_ROUND]], budget)
    rest = [one for one in alone[_ROUND:] if not _is_beaten(log, one, estimates[one.knobs])]
    yield from _run(log, [one.knobs for one in rest], budget)
    yield from _run_other_counts(log, counts, first_count, budget)
    # Another knob only lessens the micro-batches that are needed.
    too_many = [] if first_count is None else counts[counts.index(first_count) + 1 :]
    every = tuple(one for one in every if one.knobs in log.outcomes or one.knobs not in too_many)
    idle_rounds, best = 0, _best(log)
    while log.run_count < budget and idle_rounds < _MAX_IDLE_ROUNDS - bool(best[0]):
        # The whole budget, and the largest batches of the options so far.
        batch_search.expect_searches(log, len(log.options()) + 1, budget)
        points = log.points()
        possible = [one for one in every if one.knobs not in log.errors]
        following = combinations.next_combinations(
            combinations.worth_combining(possible, {**estimates, **points}),
            points,
            log.errors,
            capacity,
            min(_ROUND, budget - log.run_count),
            estimates,
        )
        if not following:
            return
        yield from _run(log, following, budget)
        before, best = best, _best(log)
        improved = best[0] != before[0] or (not best[0] and best[1] < before[1] * _IMPROVEMENT)
        idle_rounds = 0 if improved else idle_rounds + 1


def _order(one: Candidate, estimate: SearchPoint, capacity: int, small_first: bool) -> tuple[Any, ...]:
    """The key that sorts the knobs by themselves: expected to fit first, then the same training, then by time."""
    is_small = KNOBS[one.field].saves_little or one.knobs.checkpoint.kind is CheckpointKind.LAYERS
    return (small_first and not is_small, estimate.needed > capacity, one.alters, estimate.time)


def _is_beaten(log: RunLog, one: Candidate, estimate: SearchPoint) -> bool:
    """Return whether a knob by itself is expected to be beaten by far by one that fits and trains the same."""
    if one.knobs in _STRONGEST or log.as_written.fits:
        return False
    return any(
        point.fits
        and point.time <= estimate.time
        and point.needed * _BY_FAR <= estimate.needed
        and len(knobs.changed()) == 1
        and not candidates.altered(knobs, log.model)
        and ("precision" not in knobs.changed() or one.field == "precision")
        for knobs, point in log.points().items()
    )


def _run(log: RunLog, settings: list[Knobs], budget: int) -> Wanted[None]:
    """Run settings within the budget; where one lacks memory in pieces only, run it with expandable segments too."""
    yield from log.run(settings[: max(budget - log.run_count, 0)])
    segments = Knobs(settings=_EXPANDABLE)
    known = log.outcomes.get(segments)
    if segments in log.errors or (known is not None and known.needed >= log.as_written.needed):
        return
    in_pieces = [
        knobs.replace(settings=_EXPANDABLE)
        for knobs in settings
        if (one := log.outcomes.get(knobs)) and not one.fits and one.peak_allocated <= log.gpu.capacity
    ]
    yield from log.run(in_pieces[: max(budget - log.run_count, 0)])


def _best(log: RunLog) -> tuple[list[Knobs], int]:
    """The settings of the options so far, and the bytes that the smallest setting needs."""
    return [option.knobs for option in log.options()], min(point.needed for point in log.points().values())


def _run_other_counts(log: RunLog, counts: list[Knobs], first: Knobs | None, budget: int) -> Wanted[None]:
    """Run the fewest micro-batches that fit: fewer while they fit, or more while each count needs less than before."""
    if first is None or first not in log.outcomes or log.as_written.fits:
        return
    number = counts.index(first)
    if log.outcomes[first].fits:
        for knobs in reversed(counts[:number]):
            yield from _run(log, [knobs], budget)
            one = log.outcomes.get(knobs)
            if one is None or not one.fits:
                return
        return
    least = log.as_written.needed
    for before, knobs in itertools.pairwise(counts[number:]):
        one = log.outcomes.get(before)
        if one is None or one.fits or one.needed >= least * _IMPROVEMENT:
            return
        least = one.needed
        yield from _run(log, [knobs], budget)


class _Elsewhere(NamedTuple):
    """The step on several GPUs, on the cheapest set to rent and on a larger GPU."""

    settings: list[Knobs]
    rented: tuple[Knobs, RentedSet] | None
    on_largest: Outcome | None


def _elsewhere(log: RunLog, sets: Sequence[RentedSet], release: str) -> Generator[list[Knobs], None, _Elsewhere]:
    """Search other GPUs, one kind after the other: runs on larger GPUs exclude others that run the same kernels."""
    larger, on_largest = yield from smallest_larger_gpu(log, release)
    several = yield from fewest_gpus(log)
    rented = yield from cheapest_rented(log, sets, release)
    settings = dict.fromkeys((several, rented and rented[0], *larger))
    return _Elsewhere([knobs for knobs in settings if knobs is not None], rented, on_largest)


def _with_largest_batches(
    log: RunLog, other_gpus: Generator[list[Knobs], None, _Elsewhere]
) -> Wanted[tuple[list[Option], dict[Knobs, LargestBatch], _Elsewhere]]:
    """The options with their largest batches, and the largest batches of settings, also of some that do not fit.

    `other_gpus` is searched beside the batches, so that no process waits for the runs of another.
    """
    fitting = [option.knobs for option in log.options()]
    wanted = list(dict.fromkeys([*batch_search.settings_for_smaller_batch(log), *fitting]))
    batch_search.expect_searches(log, len(wanted) + 2)
    searches = [other_gpus, *(batch_search.largest_batch_of(log, one) for one in wanted)]
    elsewhere, *batches = yield from log.run_beside(searches)
    largest: dict[Knobs, LargestBatch] = dict(zip(wanted, batches, strict=True))
    wanted = larger = elsewhere.settings
    while True:
        new = [knobs for knobs in wanted if knobs not in largest]
        batch_search.expect_searches(log, len(new))
        batches = yield from log.run_beside(batch_search.largest_batch_of(log, knobs) for knobs in new)
        largest |= dict(zip(new, batches, strict=True))
        smaller = {
            knobs.replace(batch=batch.samples): batch
            for knobs, batch in largest.items()
            if not log.outcomes[knobs].fits and 0 < batch.samples < log.samples
        }
        options = [*log.options(smaller), *map(log.option, larger)]
        # A smaller batch may replace an option that hid another.
        wanted = [option.knobs for option in options if option.knobs not in largest and option.knobs not in smaller]
        if not wanted:
            break
    of_setting = largest | smaller
    return [option._replace(largest=of_setting[option.knobs]) for option in options], largest, elsewhere
