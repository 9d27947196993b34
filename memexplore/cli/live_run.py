"""Run `memexplore run --live`: show a program while it runs, then print its report."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore.cli import live_status, live_text
from memexplore.cli.live_display import display
from memexplore.cli.options import UsageError
from memexplore.tape import Ending
from memexplore.text.units import size_text

if TYPE_CHECKING:
    from memexplore.live.live import Live
    from memexplore.out_of_memory.value import PostMortem
    from memexplore.recorder.endings import End
    from memexplore.run.machine import Machine
    from memexplore.tape import Tape

NO_FOLDER = pathlib.Path()
"""The value of `--live` without a folder."""


class Watched(NamedTuple):
    """A program that came to its end."""

    status: live_status.Status
    end: End
    error: BaseException | None
    step: int
    """The recorded step that failed, else the one with the highest peak, 0 without a recorded step."""
    tape: Tape | None
    outcome: str
    """As in the object of ``run --json``."""
    notes: tuple[str, ...]
    peak: int | None
    """Peak allocated of the whole program, None on the CPU."""
    post_mortem: PostMortem | None = None
    """That of a program that ran out of memory in a recorded step."""


def normalized(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of `run`, with ``--live`` and the folder after it as one.

    A name after ``--live`` that ends with ``.py`` or is a file is the script.

    >>> normalized(["run", "--live", "train.py"]), normalized(["run", "train.py", "--live", "runs/a", "--gpu", "T4"])
    (['run', '--live=', 'train.py'], ['run', 'train.py', '--live=runs/a', '--gpu', 'T4'])
    """
    result: list[str] = []
    waiting = list(arguments)
    while waiting:
        argument = waiting.pop(0)
        if argument == "--live":
            following = waiting[0] if waiting else "-"
            has_folder = not (
                following.startswith("-") or following.endswith(".py") or pathlib.Path(following).is_file()
            )
            argument = f"--live={waiting.pop(0) if has_folder else ''}"
        result.append(argument)
    return result


def check_folder(folder: pathlib.Path) -> None:
    """Raise UsageError for a folder that cannot take the run of this process."""
    from memexplore.ranks.writer import rank_of_environment

    if folder == NO_FOLDER:
        return
    try:
        rank, _ = rank_of_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None
    own = folder / f"rank={rank}"
    if own.exists():
        raise UsageError(f"--live: {str(own)!r} exists already; name another folder, or remove this one")
    above = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if not above.is_dir():
        raise UsageError(f"--live: {str(above)!r} is a file; name a folder")


def watch(program: Callable[[], None], options: argparse.Namespace, machine: Machine) -> Watched:
    """Run a program on a machine and show its steps."""
    from memexplore.live.program import watch_program
    from memexplore.out_of_memory.evidence import collect
    from memexplore.out_of_memory.value import of_failure
    from memexplore.recorder import endings
    from memexplore.virtual_gpu.files import session
    from memexplore.virtual_gpu.patches import processes
    from memexplore.virtual_gpu.values.notes import notes_of_run

    device, is_virtual = machine.recorded_device, machine.is_virtual
    lives: list[Live] = []
    holders = live_status.Holders()
    ended = [endings.COMPLETED]

    shown_last: list[live_status.Status] = []

    def status(shown: float = 0.0) -> live_status.Status | None:
        if not lives:
            return None
        status_now = live_status.of_live(lives[-1], _name(lives[-1], is_virtual), holders, shown)
        if status_now.growth and not status_now.held_by and shown_last and shown_last[0].held_by:
            # The variables of a program are gone at its end.
            status_now = status_now._replace(growth=shown_last[0].growth, held_by=shown_last[0].held_by)
        shown_last[:] = [status_now]
        return status_now

    # The hooks are gone before the compiled model runs (`live.watcher`).
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
    folder = None if options.live == NO_FOLDER else options.live
    error, evidence, notes, peak = None, None, [], None
    with display(status), session.every_file(), machine.block():
        unwatch = endings.watch_threads(lambda end: ended.append(end))
        if is_virtual:
            processes.begin()
        try:
            with watch_program(lives.append, device, folder) as watched:
                try:
                    program()
                finally:
                    _outlast_other_ranks()
        except BaseException as failure:
            error, evidence = failure, collect(failure)
        finally:
            unwatch()
            peak = _peak(device, is_virtual)
            if is_virtual:
                unmeasured = processes.report()
                notes = [*filter(None, (unmeasured,)), *notes_of_run(), *session.report()]
    if not lives:  # the folder could not be written, or an interrupt came first
        raise error if error is not None else RuntimeError("the program was not watched")
    end = endings.end_of(error) if error is not None else ended[-1]
    live = lives[-1]
    step, tape = _recorded(live)
    outcome = _outcome(end, watched, bool(is_virtual and unmeasured), peak if is_virtual else None, tape)
    if watched.out_of_memory and not watched.gave_up and end.ending is not Ending.OUT_OF_MEMORY:
        notes.insert(0, f"the program went on after {_errors(watched.out_of_memory)}")
    last_status = status()
    assert last_status is not None
    post_mortem = of_failure(tape, evidence) if tape is not None else None
    return Watched(last_status, end, error, step, tape, outcome, tuple(notes), peak, post_mortem)


def _outlast_other_ranks() -> None:
    """Let a rank that has ended report: torchrun ends all other ranks, by SIGTERM, as soon as one has failed."""
    if "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _name(live: Live, is_virtual: bool) -> str:
    return f"virtual {live.device}" if is_virtual else live.device


def _errors(count: int) -> str:
    return "1 out-of-memory error" if count == 1 else f"{count} out-of-memory errors"


def _peak(device: Any, is_virtual: bool) -> int | None:
    """Return the peak allocated of the program, as torch counts it."""
    import torch

    if is_virtual or (device is not None and torch.device(device).type == "cuda"):
        with contextlib.suppress(RuntimeError):
            return int(torch.cuda.max_memory_allocated())
    return None


def _recorded(live: Live) -> tuple[int, Tape | None]:
    """Return the step whose tape is reported, and the tape."""
    recorded = live.recorded
    if not recorded:
        return 0, None
    peaks = {row.step: row.peak_allocated or 0 for row in live.rows()}
    worst = max(recorded, key=lambda step: peaks.get(step, 0))
    # A step that was not recorded before it failed may show nothing, as on the CPU.
    step = recorded[-1] if live.error and live.tape(recorded[-1]).peak()[0] else worst
    return step, live.tape(step)


def _outcome(end: End, watched: Any, is_partly_measured: bool, peak: int | None, tape: Tape | None) -> str:
    if end.ending is Ending.OUT_OF_MEMORY:
        # Otherwise the program raised it itself, as `analysis.verdict` decides.
        return "oom" if watched.out_of_memory else "error"
    if end.ending is not Ending.COMPLETED:
        return end.ending.value
    if watched.gave_up:
        return "oom"
    if is_partly_measured:
        return "partly measured"
    trained_on_cpu = tape is not None and bool(tape.meta.trained_on_cpu)
    return "not on gpu" if peak == 0 or trained_on_cpu else "fits"


def report(watched: Watched, folder: pathlib.Path) -> str:
    """Return the report after the end of a program."""
    from memexplore.cli.report_text import report_text

    parts = ["\n".join(live_text.as_text(live_text.lines(watched.status)))]
    if watched.outcome == "not on gpu":
        parts[0] += f"\nNothing trained on the {watched.status.device.removeprefix('virtual ')}."
    if watched.outcome == "oom" and not watched.error:
        parts[0] += "\nOut of memory: no step of the program followed its last out-of-memory error."
    if watched.status.newest is None:
        peak = f" The program's peak is {size_text(watched.peak)} allocated." if watched.peak else ""
        parts.append(f"No training step came to its end, because no optimizer stepped.{peak}")
    if watched.tape is not None:
        failed = bool(watched.tape.meta.error)
        kind = "which failed" if failed else "the recorded step with the highest peak"
        parts.append(f"Step {watched.step:,}, {kind}:\n{report_text(watched.tape, watched.post_mortem)}")
    notes = [f"Note: {note}" for note in watched.notes]
    if folder != NO_FOLDER:
        notes.append(f"The run is in {folder}: memexplore open {folder}")
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def summary(watched: Watched) -> dict[str, Any]:
    """Return the object of ``run --live --json``: that of the tape's step, and of the run as a whole."""
    from memexplore.analysis import placements
    from memexplore.analysis import summary as of_tape

    status, of_step = watched.status, {}
    if watched.tape is not None:
        of_step = of_tape.summary(watched.tape) | placements.summary_ranges(watched.tape)
    if watched.post_mortem is not None:
        of_step |= {"post_mortem": watched.post_mortem.as_dict()}
    return of_step | {
        "outcome": watched.outcome,
        "error": watched.end.error or None,
        "steps": status.newest.step if status.newest is not None else 0,
        "seconds_per_step": status.seconds,
        "worst_step": status.worst._asdict() if status.worst is not None else None,
        "overhead": status.overhead,
        "growth_per_step": status.growth or None,
        "held_by": list(status.held_by),
        "notes": [*watched.notes, *status.notes],
    }


def flush() -> None:
    """Write what the program has printed, before the report."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
