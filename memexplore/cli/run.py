"""`memexplore run`: a program and a GPU go in; its report, files and exit status come out."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memexplore import result_files, script
from memexplore.cli.options import (
    ERROR,
    FITS,
    INTERRUPTED,
    NOT_KNOWN,
    OOM,
    UsageError,
    check_output,
    check_release,
    find_gpu,
    write_output,
)
from memexplore.cli.report_text import report_text
from memexplore.tape import Os
from memexplore.virtual_gpu.value_setting import Values

if TYPE_CHECKING:
    from memexplore.tape import Tape


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of memexplore and those of the program that it runs.

    The arguments of a script follow `--`; those of a module follow its name, as with `python -m`, or `--`.
    """
    if arguments[:1] != ["run"]:
        return arguments, []
    split = len(arguments)
    if "-m" in arguments:
        split = min(split, arguments.index("-m") + 2)
    if "--" in arguments:
        split = arguments.index("--")
    rest = arguments[split:]
    return arguments[:split], rest[1:] if rest[:1] == ["--"] else rest


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run a script or module and return the exit status; `arguments` are those of the program.

    Raises UsageError for options that cannot be followed.
    """
    if options.script is not None and not options.script.is_file():
        raise UsageError(f"no script {str(options.script)!r}; give the path of a Python file")
    check_release(options.release)
    if options.gpu is not None and options.gpu not in ("cuda", "cpu"):
        find_gpu(options.gpu)
    check_output("--html", options.html, result_files.PAGE)
    check_output("-o", options.output, result_files.TAPE)
    if options.html is not None and options.output is not None and options.html.resolve() == options.output.resolve():
        raise UsageError(f"--html and -o name the same file {str(options.html)!r}; write two names")
    output = _private_stdout() if options.json else sys.stdout
    try:
        if options.module is not None:
            program = script.module(options.module, arguments)
        else:
            program = script.script(options.script, arguments)
        tape, error = _record(program, options)
    except UsageError:
        raise
    except BaseException as failure:
        sys.stdout.flush()
        script.print_traceback(failure)
        return INTERRUPTED if isinstance(failure, KeyboardInterrupt) else ERROR
    sys.stdout.flush()
    if isinstance(error, script.NoModuleError):
        print(f"{sys.executable}: {error}", file=sys.stderr)
        return ERROR

    from memexplore.analysis import placements, summary

    result = summary.summary(tape)
    status = _exit_status(result["outcome"], error)
    if options.output is not None:
        write_output(options.output, tape.save)
    if options.html is not None:
        write_output(options.html, functools.partial(write_html, tape))
    if options.json:
        text = json.dumps(result | placements.summary_ranges(tape), indent=2)
    else:
        text = report_text(tape)
    print(text, file=output, flush=True)
    return status


def _exit_status(outcome: str, error: BaseException | None) -> int:
    """Return the exit status of a run, after printing the error that ended the program as the interpreter does."""
    if isinstance(error, SystemExit) and (status := script.exit_status(error)):
        return status
    if error is not None and outcome in ("error", "interrupted") and not isinstance(error, SystemExit):
        script.print_traceback(error)
    statuses = {
        "oom": OOM,
        "error": ERROR,
        "interrupted": INTERRUPTED,
        "not on gpu": NOT_KNOWN,
        "partly measured": NOT_KNOWN,
    }
    return statuses.get(outcome, FITS)


def _private_stdout() -> Any:
    """Return a stream to the present stdout, and redirect stdout to stderr.

    The redirection stays, because threads and exit handlers of the script may print after the JSON object.
    """
    sys.stdout.flush()
    private = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return private


def _record(program: Callable[[], None], options: argparse.Namespace) -> tuple[Tape, BaseException | None]:
    """Return the tape of a program and the exception that ended it, if any.

    Default: the real GPU if usable, else a virtual T4.
    """
    from memexplore import capture, targets
    from memexplore.virtual_gpu.files import session

    target, device = options.gpu or targets.default_target(), None
    if targets.is_real(target):
        for name in ("release", "os", "values"):
            if getattr(options, name) is not None:
                raise UsageError(f"--{name} needs a virtual GPU; name one with --gpu")
        try:
            device = targets.real_device(target)
        except ValueError as error:
            raise UsageError(str(error)) from None
        virtual: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    else:
        virtual = capture.virtual(
            target, release=options.release, os=options.os or Os.LINUX, values=options.values or Values.KNOWN
        )
    ended_by = None
    with session.every_file(), virtual, capture.record(device) as running:
        try:
            program()
        except BaseException as error:
            running.ended_by(error)
            ended_by = error
    return running.tape, ended_by


def write_html(tape: Tape, path: pathlib.Path) -> None:
    """Write a stand-alone HTML page."""
    from memexplore import report

    path.write_text(report.html(tape), encoding="utf-8")
