"""Search for the settings with which a program that failed fits its GPU.

The search runs in another process: the virtual GPU patches torch, and no memory of the real GPU is needed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
from html import escape
from typing import Any, NamedTuple

import torch

from memexplore.allocator import Settings
from memexplore.analysis.budget import is_limited_by_settings
from memexplore.hardware.catalogue import find
from memexplore.out_of_memory.attempts import one_line
from memexplore.out_of_memory.failed_program import CannotRunAgainError, FailedProgram, cannot_run
from memexplore.run.code.lines import lines
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
    """What was not the same in the runs of the search, as sentences."""
    failed: str = ""
    """Why there is no answer, or not all of it, as a sentence."""
    if_it_fits: str = ""
    """Why the program may fit as it is written, as sentences."""

    @property
    def options(self) -> tuple[Option, ...]:
        """The settings that fit."""
        return () if self.advice is None else self.advice.options

    @property
    def fits(self) -> bool:
        """Whether the program fits as it is written: another setting is not what it lacked."""
        return self.advice is not None and self.advice.fits

    @property
    def sentences(self) -> tuple[str, ...]:
        """The answer in sentences, for above the options."""
        if self.advice is None:
            return ()
        if not self.fits:
            return self.advice.sentences
        written = self.advice.as_written
        return (
            f"As written it fits by {size_text(written.margin)}, run by itself: it needs "
            f"{size_text(written.needed)} of {size_text(written.capacity)}. {self.if_it_fits}",
        )

    @property
    def largest_batch(self) -> int | None:
        """The largest batch that fits as the program stands, 0 if none does; None where no other can be run."""
        largest = None if self.advice is None else self.advice.largest.get(Knobs())
        return None if largest is None or largest.error else largest.samples

    @property
    def text(self) -> str:
        """All as plain text."""
        if self.advice is None:
            return self.failed
        if self.fits:
            return " ".join(self.sentences)
        gpu = self.advice.gpu
        room = gpu.name if gpu.limit is None else f"{size_text(gpu.limit)} that this process may use"
        lines = [
            f"What would have fitted the {room} (each setting was run on the virtual GPU):",
            *(f"  {sentence}" for sentence in self.sentences),
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
        if self.fits:
            return f"<p>{escape(self.text)}</p>"
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


def _with_names_of(advice: Advice, models: list[torch.nn.Module | None]) -> Advice:
    """Return advice whose lines name the layers of the program's model, where it has a single one that is alive."""
    if len(models) != 1 or models[0] is None:
        return advice

    def named(option: Option) -> Option:
        # A smaller batch has the lines of the program.
        if option.knobs.batch is not None or option.knobs.variables:
            return option
        with contextlib.suppress(ValueError):
            return option._replace(code=lines(None, option.knobs, model=models[0]))
        return option

    return dataclasses.replace(advice, options=tuple(map(named, advice.options)))


class FailedProgramSearch:
    """A search for settings with which a failed program fits the GPU of a tape, in another process.

    It ends with `CannotRunAgainError` where the program cannot be run as it is written. `report` is called in a thread.
    """

    def __init__(self, program: FailedProgram, meta: Meta, report: Report) -> None:
        self._program, self._meta, self._report = program, meta, report
        self._was_run = False
        """Whether the program as written was run."""
        machine = program.machine or machine_of(gpu_of(meta), release=meta.versions.get("torch"), os=meta.os)
        # Those of the environment may have changed since.
        machine = machine.replace(settings=str(Settings.parse(program.settings.allocator)))
        self._process = SearchProcess(
            program.packed, machine, self._received, base=program.base, settings=program.settings
        )

    def _received(self, event: Found | Ended) -> None:
        self._was_run = self._was_run or event.advice is not None
        if isinstance(event, Ended) and event.error is not None and not self._was_run:
            event = Ended(None, CannotRunAgainError(cannot_run(self._program.kind, one_line(event.error))))
        self._report(event._replace(advice=_with_limit(event.advice, self._meta)))

    def stop(self) -> None:
        """End the search without a further report."""
        self._process.stop()


def search(program: FailedProgram, meta: Meta) -> WhatFits:
    """Return what fits; progress is shown, in a notebook with the settings found, which an interrupt keeps."""
    events: queue.SimpleQueue[Found | Ended] = queue.SimpleQueue()
    report, show = report_of("shown"), shown_in_place()
    advice: Advice | None = None
    error: BaseException | None = None
    has_ended = False
    process = FailedProgramSearch(program, meta, events.put)
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
    return what_fits(program, advice, error)


def what_fits(program: FailedProgram, advice: Advice | None, error: BaseException | None) -> WhatFits:
    """Return the value for the end of a search, or so far; `error` is what ended it before its time."""
    if advice is not None:
        advice = _with_names_of(advice, [model() for model in program.models])
        failed = "" if error is None else f"The search failed: {one_line(error)}"
        advice = advice if error is None else dataclasses.replace(advice, cancelled=True)
        return WhatFits(advice, program.assumed, failed, program.if_it_fits)
    if error is not None:
        return WhatFits(None, failed=str(error))
    return WhatFits(None, failed="The search was stopped before a setting was run.")
