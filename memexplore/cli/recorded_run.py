"""`memexplore run` without `--live`: record a script, with what its process knows of an out-of-memory error."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memexplore.cli import first_steps
from memexplore.cli.among_ranks import among_ranks, give_files
from memexplore.cli.fitting_copy import FittingCopy, fitting_copy
from memexplore.cli.options import UsageError
from memexplore.cli.report_text import report_text

if TYPE_CHECKING:
    from memexplore.cli.run_options import RunOptions
    from memexplore.out_of_memory.evidence_types import Evidence
    from memexplore.out_of_memory.failed_program import FailedProgram
    from memexplore.out_of_memory.value import PostMortem
    from memexplore.out_of_memory.what_fits import WhatFits
    from memexplore.recorder.recording import Recording
    from memexplore.run.code.own_code import OwnCode
    from memexplore.run.programs.script import Script
    from memexplore.tape import Tape


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedRun:
    """A script that came to its end."""

    tape: Tape
    error: BaseException | None
    """The exception that ended it."""
    evidence: Evidence | None
    """What is known of an out-of-memory error."""
    failed: FailedProgram | None
    """The script that ran out of memory; None where no advice is wanted."""
    requests: first_steps.Requests
    own: OwnCode | None
    """The source of a script that ran out of memory, with the values of its names."""
    options: RunOptions
    folder: str
    """Where the script was started."""

    @functools.cached_property
    def _summary(self) -> dict[str, Any]:
        from memexplore.analysis import summary

        return summary.summary(self.tape)

    @property
    def outcome(self) -> str:
        """As in the object of ``--json``."""
        return str(self._summary["outcome"])

    @functools.cached_property
    def post_mortem(self) -> PostMortem | None:
        """Why it ran out of memory, None where it did not."""
        from memexplore.out_of_memory.value import of_tape

        return of_tape(self.tape, self.evidence)

    @functools.cached_property
    def _what_fits(self) -> WhatFits | None:
        """Search settings that would have fitted; None where no advice is wanted or nothing failed."""
        if self.failed is None:
            return None
        from memexplore.out_of_memory.what_fits import search

        # The script may have changed the folder.
        with contextlib.chdir(self.folder):
            return search(self.failed, self.tape.meta)

    @functools.cached_property
    def _copy(self) -> FittingCopy | None:
        """Write a copy of the script that fits; None where no advice is wanted, or no setting is written into it."""
        target, what_fits = self.options.target, self._what_fits
        # A copy would lack the knobs of the command line.
        if isinstance(target, str) or self.own is None or what_fits is None or self.options.knobs.changed():
            return None
        return fitting_copy(target, self.own, what_fits, self.options.command_of)

    def text(self) -> str:
        """Return the report, with the settings that would have fitted where they are wanted: they are run for it."""
        report = report_text(self.tape, self.post_mortem, self._what_fits)
        return report if self._copy is None else f"{report}\n\n{self._copy.text}"

    def as_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``, with what `text` has."""
        from memexplore.analysis import placements

        parts = {"post_mortem": self.post_mortem, "what_fits": self._what_fits, "fitting_copy": self._copy}
        shown = {name: part.as_dict() for name, part in parts.items() if part is not None}
        return self._summary | shown | placements.summary_ranges(self.tape) | self.requests.as_dict()


def record(script: Script, options: RunOptions) -> RecordedRun:
    """Run a script as its user starts it, and record it.

    Raises UsageError for a knob that cannot act on it, and what the script raises in a run before it that shows where
    its knobs act.
    """
    from memexplore.run.programs.acting import CannotActError

    failure, machine, folder = _Failure(script, options), options.machine, os.getcwd()

    @contextlib.contextmanager
    def watched(recording: Recording) -> Iterator[None]:
        try:
            with failure.watched(recording):
                yield
        finally:
            give_files(machine.rank, machine.world)

    try:
        with among_ranks(machine.rank, machine.world, options.command_of_rank):
            recorded = script.record(options.knobs, machine, watched)
    except CannotActError as error:
        raise UsageError(f"--knob: {error}") from None
    known = failure.evidence, failure.program, failure.requests, failure.own
    return RecordedRun(recorded.tape, recorded.error, *known, options, folder)


class _Failure:
    """What the process of a script knows of the error that ends it, as long as its frames are alive."""

    def __init__(self, script: Script, options: RunOptions) -> None:
        from memexplore.out_of_memory.failed_program import settings_without_gpu

        self._script, self._options = script, options
        self._settings, self._start = settings_without_gpu(), time.monotonic()
        self.requests = first_steps.of_environment()
        self.evidence: Evidence | None = None
        self.program: FailedProgram | None = None
        self.own: OwnCode | None = None

    @contextlib.contextmanager
    def watched(self, recording: Recording) -> Iterator[None]:
        """Run the script in the block."""
        from memexplore.out_of_memory.evidence import collect
        from memexplore.out_of_memory.failed_program import failed_script

        try:
            with self.requests.follow(recording.recorder):
                yield
        except BaseException as error:
            self.evidence = collect(error)
            if self._options.advises and self.evidence is not None:
                self.own = _own_code(error, self._script)
                names = {} if self.own is None else self.own.names
                knobs, machine, seconds = self._options.knobs, self._options.machine, time.monotonic() - self._start
                self.program = failed_script(self._script, names, knobs, machine, self._settings, seconds)
            raise


def _own_code(error: BaseException, script: Script) -> OwnCode | None:
    """Return the source of a script and its names when it failed; None for a module."""
    from memexplore.run.code.own_code import OwnCode

    if isinstance(script.target, str):
        return None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = pathlib.Path(frame.f_code.co_filename)
        if frame.f_code.co_name == "<module>" and path.is_file() and path.samefile(script.target):
            return OwnCode(path.read_text(encoding="utf-8"), dict(frame.f_globals), path.name)
    return None
