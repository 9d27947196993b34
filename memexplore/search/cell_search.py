"""Search for settings with which a cell fits a GPU. In: a `CellCopy` and a GPU. Out: an `Advice`; all were run."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from memexplore import gpu_catalogue
from memexplore.capture import release_or_installed
from memexplore.codegen import diff, lines
from memexplore.codegen.own_code import OwnCode
from memexplore.knobs.conflicts import conflicts
from memexplore.knobs.knobs import Knobs
from memexplore.search import candidates, workers
from memexplore.search.advice import Advice, Option, Subject, rank, undominated
from memexplore.search.candidates import BatchResult, LargestBatch
from memexplore.search.cell_copy import CellCopy
from memexplore.search.progress import Progress, estimate_seconds_left
from memexplore.steps.outcome import Outcome, extra_flops, outcome_of, slow_down
from memexplore.steps.written import assigned_batch
from memexplore.tape import Os

_SECONDS = 240.0
"""Seconds after which no further setting is run."""
_SAVES = 0.98
"""A knob saves memory if a cell needs less than this share of its bytes with it."""
_MOST_PAIRS = 6
_MOST_GPUS = 4
_EXPECTED_RUNS = 20


def advise_cell(
    cell: CellCopy,
    gpu: str,
    *,
    release: str | None = None,
    os: str = Os.LINUX,
    progress: Callable[[Progress], object],
    found: Callable[[Advice], object],
) -> Advice:
    """Search the knobs that a cell can have for settings with which it fits a GPU; every setting of the answer is run.

    First the cell as written is run, then each knob of a model and of the allocator, then pairs of those that save
    memory, smaller values of the variable that seems to be the batch size, and larger GPUs. The search ends after some
    minutes, and the advice then has what was found. `progress` and `found` are called after every run.

    >>> import pickle
    >>> code = "import torch; batch = 8; x = torch.zeros(batch << 20, device='cuda')"
    >>> cell = CellCopy(code, "<cell>", pickle.dumps({}))
    >>> ignore = lambda value: None
    >>> [str(option.knobs) for option in advise_cell(cell, "24MiB", progress=ignore, found=ignore).options][0]
    'batch = 6'

    Raises what the cell raises as written.
    """
    search = _Search(cell, gpu, release, os, progress, found)
    search.run([Knobs()])
    if Knobs() in search.errors:
        raise search.errors[Knobs()]
    if not search.as_written.fits:
        search.run(_knobs(search.gpu))
        search.run(_pairs(search))
        search.run_smaller_batches()
        search.run_larger_gpus()
    search.report(len(search.seconds))
    return search.advice(is_complete=search.has_time)


def _knobs(gpu: gpu_catalogue.Gpu) -> list[Knobs]:
    """Return the knobs of a cell that may save memory, one at a time."""
    return [
        Knobs(settings="expandable_segments:True"),
        Knobs(inplace="on"),
        *(Knobs(checkpoint=text) for text in ("keep matmuls", "norms", "every 2", "sqrt", "every 1")),
        # Before compute capability 8.0 a GPU has no units for bf16.
        *([Knobs(precision="bf16")] if gpu.compute_capability >= (8, 0) else []),
        Knobs(offload="saved tensors on the CPU"),
    ]


def _pairs(search: _Search) -> list[Knobs]:
    """Return pairs of settings that save memory, the best of each field; none where one fits by itself."""
    least = search.as_written.peak_reserved * _SAVES
    saving = sorted(
        (one for knobs, one in search.outcomes.items() if knobs.changed() and one.peak_reserved < least),
        key=lambda one: one.peak_reserved,
    )
    if any(one.fits for one in saving):
        return []
    best: dict[str, Knobs] = {}
    for one in saving:
        best.setdefault(next(iter(one.knobs.changed())), one.knobs)
    pairs = [one.replace(**other.changed()) for one, other in itertools.combinations(best.values(), 2)]
    return [knobs for knobs in pairs if not conflicts(knobs)][:_MOST_PAIRS]


class _Search:
    """The settings of a cell that were run, each once."""

    def __init__(
        self,
        cell: CellCopy,
        gpu: str,
        release: str | None,
        os: str,
        progress: Callable[[Progress], object],
        found: Callable[[Advice], object],
    ) -> None:
        self._cell, self._key, self._release, self._os = cell, gpu, release, os
        self.gpu = gpu_catalogue.find(gpu).for_release(release_or_installed(release))
        self._progress, self._found = progress, found
        self._own = OwnCode(cell.code.strip("\n"))
        self._start = time.monotonic()
        self.outcomes: dict[Knobs, Outcome] = {}
        self.errors: dict[Knobs, BaseException] = {}
        self.seconds: list[float] = []
        """Times at which runs ended."""
        self._largest: dict[Knobs, LargestBatch] = {}

    @property
    def as_written(self) -> Outcome:
        """The outcome of the cell as written."""
        return self.outcomes[Knobs()]

    @property
    def has_time(self) -> bool:
        """Whether another setting may be run."""
        return time.monotonic() - self._start < _SECONDS

    def run(self, settings: Iterable[Knobs]) -> None:
        """Run settings, while there is time."""
        for knobs in settings:
            if not self.has_time or knobs in self.outcomes or knobs in self.errors:
                continue
            try:
                self.outcomes[knobs] = self._outcome(knobs)
            except Exception as error:
                self.errors[knobs] = workers.without_frames(error)
            self.seconds.append(time.monotonic() - self._start)
            if Knobs() in self.outcomes:
                self._found(self.advice())
            self.report(max(_EXPECTED_RUNS, len(self.seconds) + 1))

    def _outcome(self, knobs: Knobs) -> Outcome:
        def run(setting: Knobs, on: Any) -> Any:
            return self._cell.run(setting, on, self._release, self._os)

        return outcome_of(run, knobs, self._key, samples=1)[1]

    def report(self, total: int) -> None:
        """Report the runs so far, of `total`."""
        left = estimate_seconds_left(self.seconds, total)
        self._progress(Progress(len(self.seconds), len(self.errors), total, self.seconds[-1], left))

    def run_smaller_batches(self) -> None:
        """Run smaller values of the batch size, until the largest that fits is known."""
        assigned = assigned_batch(self._cell.assigned())
        if assigned is None or assigned[1] < 2:
            return
        name, written = assigned
        constant = self.as_written.constant
        values = candidates.largest_batch(
            max(1, written // 2), self.gpu.capacity, max_batch=written - 1, constant=constant
        )
        value = next(values)
        while self.has_time:
            knobs = Knobs(variables={name: value})
            self.run([knobs])
            one = self.outcomes.get(knobs)
            result = BatchResult(False, None) if one is None else BatchResult(one.fits, one.peak_reserved)
            try:
                value = values.send(result)
            except StopIteration as end:
                largest: LargestBatch = end.value
                # The next larger value is that of the cell, which does not fit.
                proven = largest.proven or largest.samples == written - 1
                self._largest = {Knobs(variables={name: largest.samples}): largest._replace(proven=proven)}
                return

    def run_larger_gpus(self) -> None:
        """Run the cell on larger GPUs of the catalogue until it fits one."""
        gpus = [gpu_catalogue.find(name) for name in gpu_catalogue.gpus().index]
        gpus = [gpu.for_release(release_or_installed(self._release)) for gpu in gpus]
        larger = sorted(
            (gpu for gpu in gpus if gpu.capacity > self.as_written.peak_reserved), key=lambda gpu: gpu.capacity
        )
        for gpu in larger[:_MOST_GPUS]:
            knobs = Knobs(gpu=gpu.key)
            self.run([knobs])
            if knobs in self.outcomes and self.outcomes[knobs].fits:
                return

    def advice(self, *, is_complete: bool = True) -> Advice:
        """Return the settings that fit so far."""
        fitting = [knobs for knobs, one in self.outcomes.items() if one.fits]
        values = [knobs for knobs in fitting if knobs.variables]
        if len(values) > 1:
            most = max(values, key=lambda knobs: knobs.variables[0][1])
            fitting = [knobs for knobs in fitting if not knobs.variables or knobs == most]
        # A larger GPU is last, as it is not what the cell runs on.
        options = sorted(map(self._option, fitting), key=lambda option: (option.knobs.gpu is not None, _rank(option)))
        tried = [one for knobs, one in self.outcomes.items() if knobs.gpu is None and not knobs.variables]
        return Advice(
            gpu=self.gpu,
            as_written=self.as_written,
            options=tuple(undominated(options)),
            tried=tuple(tried),
            errors=self.errors,
            largest={},
            same_training=frozenset(one.knobs for one in tried),
            cancelled=not is_complete,
            subject=Subject.CELL,
        )

    def _option(self, knobs: Knobs) -> Option:
        one = self.outcomes[knobs]
        if knobs.variables:
            code = diff.code(None, knobs, self._own).text
            # The cell then does less, or makes more steps.
            return Option(one, math.nan, math.nan, frozenset({"variables"}), self._largest.get(knobs), code)
        code = lines.lines(None, knobs)
        comparable = knobs.gpu is None or self.gpu.bandwidth is not None
        time_ratio = slow_down(one, self.as_written) if comparable else math.nan
        return Option(one, time_ratio, extra_flops(one, self.as_written), frozenset(), None, code)


def _rank(option: Option) -> tuple[Any, ...]:
    return rank(option._replace(slow_down=1.0) if math.isnan(option.slow_down) else option)
