"""`memexplore run`: run a program on a GPU and report its memory."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from memexplore.cli import live_run, rank_runs, recorded_run
from memexplore.cli.options import ERROR, FITS, INTERRUPTED, NOT_KNOWN, OOM, UsageError, write_output
from memexplore.cli.report_text import write_html
from memexplore.cli.run_options import RunOptions, run_options
from memexplore.run.programs import ending, interpreter

if TYPE_CHECKING:
    from memexplore.out_of_memory.value import PostMortem
    from memexplore.tape import Tape

_STATUSES = {
    "oom": OOM,
    "error": ERROR,
    "interrupted": INTERRUPTED,
    "not on gpu": NOT_KNOWN,
    "partly measured": NOT_KNOWN,
}
"""Exit statuses by outcome, where it is not `FITS`."""


class Result(Protocol):
    """What a run of a program has given: `RecordedRun` or, with `--live`, `Watched`."""

    @property
    def outcome(self) -> str:
        """As in the object of ``--json``."""

    @property
    def error(self) -> BaseException | None:
        """The exception that ended the program."""

    @property
    def tape(self) -> Tape | None:
        """The tape, None where nothing was recorded."""

    @property
    def post_mortem(self) -> PostMortem | None:
        """Why the program ran out of memory."""

    def text(self) -> str:
        """Return the report."""

    def as_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``."""


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run a script or module and return the exit status; `arguments` are those of the program.

    Raises UsageError for options that cannot be followed.
    """
    asked = run_options(options, arguments)
    if len(asked.ranks) > 1:
        return rank_runs.run(asked)
    output = _private_stdout() if asked.prints_json else sys.stdout
    duplicate = _duplicate(output)
    try:
        result = _result(asked)
    except UsageError:
        raise
    except BaseException as failure:
        ending.flush()
        ending.print_traceback(failure)
        return INTERRUPTED if isinstance(failure, KeyboardInterrupt) else ERROR
    ending.flush()
    if duplicate is not None and output.closed:
        output = os.fdopen(duplicate, "w", encoding="utf-8")
    if isinstance(result.error, interpreter.NoModuleError):
        print(f"{sys.executable}: {result.error}", file=sys.stderr)
        return ERROR
    if isinstance(result, recorded_run.RecordedRun) and result.requests.is_stopped:
        print(json.dumps(result.requests.as_dict()), file=output, flush=True)
        return FITS
    status = _exit_status(result)
    _write(result, asked)
    text = json.dumps(result.as_dict(), indent=2) if asked.prints_json else result.text()
    print(text, file=output, flush=True)
    return status


def _result(options: RunOptions) -> Result:
    """Run the program to its end."""
    from memexplore.run.programs.script import Script

    try:
        script = Script(options.target, options.arguments)
    except Exception as error:  # not Python, or not readable: as for the interpreter, no frame is of interest
        raise error.with_traceback(None) from None
    with _naming_crashes():
        if options.live is not None:
            return live_run.watch(script, options.machine, options.live)
        return recorded_run.record(script, options)


@contextlib.contextmanager
def _naming_crashes() -> Iterator[None]:
    """Print the lines of the program that lead to a crash in compiled code: it may read memory that tensors lack."""
    if faulthandler.is_enabled():
        yield
        return
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # without a file behind stderr
        faulthandler.enable()
    try:
        yield
    finally:
        faulthandler.disable()


def _duplicate(stream: Any) -> int | None:
    """Return a second descriptor of a stream, which the program may close; None where it has none."""
    try:
        return os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None


def _exit_status(result: Result) -> int:
    """Return the exit status of a run, after printing the error that ended the program as the interpreter does."""
    error = result.error
    if isinstance(error, SystemExit) and (status := ending.exit_status(error)):
        return status
    if error is not None and not isinstance(error, SystemExit):
        ending.print_traceback(error)
    return _STATUSES.get(result.outcome, FITS)


def _write(result: Result, options: RunOptions) -> None:
    """Write the tape and the page that are asked for."""
    tape = result.tape
    if tape is not None:
        if options.output is not None:
            write_output(options.output, tape.save)
        if options.html is not None:
            write_output(options.html, functools.partial(write_html, tape, result.post_mortem))
    elif options.output is not None or options.html is not None:
        print("memexplore: no step was recorded, so no tape and no page are written", file=sys.stderr)


def _private_stdout() -> Any:
    """Return a stream to the present stdout, and redirect stdout to stderr.

    The redirection stays, because threads and exit handlers of the script may print after the JSON object.
    """
    sys.stdout.flush()
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return private
