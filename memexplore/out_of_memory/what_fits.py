"""Search for the settings with which a step that failed fits its GPU.

The search runs in another process: the virtual GPU patches torch, and no memory of the real GPU is needed.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
from html import escape
from typing import Any, NamedTuple

from memexplore.allocator import Settings
from memexplore.analysis.budget import is_limited_by_settings
from memexplore.hardware.catalogue import find
from memexplore.out_of_memory.attempts import one_line
from memexplore.out_of_memory.failed_step import FailedStep
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.search.advice import Advice, Option
from memexplore.run.search.progress import report_of, shown_in_place
from memexplore.run.search.search_process import Ended, Found, Report, SearchProcess
from memexplore.tape import Meta
from memexplore.tape.process_limit import limited
from memexplore.text.units import size_text

_MOST_LINES = 12
"""Lines of a setting's code in plain text; some checkpoints have many."""


class WhatFits(NamedTuple):
    """What would have fitted, the smallest change first."""

    advice: Advice | None
    """The settings that were run; None if none was."""
    assumed: tuple[str, ...] = ()
    """What was not known of the step, as sentences."""
    failed: str = ""
    """Why there is no answer, or not all of it, as a sentence."""

    @property
    def options(self) -> tuple[Option, ...]:
        """The settings that fit."""
        return () if self.advice is None else self.advice.options

    @property
    def largest_batch(self) -> int | None:
        """The largest batch that fits as the step stands, None where it is not known; 0 if none does."""
        largest = None if self.advice is None else self.advice.largest.get(Knobs())
        return None if largest is None or largest.error else largest.samples

    @property
    def text(self) -> str:
        """All as plain text."""
        if self.advice is None:
            return self.failed
        gpu = self.advice.gpu
        room = gpu.name if gpu.limit is None else f"{size_text(gpu.limit)} that this process may use"
        lines = [
            f"What would have fitted the {room} (each setting was run on the virtual GPU):",
            *(f"  {sentence}" for sentence in self.advice.sentences),
        ]
        for number, option in enumerate(self.options, 1):
            lines.append(f"  {number}. {option}")
            if option.training:
                lines.append(f"     Trains differently: {option.training}")
            code = option.code.splitlines()
            lines += [f"     {line}" for line in code[:_MOST_LINES]]
            if len(code) > _MOST_LINES:
                lines.append(f"     … {len(code)} lines in all: %memoom apply {number}, or memexplore run --json")
        return "\n".join([*lines, *(f"Assumed: {text}" for text in self.assumed), *filter(None, [self.failed])])

    def as_dict(self) -> dict[str, Any]:
        """All as values for JSON; sizes in bytes."""
        options = [
            {
                "setting": str(option.knobs),
                "gpu": option.outcome.gpu,
                "peak_reserved": option.outcome.peak_reserved,
                "needed": option.outcome.needed,
                "margin": option.outcome.margin,
                "slow_down": None if math.isnan(option.slow_down) else option.slow_down,
                "trains_differently": option.training,
                "largest_batch": None if option.largest is None or option.largest.error else option.largest.samples,
                "code": option.code,
            }
            for option in self.options
        ]
        return {
            "options": options,
            "largest_batch": self.largest_batch,
            "assumed": list(self.assumed),
            "failed": self.failed,
        }

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        if self.advice is None:
            return f"<p>{escape(self.failed)}</p>"
        texts = [*(f"Assumed: {text}" for text in self.assumed), *filter(None, [self.failed])]
        return self.advice._repr_html_() + "".join(f"<p>{escape(text)}</p>" for text in texts)


def gpu_of(meta: Meta) -> str:
    """Return the GPU as it is: its name, or its size where less than usual can be reserved.

    A limit among the allocator's settings is set again by the settings of the search.
    """
    if is_limited_by_settings(meta):
        meta = limited(meta, None)
    try:
        gpu = find(meta.gpu or "").for_release(meta.versions.get("torch"))
    except ValueError:
        return f"{meta.capacity or 0}B"
    return gpu.key if meta.capacity in (None, gpu.capacity) else f"{meta.capacity}B"


def _with_limit(advice: Advice | None, meta: Meta) -> Advice | None:
    """Return advice whose GPU has the limit of the process that failed."""
    if advice is None or meta.capacity_without_limit is None:
        return advice
    return dataclasses.replace(advice, gpu=dataclasses.replace(advice.gpu, limit=meta.capacity))


class PartOfStepError(ValueError):
    """A sentence that says why a search for a part of the failed step has no answer."""


def _of_part(model: str, advice: Advice) -> PartOfStepError:
    reserved = size_text(advice.as_written.peak_reserved)
    return PartOfStepError(
        f"The step of the model {model} alone fits as written, with {reserved} reserved, and the failed step, which "
        "calls other models too, does not: no setting was proven to fit. In a notebook after %memoom on, the search "
        "runs a whole cell."
    )


_ONE_CALL = (
    "A step is one call of the model {}, with nothing else in memory, and fits as written: the program calls the model "
    "more often in a step, or keeps more."
)


class FailedStepSearch:
    """A search for settings with which a failed step fits the GPU of a tape, in another process.

    Where the step cannot be run, the search goes on with what the step names `otherwise`. It ends with
    `PartOfStepError` where the step is a part of what failed, and fits. `report` is called in a thread.
    """

    def __init__(self, step: FailedStep, meta: Meta, report: Report) -> None:
        self.step = step
        """The step that is searched."""
        self._meta, self._report = meta, report
        self._lock = threading.Lock()
        self._is_stopped = False
        self._process = self._started()

    def _started(self) -> SearchProcess:
        machine = machine_of(gpu_of(self._meta), release=self._meta.versions.get("torch"))
        # Those of the environment may have changed since.
        machine = machine.replace(settings=str(Settings.parse(self.step.settings.allocator)))
        return SearchProcess(self.step.packed, machine, self._received, settings=self.step.settings)

    def _received(self, event: Found | Ended) -> None:
        with self._lock:
            if self._is_stopped:
                return
            failed = isinstance(event, Ended) and event.error is not None and event.advice is None
            if failed and self.step.otherwise is not None:
                self.step = self.step.otherwise
                self._process = self._started()
                return
            if self.step.calls_others and event.advice is not None and event.advice.fits:
                self._is_stopped = True
                if isinstance(event, Found):
                    self._process.stop()
                event = Ended(None, _of_part(self.step.part, event.advice))
        self._report(event._replace(advice=_with_limit(event.advice, self._meta)))

    def stop(self) -> None:
        """End the search without a further report."""
        with self._lock:
            self._is_stopped = True
            self._process.stop()


def search(step: FailedStep, meta: Meta) -> WhatFits:
    """Return what fits; progress is shown, in a notebook with the settings found, which an interrupt keeps."""
    events: queue.SimpleQueue[Found | Ended] = queue.SimpleQueue()
    report, show = report_of("shown"), shown_in_place()
    advice: Advice | None = None
    error: BaseException | None = None
    has_ended = False
    process = FailedStepSearch(step, meta, events.put)
    try:
        while isinstance(event := events.get(), Found):
            advice = event.advice or advice
            if report is not None:
                report(event.progress)
            if show is not None:
                show(advice)
        advice, error, has_ended = event.advice or advice, event.error, True
    except KeyboardInterrupt:
        advice = None if advice is None else dataclasses.replace(advice, cancelled=True)
    finally:
        if not has_ended:
            process.stop()
        if show is not None:
            show(None)
    return what_fits(process.step, advice, error)


def what_fits(step: FailedStep, advice: Advice | None, error: BaseException | None) -> WhatFits:
    """Return the value for the end of a search; `error` is what ended it before its time."""
    if isinstance(error, PartOfStepError):
        return WhatFits(None, (), str(error))
    if error is not None:
        failed = f"The search failed: {one_line(error)}"
        return WhatFits(advice and dataclasses.replace(advice, cancelled=True), step.assumed, failed)
    if advice is not None:
        one_call = (_ONE_CALL.format(step.part),) if step.part and advice.fits else ()
        return WhatFits(advice, (*one_call, *step.assumed))
    return WhatFits(None, step.assumed, "The search was stopped before a setting was run.")
