"""`memexplore run --live`: watch the steps of a program, show them while it runs, and report on them at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memexplore.cli import live_status, live_text
from memexplore.cli.live_display import display, is_shown_here
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


@dataclasses.dataclass(frozen=True, eq=False)
class Watched:
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
    folder: pathlib.Path
    post_mortem: PostMortem | None = None
    """That of a program that ran out of memory in a recorded step."""

    def text(self) -> str:
        """Return the report."""
        if not is_shown_here():
            # One report is enough for the processes that `torchrun` starts on a machine.
            return live_text.plain(self.status, f"memexplore, rank {os.environ.get('RANK', '?')}")
        from memexplore.cli.report_text import report_text

        parts = ["\n".join(live_text.as_text(live_text.lines(self.status)))]
        if self.outcome == "not on gpu":
            parts[0] += f"\nNothing trained on the {self.status.device.removeprefix('virtual ')}."
        if self.outcome == "oom" and not self.error:
            parts[0] += "\nOut of memory: no step of the program followed its last out-of-memory error."
        if self.status.newest is None:
            peak = f" The program's peak is {size_text(self.peak)} allocated." if self.peak else ""
            parts.append(f"No training step came to its end, because no optimizer stepped.{peak}")
        if self.tape is not None:
            failed = bool(self.tape.meta.error)
            kind = "which failed" if failed else "the recorded step with the highest peak"
            parts.append(f"Step {self.step:,}, {kind}:\n{report_text(self.tape, self.post_mortem)}")
        notes = [f"Note: {note}" for note in self.notes]
        if self.folder != NO_FOLDER:
            notes.append(f"The run is in {self.folder}: memexplore open {self.folder}")
        if notes:
            parts.append("\n".join(notes))
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Return the object of ``run --live --json``: that of the tape's step, and of the run as a whole."""
        from memexplore.analysis import placements
        from memexplore.analysis import summary as of_tape

        status, of_step = self.status, {}
        if self.tape is not None:
            of_step = of_tape.summary(self.tape) | placements.summary_ranges(self.tape)
        if self.post_mortem is not None:
            of_step |= {"post_mortem": self.post_mortem.as_dict()}
        return of_step | {
            "outcome": self.outcome,
            "error": self.end.error or None,
            "steps": status.newest.step if status.newest is not None else 0,
            "seconds_per_step": status.seconds,
            "worst_step": status.worst._asdict() if status.worst is not None else None,
            "overhead": status.overhead,
            "growth_per_step": status.growth or None,
            "held_by": list(status.held_by),
            "notes": [*self.notes, *status.notes],
        }


def watch(program: Callable[[], None], machine: Machine, folder: pathlib.Path) -> Watched:
    """Run a program on a machine, show its steps, and write them to a folder unless it is `NO_FOLDER`."""
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
        now = live_status.of_live(lives[-1], _name(lives[-1], is_virtual), holders, shown)
        if now.growth and not now.held_by and shown_last and shown_last[0].held_by:
            # The variables of a program are gone at its end.
            now = now._replace(growth=shown_last[0].growth, held_by=shown_last[0].held_by)
        shown_last[:] = [now]
        return now

    # The hooks are gone before the compiled model runs (`live.watcher`).
    warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
    error, evidence, notes, peak = None, None, [], None
    with display(status), session.every_file(), machine.block():
        unwatch = endings.watch_threads(lambda end: ended.append(end))
        if is_virtual:
            processes.begin()
        try:
            with watch_program(lives.append, device, None if folder == NO_FOLDER else folder) as watched:
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
    last = status()
    assert last is not None
    post_mortem = of_failure(tape, evidence) if tape is not None else None
    return Watched(last, end, error, step, tape, outcome, tuple(notes), peak, folder, post_mortem)


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
