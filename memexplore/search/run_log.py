"""All that a search for advice has run, and how far it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import torch

from memexplore import gpu_catalogue
from memexplore.knobs.knobs import Knobs
from memexplore.search import candidates as search
from memexplore.search.advice import Option, rank, unbeaten
from memexplore.search.candidates import Place
from memexplore.search.executors import RunAll
from memexplore.search.sweep import Progress, left
from memexplore.search.workers import Done
from memexplore.steps.outcome import Outcome, extra_flops, slow_down
from memexplore.steps.step import Step
from memexplore.steps.step_record import built_model
from memexplore.tape import Tape


class Runs:
    """All that has been run."""

    def __init__(
        self, run_all: RunAll, step: Step, device: gpu_catalogue.Gpu, progress: Callable[[Progress], object] | None
    ) -> None:
        self.model: torch.nn.Module = built_model(step)
        self.samples = step.batch_size
        self.device = device
        self._run_all = run_all
        self._progress = progress
        self._finished: list[float] = []
        self._start = time.monotonic()
        self.found: dict[Knobs, Outcome] = {}
        self.tapes: dict[Knobs, Tape] = {}
        """Of settings that were run, with memory without end."""
        self.errors: dict[Knobs, BaseException] = {}
        self.expected = 0
        """Runs in all, by the best guess so far."""

    @property
    def written(self) -> Outcome:
        """The step as written."""
        return self.found[Knobs()]

    @property
    def done(self) -> int:
        """Runs so far."""
        return len(self._finished)

    def run(self, settings: Iterable[Knobs]) -> None:
        """Run settings that were not, in order."""
        new = [knobs for knobs in dict.fromkeys(settings) if knobs not in self.found and knobs not in self.errors]
        results: dict[Knobs, Outcome | BaseException] = {}
        for result in self._run_all(new) if new else ():
            if isinstance(result, Done):
                results[result.outcome.knobs] = result.outcome
                self.tapes[result.outcome.knobs] = result.trial.tape
            else:
                results[result.knobs] = result.error
            self._finished.append(time.monotonic() - self._start)
            # Only the end is told as the end.
            self._tell(max(self.expected, self.done + 1), results)
        # In the order asked, whatever the order in which processes answered: the same search every time.
        for knobs in new:
            value = results[knobs]
            if isinstance(value, Outcome):
                self.found[knobs] = value
            else:
                self.errors[knobs] = value

    def end(self) -> None:
        """Tell that no more will be run."""
        self._tell(self.done, {})

    def _tell(self, total: int, latest: dict[Knobs, Outcome | BaseException]) -> None:
        if self._progress is not None:
            failed = len(self.errors) + sum(isinstance(result, BaseException) for result in latest.values())
            self._progress(Progress(self.done, failed, total, self._finished[-1], left(self._finished, total)))

    def places(self) -> dict[Knobs, Place]:
        """The settings of the batch and the GPU asked for, in the search."""
        return {
            knobs: Place(slow_down(one, self.written), one.peak_reserved, one.fits, one.constant)
            for knobs, one in self.found.items()
            if knobs.batch is None and knobs.gpu is None
        }

    def option(self, knobs: Knobs) -> Option:
        """A setting that was run, without its largest batch and its code."""
        one, changed = self.found[knobs], search.altered(knobs, self.model)
        # Nobody knows how fast a GPU is of which only the size was said.
        known = knobs.gpu is None or self.device.bandwidth is not None
        pace = slow_down(one, self.written) if known else math.nan
        return Option(one, pace, extra_flops(one, self.written), changed, None, "")

    def told(self, more: Iterable[Knobs] = ()) -> list[Option]:
        """What fits of the settings of the batch asked for, and of some more, as it will be told, in order."""
        fitting = [knobs for knobs, place in self.places().items() if place.fits]
        return unbeaten(sorted(map(self.option, dict.fromkeys([*fitting, *more])), key=rank))

    def suits(self) -> bool:
        """Whether something fits that trains the same and takes no longer than can be borne."""
        return any(not option.altered and option.slow_down <= search.BEARABLE for option in self.told())
