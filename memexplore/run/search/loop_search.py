"""Search for settings with which a cell or a script fits a GPU; every setting of the answer is run."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from memexplore.hardware import catalogue
from memexplore.run.code import diff, lines
from memexplore.run.code.own_code import OwnCode
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knobs import KNOBS, Knobs, conflicts
from memexplore.run.machine import Machine
from memexplore.run.programs.cell import Cell
from memexplore.run.programs.outcome import Outcome, extra_flops, slow_down
from memexplore.run.programs.script import Script
from memexplore.run.programs.written import assigned_batch
from memexplore.run.search import candidates
from memexplore.run.search.advice import Advice, Option, Subject, rank, undominated
from memexplore.run.search.candidates import BatchResult, LargestBatch
from memexplore.run.search.progress import Progress, progress_of
from memexplore.run.search.results import Done, Result
from memexplore.run.search.run_log import Wanted

_SECONDS = 240.0
"""Seconds after which no further setting is run."""
_SAVES = 0.98
"""A knob saves memory if a program needs less than this share of its bytes with it."""
_MOST_PAIRS = 6
_MOST_GPUS = 4
_EXPECTED_RUNS = 30


def _knobs(gpu: catalogue.Gpu, program: Cell | Script) -> list[Knobs]:
    """Return the knobs that a program can have and that may save memory, one at a time."""
    explored = Explored(batch=None if program.loop.batch is None else program.loop.batch.size)
    unavailable = program.unavailable_knobs()
    return [
        Knobs(**{name: value})
        for name, knob in KNOBS.items()
        if name not in unavailable
        for value in knob.candidates(explored, gpu)
    ]


def _pairs(search: LoopSearch) -> list[Knobs]:
    """Return pairs of settings that save memory, the best of each field; none where one fits by itself."""
    least = search.as_written.needed * _SAVES
    saving = sorted(
        (one for knobs, one in search.outcomes.items() if knobs.changed() and one.needed < least),
        key=lambda one: one.needed,
    )
    if any(one.fits for one in saving):
        return []
    best: dict[str, Knobs] = {}
    for one in saving:
        best.setdefault(next(iter(one.knobs.changed())), one.knobs)
    pairs = [one.replace(**other.changed()) for one, other in itertools.combinations(best.values(), 2)]
    return [knobs for knobs in pairs if not conflicts(knobs)][:_MOST_PAIRS]


class LoopSearch:
    """A search for settings with which a program with a loop of its own fits a machine; `run_all` runs them.

    First the program as written is run; if it fits, that is all. Then come each knob that it can have, pairs of those
    that save memory, smaller batches, and larger GPUs. The search ends after some minutes, and the advice then has what
    was found. `base` are knobs that all runs have: "as written" then means the program with these.

    >>> from memexplore.run.machine import machine_of
    >>> from memexplore.run.run import Want
    >>> from memexplore.run.search.runners import OneByOne
    >>> from memexplore.run.search.searching import run_all
    >>> code = "import torch; batch = 8; x = torch.zeros(batch << 20, device='cuda')"
    >>> cell, machine = Cell(code, {}), machine_of("24MiB")
    >>> search = LoopSearch(cell, machine)
    >>> for _ in run_all(search, OneByOne(cell, machine, Want.TAPE)):
    ...     pass
    >>> str(search.advice().options[0].knobs)
    'batch = 6'
    """

    def __init__(self, program: Cell | Script, machine: Machine, base: Knobs | None = None) -> None:
        self._program, self._machine, self._base = program, machine, base or Knobs()
        self.gpu = machine.gpu.for_release(machine.release)
        self._own = OwnCode(program.code.strip("\n"))
        self._start = time.monotonic()
        self.outcomes: dict[Knobs, Outcome] = {}
        self.errors: dict[Knobs, BaseException] = {}
        self._seconds: list[float] = []
        """Times at which runs ended."""
        self._largest: dict[Knobs, LargestBatch] = {}
        self._has_ended = False

    def steps(self) -> Wanted[None]:
        """Search. Raises what the program raises as written."""
        yield from self._run([Knobs()])
        if Knobs() in self.errors:
            raise self.errors[Knobs()]
        if not self.as_written.fits:
            yield from self._run(_knobs(self.gpu, self._program))
            yield from self._run(_pairs(self))
            yield from self._run_smaller_batches()
            yield from self._run_larger_gpus()
        self._has_ended = True

    @property
    def as_written(self) -> Outcome:
        """The outcome of the program as written."""
        return self.outcomes[Knobs()]

    @property
    def has_time(self) -> bool:
        """Whether another setting may be run."""
        return time.monotonic() - self._start < _SECONDS

    def _run(self, settings: Iterable[Knobs]) -> Wanted[None]:
        """Run settings, while there is time."""
        for knobs in settings:
            if self.has_time and knobs not in self.outcomes and knobs not in self.errors:
                self._add(knobs, (yield [self._base.replace(**knobs.changed())]))

    def _add(self, knobs: Knobs, result: Result) -> None:
        if isinstance(result, Done):
            self.outcomes[knobs] = result.run.with_knobs(knobs).outcome
        else:
            self.errors[knobs] = result.error
        self._seconds.append(time.monotonic() - self._start)

    def progress(self) -> Progress:
        """Return how far the search is, after its first run."""
        runs = len(self._seconds)
        total = runs if self._has_ended else max(_EXPECTED_RUNS, runs + 1)
        return progress_of(self._seconds, len(self.errors), total)

    def _run_smaller_batches(self) -> Wanted[None]:
        """Run smaller batches, until the largest that fits is known."""
        written, knobs_of = self._batch()
        if written < 2:
            return
        constant = self.as_written.constant
        values = candidates.largest_batch(
            max(1, written // 2), self.gpu.capacity, max_batch=written - 1, constant=constant
        )
        value = next(values)
        while self.has_time:
            knobs = knobs_of(value)
            yield from self._run([knobs])
            one = self.outcomes.get(knobs)
            if one is None:  # the program cannot have another batch
                return
            try:
                value = values.send(BatchResult(one.fits, one.needed))
            except StopIteration as end:
                largest: LargestBatch = end.value
                # The next larger value is that of the program, which does not fit.
                proven = largest.proven or largest.samples == written - 1
                self._largest = {knobs_of(largest.samples): largest._replace(proven=proven)}
                return

    def _batch(self) -> tuple[int, Callable[[int], Knobs]]:
        """Return the batch as written, 0 if it is not known, and the function of a batch that returns its knobs.

        A variable of a cell that holds the batch is set as such, so that the lines of the setting are the cell's.
        """
        batch, assigned = self._program.loop.batch, self._program.assigned()
        name, written = assigned_batch(assigned) or ("", 0)
        if batch is not None:
            name, written = batch.name, batch.size
        if self._base.batch is not None:
            return self._base.batch, lambda value: Knobs(batch=value)
        return written, lambda value: Knobs(variables={name: value}) if name in assigned else Knobs(batch=value)

    def _run_larger_gpus(self) -> Wanted[None]:
        """Run the program on larger GPUs of the catalogue until it fits one."""
        gpus = catalogue.offered(self._machine.release)
        larger = sorted((gpu for gpu in gpus if gpu.capacity > self.as_written.needed), key=lambda gpu: gpu.capacity)
        for gpu in larger[:_MOST_GPUS]:
            knobs = Knobs(gpu=gpu.key)
            yield from self._run([knobs])
            if knobs in self.outcomes and self.outcomes[knobs].fits:
                return

    def advice(self) -> Advice | None:
        """Return the advice so far, in the end all of it; None before the program as written was run."""
        if Knobs() not in self.outcomes:
            return None
        fitting = [knobs for knobs, one in self.outcomes.items() if one.fits]
        smaller = [knobs for knobs in fitting if _is_smaller(knobs)]
        if len(smaller) > 1:
            most = max(smaller, key=lambda knobs: knobs.batch or knobs.variables[0][1])
            fitting = [knobs for knobs in fitting if not _is_smaller(knobs) or knobs == most]
        # A larger GPU is last, as it is not what the program runs on.
        options = sorted(map(self._option, fitting), key=lambda option: (option.knobs.gpu is not None, _rank(option)))
        tried = [one for knobs, one in self.outcomes.items() if knobs.gpu is None and not _is_smaller(knobs)]
        return Advice(
            gpu=self.gpu,
            as_written=self.as_written,
            options=tuple(undominated(options)),
            tried=tuple(tried),
            errors=self.errors,
            largest={Knobs(): one for one in self._largest.values()},
            same_training=frozenset(one.knobs for one in tried if not candidates.altered(one.knobs)),
            cancelled=self._has_ended and not self.has_time,
            base=self._base,
            subject=Subject.LOOP,
        )

    def _option(self, knobs: Knobs) -> Option:
        one, altered = self.outcomes[knobs], candidates.altered(knobs)
        if _is_smaller(knobs):
            code = diff.code(None, knobs, self._own).text
            # The program then does less, or makes more steps.
            altered |= {"variables"} if knobs.variables else set()
            return Option(one, math.nan, math.nan, altered, self._largest.get(knobs), code)
        code = lines.lines(None, knobs)
        comparable = knobs.gpu is None or self.gpu.bandwidth is not None
        time_ratio = slow_down(one, self.as_written) if comparable else math.nan
        return Option(one, time_ratio, extra_flops(one, self.as_written), altered, None, code)


def _is_smaller(knobs: Knobs) -> bool:
    return knobs.batch is not None or bool(knobs.variables)


def _rank(option: Option) -> tuple[Any, ...]:
    return rank(option._replace(slow_down=1.0) if math.isnan(option.slow_down) else option)
