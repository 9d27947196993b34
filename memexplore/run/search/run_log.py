"""The log of a search for advice: every setting that was run, its outcome or error, and the progress of the search."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

import torch

from memexplore.hardware.catalogue import Gpu
from memexplore.run.code import lines
from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.outcome import Outcome, extra_flops, slow_down
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_record import built_model
from memexplore.run.search import candidates
from memexplore.run.search.advice import Option, rank, undominated
from memexplore.run.search.combinations import ACCEPTABLE_SLOW_DOWN
from memexplore.run.search.estimates import Need, SearchPoint, need_of
from memexplore.run.search.progress import Progress, progress_of
from memexplore.run.search.results import Done, Result
from memexplore.run.search.setting_text import on_base, on_other_gpus
from memexplore.tape import Tape

T = TypeVar("T")
Runs = Generator[list[Knobs], None, Any]
"""A search: it yields settings, goes on when each of them has an outcome or an error, and returns its answer."""
Wanted = Generator[list[Knobs], Result, T]
"""Runs in progress: it yields settings that are to be run too, goes on with the result of any, and returns an answer.

Whoever goes through it runs the settings, with a `Runner` or otherwise."""


class RunLog:
    """Asks for runs of settings of one step on one GPU, each once, and keeps the results."""

    def __init__(self, step: Step, gpu: Gpu, base: Knobs | None = None) -> None:
        """`base` has the batch and the input size that each setting without its own is run with."""
        self.model: torch.nn.Module = built_model(step)
        self._step = step
        self.base = base or Knobs()
        self.samples = self.base.batch or step.batch_size
        self.gpu = gpu
        self._running: dict[Knobs, list[Knobs]] = {}
        """Settings with the batch and the input size of the base -> those without that are asked for."""
        self._finished: list[float] = []
        self._start = time.monotonic()
        self.outcomes: dict[Knobs, Outcome] = {}
        self.tapes: dict[Knobs, Tape] = {}
        """Tapes of the runs with unlimited memory."""
        self._needs: dict[Knobs, Need] = {}
        self._sites: dict[Knobs, Sites | None] = {}
        self._codes: dict[Knobs, str] = {}
        self.errors: dict[Knobs, BaseException] = {}
        self.expected_runs = 0
        """Estimate of the total number of runs."""

    @property
    def as_written(self) -> Outcome:
        """The outcome of the step as written."""
        return self.outcomes[Knobs()]

    @property
    def run_count(self) -> int:
        """Number of runs so far."""
        return len(self._finished)

    def run(self, settings: Iterable[Knobs]) -> Wanted[None]:
        """Run the settings that were not run before."""
        new = [knobs for knobs in dict.fromkeys(settings) if not self._has(knobs)]
        yield from self.run_beside([_all_of(new)])
        # In the order of the settings, not in that of the answers of processes: every search runs the same settings.
        for knobs in new:
            if knobs in self.outcomes:
                self.outcomes[knobs] = self.outcomes.pop(knobs)
            else:
                self.errors[knobs] = self.errors.pop(knobs)

    def run_beside(self, searches: Iterable[Runs]) -> Wanted[list[Any]]:
        """Run searches beside each other until all have ended, and return their answers.

        Each goes on as soon as its own settings have been run, while those of the others still run.
        """
        ongoing = dict(enumerate(searches))
        answers: list[Any] = [None] * len(ongoing)
        wanted: dict[int, list[Knobs]] = {number: [] for number in ongoing}
        submitted: set[Knobs] = set()

        def next_settings() -> list[Knobs]:
            settings: list[Knobs] = []
            for number, search in list(ongoing.items()):
                while all(map(self._has, wanted[number])):
                    try:
                        wanted[number] = next(search)
                    except StopIteration as end:
                        answers[number] = end.value
                        del ongoing[number]
                        break
                    new = [one for one in dict.fromkeys(wanted[number]) if not self._has(one) and one not in submitted]
                    submitted.update(new)
                    settings += new
            return settings

        while True:
            settings = self._on_base(next_settings())
            if not self._running:
                return answers
            self._add((yield settings))

    def _on_base(self, settings: list[Knobs]) -> list[Knobs]:
        """Return what is to be run for settings: with the batch and the input size of the base, and only once."""
        new: list[Knobs] = []
        for knobs in settings:
            run_as = on_base(knobs, self.base)
            if run_as not in self._running:
                new.append(run_as)
            self._running.setdefault(run_as, []).append(knobs)
        return new

    def _has(self, knobs: Knobs) -> bool:
        return knobs in self.outcomes or knobs in self.errors

    def _add(self, result: Result) -> None:
        for knobs in self._running.pop(result.knobs):
            if isinstance(result, Done):
                self.outcomes[knobs] = result.run.with_knobs(knobs).outcome
                self.tapes[knobs] = result.run.tape
                self._sites[knobs] = result.sites
            else:
                self.errors[knobs] = result.error
        self._finished.append(time.monotonic() - self._start)

    def progress(self, *, has_ended: bool) -> Progress:
        """Return the progress of the search; only where it has ended as many runs are done as expected."""
        total = self.run_count if has_ended else max(self.expected_runs, self.run_count + 1)
        return progress_of(self._finished, len(self.errors), total)

    def need(self, knobs: Knobs) -> Need:
        """Return the bytes of a setting that was run by what they depend on."""
        if knobs not in self._needs:
            self._needs[knobs] = need_of(self.tapes[knobs])
        return self._needs[knobs]

    def points(self) -> dict[Knobs, SearchPoint]:
        """Return the settings with the batch of the step on the given GPU."""
        return {
            knobs: self.point(knobs, one)
            for knobs, one in self.outcomes.items()
            if knobs.batch is None and not on_other_gpus(knobs)
        }

    def point(self, knobs: Knobs, outcome: Outcome) -> SearchPoint:
        """Return a setting that was run as a point of the search."""
        need, time_ratio = self.need(knobs), slow_down(outcome, self.as_written)
        parts = (need.constant, need.gradients, need.fixed, need.peak, need.activations, need.states)
        return SearchPoint(time_ratio, outcome.needed, outcome.fits, *parts)

    def option(self, knobs: Knobs) -> Option:
        """Return a setting that was run as an `Option`, without its largest batch and its code."""
        outcome, fields = self.outcomes[knobs], candidates.altered(knobs, self.model)
        # The speed of a GPU given by its size alone is unknown, so another GPU cannot be compared with it.
        comparable = knobs.gpu is None or self.gpu.bandwidth is not None
        time_ratio = slow_down(outcome, self.as_written) if comparable else math.nan
        return Option(outcome, time_ratio, extra_flops(outcome, self.as_written), fields, None, "")

    def code(self, knobs: Knobs) -> str:
        """Return a setting that was run as lines of PyTorch, with the batch and the input size of `base`."""
        if knobs not in self._codes:
            self._codes[knobs] = lines.lines(self._step, on_base(knobs, self.base), self._sites.get(knobs))
        return self._codes[knobs]

    def options(self, others: Iterable[Knobs] = ()) -> list[Option]:
        """Return the undominated of the settings that fit so far and of `others`, cheapest first."""
        fitting = [knobs for knobs, point in self.points().items() if point.fits]
        return undominated(sorted(map(self.option, dict.fromkeys([*fitting, *others])), key=rank))

    def has_acceptable_option(self) -> bool:
        """Return whether an option trains the same at no more than `ACCEPTABLE_SLOW_DOWN`."""
        return any(not option.altered and option.slow_down <= ACCEPTABLE_SLOW_DOWN for option in self.options())


def _all_of(settings: list[Knobs]) -> Runs:
    yield settings
