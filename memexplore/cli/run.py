"""`memexplore run`: a program and a GPU go in; its report, files and exit status come out."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore import result_files, script
from memexplore.cli import first_steps, live_run, live_text, rank_runs
from memexplore.cli.live_display import is_shown_here
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
    from memexplore.postmortem.evidence_types import Evidence
    from memexplore.postmortem.failed_step import FailedStep, SeenCall
    from memexplore.postmortem.value import PostMortem
    from memexplore.postmortem.what_fits import WhatFits
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
    return live_run.normalized(arguments[:split]), rest[1:] if rest[:1] == ["--"] else rest


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run a script or module and return the exit status; `arguments` are those of the program.

    Raises UsageError for options that cannot be followed.
    """
    if options.script is not None and not options.script.is_file():
        raise UsageError(f"no script {str(options.script)!r}; give the path of a Python file")
    check_release(options.release)
    if options.gpu is not None and options.gpu not in ("cuda", "cpu"):
        find_gpu(options.gpu)
    ranks = rank_runs.ranks_of(options.world, options.rank)
    if len(ranks) > 1:
        rank_runs.check(ranks, options)
        _target(options)  # the same error for every rank is printed once
        return rank_runs.run(ranks, options, arguments)
    check_output("--html", options.html, result_files.PAGE)
    check_output("-o", options.output, result_files.TAPE)
    if options.html is not None and options.output is not None and options.html.resolve() == options.output.resolve():
        raise UsageError(f"--html and -o name the same file {str(options.html)!r}; write two names")
    if options.live is not None:
        live_run.check_folder(options.live)
        if options.advise:
            raise UsageError("--advise needs all calls recorded: leave out --live")
    output = _private_stdout() if options.json else sys.stdout
    try:
        if options.module is not None:
            program = script.module(options.module, arguments)
        else:
            program = script.script(options.script, arguments)
        if options.live is not None:
            return _run_live(program, options, output)
        with _other_ranks(options, arguments):
            requests = first_steps.of_environment()
            recorded = _record(program, options, requests)
    except UsageError:
        raise
    except BaseException as failure:
        sys.stdout.flush()
        script.print_traceback(failure)
        return INTERRUPTED if isinstance(failure, KeyboardInterrupt) else ERROR
    sys.stdout.flush()
    tape, error, evidence, _ = recorded
    if isinstance(error, script.NoModuleError):
        print(f"{sys.executable}: {error}", file=sys.stderr)
        return ERROR

    if requests.is_stopped:
        print(json.dumps(requests.as_dict()), file=output, flush=True)
        return FITS

    from memexplore.analysis import placements, summary
    from memexplore.postmortem.value import of_tape

    result, post_mortem = summary.summary(tape), of_tape(tape, evidence)
    status = _exit_status(result["outcome"], error)
    if options.output is not None:
        write_output(options.output, tape.save)
    if options.html is not None:
        write_output(options.html, functools.partial(write_html, tape, post_mortem))
    what_fits = _what_fits(recorded)
    if options.json:
        found: dict[str, Any] = {"post_mortem": post_mortem.as_dict()} if post_mortem is not None else {}
        found |= {"what_fits": what_fits.as_dict()} if what_fits is not None else {}
        found |= placements.summary_ranges(tape) | requests.as_dict()
        text = json.dumps(result | found, indent=2)
    else:
        text = report_text(tape, post_mortem, what_fits)
    print(text, file=output, flush=True)
    return status


def _run_live(program: Callable[[], None], options: argparse.Namespace, output: Any) -> int:
    target = _target(options)
    watched = live_run.watch(program, options, target.virtual, target.device, target.is_virtual)
    live_run.flush()
    if isinstance(watched.error, script.NoModuleError):
        print(f"{sys.executable}: {watched.error}", file=sys.stderr)
        return ERROR
    status = _exit_status(watched.outcome, watched.error)
    if watched.tape is not None:
        if options.output is not None:
            write_output(options.output, watched.tape.save)
        if options.html is not None:
            write_output(options.html, functools.partial(write_html, watched.tape, watched.post_mortem))
    elif options.output is not None or options.html is not None:
        print("memexplore: no step was recorded, so no tape and no page are written", file=sys.stderr)
    if options.json:
        text = json.dumps(live_run.summary(watched), indent=2)
    elif is_shown_here():
        text = live_run.report(watched, options.live)
    else:
        # One report is enough for the processes that `torchrun` starts on a machine.
        text = live_text.plain(watched.status, f"memexplore, rank {os.environ.get('RANK', '?')}")
    print(text, file=output, flush=True)
    return status


def _exit_status(outcome: str, error: BaseException | None) -> int:
    """Return the exit status of a run, after printing the error that ended the program as the interpreter does."""
    if isinstance(error, SystemExit) and (status := script.exit_status(error)):
        return status
    if error is not None and not isinstance(error, SystemExit):
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


class _Target(NamedTuple):
    """The device that a program runs on."""

    virtual: Callable[[], contextlib.AbstractContextManager[Any]]
    """Returns the context of the virtual GPU, an empty one for a real device."""
    device: Any
    """The real device."""
    is_virtual: bool


def _target(options: argparse.Namespace) -> _Target:
    """Return the device that the options name. Default: the real GPU if usable, else a virtual T4.

    Raises UsageError for a real device with options of a virtual one, or that is not there.
    """
    from memexplore import capture, targets

    name = options.gpu or targets.default_target()
    if targets.is_real(name):
        for option in ("release", "os", "values", "world"):
            if getattr(options, option) is not None:
                raise UsageError(f"--{option} needs a virtual GPU; name one with --gpu")
        try:
            device = targets.real_device(name)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return _Target(contextlib.nullcontext, device, False)
    system, values = options.os or Os.LINUX, options.values or Values.KNOWN
    rank = next(iter(rank_runs.ranks_of(options.world, options.rank)), 0)

    def virtual() -> contextlib.AbstractContextManager[Any]:
        return capture.virtual(name, release=options.release, os=system, values=values, world=options.world, rank=rank)

    return _Target(virtual, None, True)


class _Recorded(NamedTuple):
    """A program that was run."""

    tape: Tape
    error: BaseException | None
    """The exception that ended it."""
    evidence: Evidence | None
    """What is known of an out-of-memory error."""
    step: FailedStep | str | None
    """The step that ran out of memory, or why it cannot be rebuilt; None where no advice is wanted."""


def _record(program: Callable[[], None], options: argparse.Namespace, requests: first_steps.Requests) -> _Recorded:
    """Run a program and record it."""
    from memexplore import capture
    from memexplore.postmortem.evidence import collect
    from memexplore.postmortem.failed_step import SeenCall
    from memexplore.virtual_gpu.files import session

    target, seen = _target(options), SeenCall()
    ended_by, evidence, step = None, None, None
    with session.every_file(), target.virtual(), capture.record(target.device) as running:
        if options.advise and running.recorder is not None:
            seen.follow(running.recorder)
        # Above are the frames of memexplore's own command.
        running.end_stacks_at(sys._getframe())
        try:
            with requests.follow(running.recorder):
                program()
        except BaseException as error:
            running.ended_by(error)
            ended_by, evidence = error, collect(error)
            if options.advise and evidence is not None:
                folder = os.path.dirname(os.path.realpath(options.script)) if options.script else os.getcwd()
                step = _failed_step(error, seen, folder)
        _give_files(options)
    return _Recorded(running.tape, ended_by, evidence, step)


def _give_files(options: argparse.Namespace) -> None:
    """Copy the files of this rank that others need or may need later, before those without values are deleted."""
    if options.world is not None:
        from memexplore.virtual_gpu.distributed import messages
        from memexplore.virtual_gpu.files import session

        if messages.is_helper():
            (rank,) = rank_runs.ranks_of(options.world, options.rank)
            messages.give_files(rank, session.written_files())


@contextlib.contextmanager
def _other_ranks(options: argparse.Namespace, arguments: list[str]) -> Iterator[None]:
    """Run the ranks too that this rank receives objects from, and those that have written a file that is read."""
    if options.world is None:
        yield
        return
    import torch

    from memexplore.virtual_gpu.distributed import messages
    from memexplore.virtual_gpu.files import elsewhere, session

    (rank,) = rank_runs.ranks_of(options.world, options.rank)

    def fetch(path: str) -> pathlib.Path | None:
        if not torch.distributed.is_initialized():
            return None
        first = messages.sender_of(path, rank, options.world, session.has_file)
        copies = (messages.fetch_file(path, sender, rank) for sender in dict.fromkeys((first, 0)) if sender != rank)
        return next(filter(None, copies), None)

    if messages.is_helper():
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        # Most ranks exchange objects before the first step only, such as the shapes of a pipeline.
        def before_step(*_: object) -> None:
            if not messages.wait_until_needed(rank):
                os._exit(FITS)

        register_optimizer_step_pre_hook(before_step)
    give = (lambda path: messages.give_files(rank, [path])) if messages.is_helper() else None
    command = functools.partial(rank_runs.command, options, arguments)
    with messages.between_ranks(command, session.copy_file, session.on_disk), elsewhere.fetched_by(fetch, give):
        yield


def _failed_step(error: BaseException, seen: SeenCall, folder: str) -> FailedStep | str:
    """Return the step that an out-of-memory error has ended, or why it cannot be rebuilt.

    `folder` is where the program finds its own modules.
    """
    from memexplore.postmortem.failed_step import failed_step
    from memexplore.recorder.endings import out_of_memory_error

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    names = [value for frame in frames for value in frame.f_locals.values()]
    step = failed_step(out_of_memory_error(error) or error, seen, names)
    if isinstance(step, str):
        return step
    settings = step.settings._replace(path=(*step.settings.path, folder))
    return step._replace(settings=settings, otherwise=step.otherwise and step.otherwise._replace(settings=settings))


def _what_fits(recorded: _Recorded) -> WhatFits | None:
    """Return what would have fitted, None where no advice is wanted or nothing failed."""
    if recorded.step is None:
        return None
    from memexplore.postmortem.what_fits import WhatFits, search

    if isinstance(recorded.step, str):
        return WhatFits(None, failed=recorded.step)
    return search(recorded.step, recorded.tape.meta)


def write_html(tape: Tape, post_mortem: PostMortem | None, path: pathlib.Path) -> None:
    """Write a stand-alone HTML page."""
    from memexplore import report

    path.write_text(report.html(tape, post_mortem), encoding="utf-8")
