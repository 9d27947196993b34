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

from memexplore.cli import first_steps, live_run, live_text, rank_runs
from memexplore.cli.live_display import is_shown_here
from memexplore.cli.options import (
    ERROR,
    FITS,
    INTERRUPTED,
    NOT_KNOWN,
    OOM,
    AddCommand,
    UsageError,
    check_output,
    check_release,
    find_gpu,
    write_output,
)
from memexplore.cli.report_text import report_text, write_html
from memexplore.run.programs import interpreter
from memexplore.tape import Os
from memexplore.text import result_files
from memexplore.virtual_gpu.values.setting import Values

if TYPE_CHECKING:
    from memexplore.out_of_memory.evidence_types import Evidence
    from memexplore.out_of_memory.failed_step import FailedStep, SeenCall
    from memexplore.out_of_memory.what_fits import WhatFits
    from memexplore.run.machine import Machine
    from memexplore.run.programs.acting import Plan
    from memexplore.tape import Tape


def add(add_command: AddCommand) -> None:
    """Add the parser of the command."""
    running = add_command(
        "run",
        "Run a training script and report its memory. Exit status: 0 fits, 1 the script ended by an error, 2 wrong "
        "command line, 3 out of memory, 4 nothing ran on the GPU or child processes were not measured; a status that "
        "the script exits with comes first.",
    )
    program = running.add_mutually_exclusive_group(required=True)
    program.add_argument("script", nargs="?", type=pathlib.Path, help="a Python file; give its own arguments after --")
    program.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m; its arguments follow")
    running.add_argument(
        "--gpu",
        help="a catalogue name, a size such as 24GiB, cuda or cpu; default: the real GPU if usable, else a virtual T4",
    )
    running.add_argument("--release", metavar="RELEASE", help="follow the rules of this torch release, such as 2.11")
    running.add_argument(
        "--os",
        choices=[system.value for system in Os],
        metavar="SYSTEM",
        help="the system whose driver places segments; up to torch 2.11 this can change peaks; default: linux",
    )
    running.add_argument(
        "--values",
        choices=[setting.value for setting in Values],
        help="values of virtual tensors that are computed: none, those that follow from known ones (the default), or "
        "real: all of them, on the CPU",
    )
    running.add_argument(
        "--world",
        type=int,
        metavar="N",
        help="run the script as one of N processes that torchrun starts, on nodes of eight GPUs; nothing is sent to "
        "the other ones",
    )
    running.add_argument(
        "--rank",
        metavar="RANKS",
        help="the ranks that are run with --world: a number, several such as 0,4-7, or all, which runs ranks that "
        "equal others only until the end of their first optimizer step; default: 0",
    )
    running.add_argument(
        "--knob",
        action="append",
        metavar="NAME=VALUE",
        help="run the script with another value of a knob, such as batch=16, precision=bf16 or checkpoint='every 2'; "
        "may be repeated",
    )
    running.add_argument(
        "--live",
        type=pathlib.Path,
        nargs="?",
        const=pathlib.Path(),
        metavar="FOLDER",
        help="watch the training steps instead of recording everything, show them while they run, and write them to a "
        "folder that `memexplore open FOLDER` follows; a name that ends with .py is the script",
    )
    running.add_argument(
        "--advise",
        action="store_true",
        help="after an out-of-memory error, search settings with which the step that failed would have fitted",
    )
    running.add_argument(
        "--html",
        type=pathlib.Path,
        metavar="FILE",
        help="write a stand-alone HTML page; of several ranks that of the worst, or a folder with one each",
    )
    running.add_argument("--json", action="store_true", help="print one JSON object; the script prints to stderr")
    running.add_argument(
        "-o",
        "--output",
        type=pathlib.Path,
        metavar="FILE.tape",
        help="save the tape, for other programs as FILE.parquet; of several ranks a folder of tapes",
    )


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
        _machine(options)  # the same error for every rank is printed once
        return rank_runs.run(ranks, options, arguments)
    check_output("--html", options.html, result_files.PAGE)
    check_output("-o", options.output, result_files.tape_kind(options.output or ""))
    if options.html is not None and options.output is not None and options.html.resolve() == options.output.resolve():
        raise UsageError(f"--html and -o name the same file {str(options.html)!r}; write two names")
    if options.live is not None:
        live_run.check_folder(options.live)
        if options.advise:
            raise UsageError("--advise needs all calls recorded: leave out --live")
        if options.knob:
            raise UsageError("--knob changes a run that is recorded completely: leave out --live")
    output = _private_stdout() if options.json else sys.stdout
    try:
        if options.module is not None:
            program = interpreter.module(options.module, arguments)
        else:
            program = interpreter.script(options.script, arguments)
        if options.live is not None:
            return _run_live(program, options, output)
        with _other_ranks(options, arguments):
            requests = first_steps.of_environment()
            recorded = _record(program, options, arguments, requests)
    except UsageError:
        raise
    except BaseException as failure:
        sys.stdout.flush()
        interpreter.print_traceback(failure)
        return INTERRUPTED if isinstance(failure, KeyboardInterrupt) else ERROR
    sys.stdout.flush()
    tape, error, evidence, _ = recorded
    if isinstance(error, interpreter.NoModuleError):
        print(f"{sys.executable}: {error}", file=sys.stderr)
        return ERROR

    if requests.is_stopped:
        print(json.dumps(requests.as_dict()), file=output, flush=True)
        return FITS

    from memexplore.analysis import placements, summary
    from memexplore.out_of_memory.value import of_tape

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
    watched = live_run.watch(program, options, _machine(options))
    live_run.flush()
    if isinstance(watched.error, interpreter.NoModuleError):
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
    if isinstance(error, SystemExit) and (status := interpreter.exit_status(error)):
        return status
    if error is not None and not isinstance(error, SystemExit):
        interpreter.print_traceback(error)
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


def _machine(options: argparse.Namespace) -> Machine:
    """Return the machine that the options name. Default: the real GPU if usable, else a virtual T4.

    Raises UsageError for a real device with options of a virtual one, or that is not there.
    """
    from memexplore.run.machine import machine_of

    rank = next(iter(rank_runs.ranks_of(options.world, options.rank)), 0)
    try:
        machine = machine_of(options.gpu)
        if machine.is_virtual:
            return machine_of(
                options.gpu,
                release=options.release,
                os=options.os or Os.LINUX,
                values=options.values or Values.KNOWN,
                world=options.world,
                rank=rank,
            )
    except ValueError as error:
        raise UsageError(str(error)) from None
    for option in ("release", "os", "values", "world"):
        if getattr(options, option) is not None:
            raise UsageError(f"--{option} needs a virtual GPU; name one with --gpu")
    return machine


def _planned(options: argparse.Namespace, arguments: list[str]) -> tuple[Machine, Plan | None]:
    """Return the machine with what the knobs say of it, and how the knobs act on the program; None without any."""
    machine = _machine(options)
    if not options.knob:
        return machine, None
    from memexplore.run.knobs.applying.on_machine import on_machine
    from memexplore.run.knobs.knobs import knobs_of
    from memexplore.run.programs.acting import CannotActError
    from memexplore.run.programs.script import Script

    try:
        knobs = knobs_of(options.knob)
        machine = on_machine(knobs, machine)
    except ValueError as error:
        raise UsageError(f"--knob: {error}") from None
    try:
        return machine, Script(options.script or options.module, tuple(arguments)).plan(knobs, machine)
    except CannotActError as error:
        raise UsageError(f"--knob: {error}") from None


class _Recorded(NamedTuple):
    """A program that was run."""

    tape: Tape
    error: BaseException | None
    """The exception that ended it."""
    evidence: Evidence | None
    """What is known of an out-of-memory error."""
    step: FailedStep | str | None
    """The step that ran out of memory, or why it cannot be rebuilt; None where no advice is wanted."""


def _record(
    program: Callable[[], None], options: argparse.Namespace, arguments: list[str], requests: first_steps.Requests
) -> _Recorded:
    """Run a program and record it."""
    from memexplore.out_of_memory.evidence import collect
    from memexplore.out_of_memory.failed_step import SeenCall
    from memexplore.recorder.recording import record
    from memexplore.run.programs.acting import CannotActError, changing
    from memexplore.virtual_gpu.files import session

    (machine, plan), seen = _planned(options, arguments), SeenCall()
    ended_by, evidence, step = None, None, None
    with (
        session.every_file(),
        machine.block(),
        changing(plan, program, machine.recorded_device) as run_changed,
        record(machine.recorded_device) as running,
    ):
        if options.advise and running.recorder is not None:
            seen.follow(running.recorder)
        # Above are the frames of memexplore's own command.
        running.end_stacks_at(sys._getframe())
        try:
            with requests.follow(running.recorder):
                run_changed()
        except CannotActError as error:
            raise UsageError(f"--knob: {error}") from None
        except BaseException as error:
            running.ended_by(error)
            ended_by, evidence = error, collect(error)
            if options.advise and evidence is not None:
                folder = os.path.dirname(os.path.realpath(options.script)) if options.script else os.getcwd()
                step = _failed_step(error, seen, folder)
        _give_files(options)
    tape = running.tape
    if plan is not None:
        tape = tape.replace(meta=tape.meta._replace(notes=(*tape.meta.notes, f"Knobs: {plan.knobs}.")))
    return _Recorded(tape, ended_by, evidence, step)


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
    from memexplore.out_of_memory.failed_step import failed_step
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
    from memexplore.out_of_memory.what_fits import WhatFits, search

    if isinstance(recorded.step, str):
        return WhatFits(None, failed=recorded.step)
    return search(recorded.step, recorded.tape.meta)
