"""Profile of one cell or statement: from options to the contexts that record it, then to the widget of its Tape."""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from memexplore.jupyter import cpu_names
from memexplore.jupyter.options import Options
from memexplore.text import ipython_shell, result_files

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.jupyter.memoom import OutOfMemoryWatch
    from memexplore.live.live import Live
    from memexplore.out_of_memory.value import PostMortem
    from memexplore.recorder.recording import Recording
    from memexplore.run.machine import Machine
    from memexplore.run.programs.cell import Cell
    from memexplore.run.programs.cost import Meter
    from memexplore.tape import Tape


class Replay(NamedTuple):
    """The start of an explorer: the cell with the names from before its run, and the meter of that run."""

    cell: Cell
    meter: Meter


class Profile(NamedTuple):
    """A running profile."""

    options: Options
    contexts: contextlib.ExitStack
    recording: Recording | Live
    """What records the cell; a watched run with `--live`."""
    cell: str | None
    """Text of the cell at whose end the profile ends; None if it ends with a statement."""
    replay: Replay | None = None
    """Present if an explorer will run the cell again."""


def start(shell: InteractiveShell, options: Options, *, cell: str | None, notebook_gpu: Gpu | None) -> Profile:
    """Start recording, on a virtual GPU if the options or the machine require one.

    Raises UsageError, and leaves nothing switched on, for options that contradict each other or the notebook's GPU.
    """
    from memexplore.recorder.recording import record
    from memexplore.run.programs.cost import measuring

    machine = _virtual_machine(options, notebook_gpu)
    replay = None
    with contextlib.ExitStack() as contexts:
        # Copies the names before the GPU is on: a later run begins with them as they are now.
        again = replayable_cell(shell, cell or "", options) if options.runs_again else None
        device: Any = None
        if machine is not None:
            try:
                block = machine.turned_on()
                # Before it begins: an interrupt in between would leave the GPU on.
                contexts.push(block)
                device = block.__enter__()
            except (ValueError, RuntimeError) as error:
                raise UsageError(str(error)) from None
        recording: Recording | Live
        if options.live:
            recording = contexts.enter_context(_watched(options))
        elif again is None:
            is_cpu = options.gpu == "cpu"
            recording = contexts.enter_context(record(device="cpu") if is_cpu else record())
        else:
            replay = Replay(again, contexts.enter_context(measuring(device)))
            contexts.enter_context(again.loop.watching())
            recording = contexts.enter_context(record_like_replay(device, options.gpu))
        return Profile(options, contexts.pop_all(), recording, cell, replay)


def finish(
    shell: InteractiveShell, profile: Profile, watch: OutOfMemoryWatch, error: BaseException | None = None
) -> None:
    """Stop recording, then store, show and write the Tape as the options say; `error` is the cell's exception.

    A post-mortem is shown for a cell that ran out of memory.
    """
    from memexplore.live.live import Live

    # Before the virtual GPU is off, while the frames of the error are alive.
    evidence = watch.evidence(error)
    if error is not None:
        profile.recording.ended_by(error)
    try:
        profile.contexts.close()
    finally:
        # Once more for what an interrupt has left.
        profile.contexts.close()
    if isinstance(profile.recording, Live):
        live = profile.recording
        post_mortem = watch.post_mortem(live.tape(live.recorded[-1]) if live.recorded else None, evidence)
        _finish_live(shell, live, profile.options, post_mortem)
        watch.show(post_mortem)
        return
    post_mortem = watch.post_mortem(profile.recording.tape, evidence)
    tape = cpu_names.with_advice(profile.recording.tape, profile.cell or "", shell.user_ns, profile.options.gpu)
    if profile.options.name is not None:
        shell.user_ns[profile.options.name] = tape
    if profile.replay is not None and _can_run_again(error) and not tape.meta.advice:
        if error is not None:
            from memexplore.run.programs.out_of_memory import without_locals

            # On a real GPU the tensors in the frames of the traceback would leave no memory for another run.
            without_locals(error)
        show_picture = functools.partial(show_explorer, profile.replay, tape, profile.options, shell.user_ns)
    else:
        show_picture = functools.partial(show_view, tape)
    ipython_shell.most_important_first(functools.partial(watch.show, post_mortem), show_picture)
    write_page(tape, profile.options, post_mortem)


def _watched(options: Options) -> contextlib.AbstractContextManager[Live]:
    """Return the watched run of a cell."""
    from memexplore.jupyter.watching import watch

    return watch(device="cpu" if options.gpu == "cpu" else None, form="line" if options.line else "page")


def _finish_live(shell: InteractiveShell, live: Live, options: Options, post_mortem: PostMortem | None) -> None:
    """Store and write a watched run as the options say.

    In a notebook its page was shown when it began; in a terminal, its recorded step with the highest peak is shown.
    """
    if options.name is not None:
        shell.user_ns[options.name] = live
    if not len(live.steps()):
        print(
            "No training step ended in this cell: a step ends when an optimizer has stepped. "
            "Write %%memprofile without --live to see the memory of other code."
        )
    elif live.recorded:
        if not ipython_shell.is_notebook():
            print(live)
            show_view(live.tape())
        write_page(live.tape(), options, post_mortem)


def write_page(tape: Tape, options: Options, post_mortem: PostMortem | None = None) -> None:
    """Write the stand-alone page, if the options name a file."""
    if options.html is not None:
        from memexplore.page import report

        path = options.html.expanduser()
        page = report.html(tape, post_mortem)
        _, problem = result_files.write(path, lambda path: path.write_text(page, encoding="utf-8"))
        print(problem or f"Wrote {path}")


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the catalogue. Raises UsageError for an unknown name."""
    from memexplore.hardware import catalogue

    try:
        return catalogue.find(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _virtual_machine(options: Options, notebook_gpu: Gpu | None) -> Machine | None:
    """Return the machine whose virtual GPU is to be switched on; None if one is on, or on a real device."""
    from memexplore.run.machine import CPU, CUDA, default_name
    from memexplore.virtual_gpu.device import active

    if notebook_gpu is not None and options.runs_again:
        raise UsageError(
            f"--explore and --slider switch their own GPU on, and the virtual {notebook_gpu.name} is on: "
            f"run %memgpu off first"
        )
    if notebook_gpu is None and active() is not None and options.gpu is None and not options.runs_again:
        return None
    target = options.gpu or ("" if notebook_gpu is not None else default_name())
    if target in (CPU, CUDA):
        if option := _of_virtual_gpu(options):
            raise UsageError(f"{option} has no effect on a real device: add --gpu with the name of a virtual GPU")
        if options.gpu is not None:
            options.machine()
        return None
    if notebook_gpu is None:
        return options.machine()
    if options.gpu is not None and find_gpu(options.gpu) != notebook_gpu:
        raise UsageError(
            f"--gpu {options.gpu} contradicts %memgpu: the virtual {notebook_gpu.name} is on. "
            f"Run %memgpu off first, or remove --gpu"
        )
    if option := _of_virtual_gpu(options):
        raise UsageError(
            f"{option} contradicts %memgpu: the virtual {notebook_gpu.name} is on. Run %memgpu off first, "
            f"or remove {option}"
        )
    return None


def _of_virtual_gpu(options: Options) -> str | None:
    """Return the first given option that sets a rule of the virtual GPU, None without one."""
    names = ("release", "os", "values", "world")
    return next((f"--{name}" for name in names if getattr(options, name) is not None), None)


def replayable_cell(shell: InteractiveShell, raw: str, options: Options) -> Cell:
    """Return the running cell for later runs, with its line numbers and its file name in tracebacks."""
    from memexplore.run.programs.cell import Cell

    transformed = shell.transform_cell(raw)
    name = _running_file(transformed) or shell.compile.cache(transformed, shell.execution_count, raw)
    # The first line is the call that started the profile.
    try:
        cell = Cell("\n" + transformed.partition("\n")[2], shell.user_ns, name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    assigned = cell.assigned()
    for variable, _ in options.sliders:
        if variable not in assigned:
            raise UsageError(
                f"--slider {variable}: the cell assigns no variable {variable!r}; "
                f"it assigns {', '.join(assigned) or 'none'}"
            )
    return cell


def _running_file(source: str) -> str:
    """Return the file name of the running cell with this source, empty if none runs.

    Another call of `compile.cache` would give it the number of the next cell.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if name in linecache.cache and linecache.getlines(name) == [f"{line}\n" for line in source.splitlines()]:
            return name
        frame = frame.f_back
    return ""


def _can_run_again(error: BaseException | None) -> bool:
    """Return whether the cell ended normally or ran out of memory, which other knobs may avoid."""
    import torch

    return error is None or isinstance(error, torch.OutOfMemoryError)


@contextlib.contextmanager
def record_like_replay(device: Any, gpu: str | None) -> Iterator[Recording]:
    """Record a cell under the same conditions as its later runs (`Cell.execute`)."""
    from memexplore.recorder import isolation
    from memexplore.recorder.isolation import Unrelated
    from memexplore.recorder.recording import record
    from memexplore.run.machine import CUDA, real_device

    if device is not None:
        with record() as recording:
            yield recording
        return
    target = real_device(gpu or CUDA)
    with isolation.isolated(target), record(target, Unrelated.DROPPED) as recording:
        yield recording


def show_explorer(replay: Replay, tape: Tape, options: Options, names: dict[str, Any]) -> None:
    """Display an explorer of a cell that has run as written, with the variables after its run."""
    from memexplore.jupyter.explore import explore_cell
    from memexplore.run.knobs.applying.report import ApplyReport
    from memexplore.run.knobs.knobs import Knobs
    from memexplore.run.programs.execution import Execution

    seen = replay.cell.loop.seen
    samples = 1 if seen is None else seen.trained or 1
    execution = Execution(Knobs(), tape, ApplyReport(), replay.meter.total(), samples=samples)
    display(explore_cell(replay.cell, execution, dict(options.sliders), options.machine(), names=names))


def show_view(tape: Tape) -> None:
    """Display a view of a tape."""
    from memexplore.jupyter.view import view

    display(view(tape))
