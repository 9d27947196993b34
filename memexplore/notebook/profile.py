"""Profile of one cell or statement: from options to the contexts that record it, then to the widget of its Tape."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from memexplore import ipython_shell, result_files
from memexplore.notebook import cpu_names
from memexplore.notebook.options import Options
from memexplore.tape import Os
from memexplore.virtual_gpu.value_setting import Values

if TYPE_CHECKING:
    from memexplore.capture import Recording
    from memexplore.gpu_catalogue import Gpu
    from memexplore.live.live import Live
    from memexplore.notebook.memoom import OutOfMemoryWatch
    from memexplore.postmortem.value import PostMortem
    from memexplore.steps.cell import Cell
    from memexplore.steps.cost import Meter
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
    from memexplore import capture

    gpu = _virtual_gpu(options, notebook_gpu)
    replay = None
    with contextlib.ExitStack() as contexts:
        # Copies the names before the GPU is on: a later run begins with them as they are now.
        again = replayable_cell(shell, cell or "", options) if options.runs_again else None
        device: Any = None
        if gpu is not None:
            system, setting = options.os or Os.LINUX, options.values or Values.KNOWN
            try:
                block = capture.virtual(
                    gpu,
                    release=options.release,
                    os=system,
                    values=setting,
                    world=options.world,
                    rank=options.rank or 0,
                )
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
            recording = contexts.enter_context(capture.record(device="cpu") if is_cpu else capture.record())
        else:
            replay = Replay(again, contexts.enter_context(_metered(device)))
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
            from memexplore.steps.out_of_memory import without_locals

            # On a real GPU the tensors in the frames of the traceback would leave no memory for another run.
            without_locals(error)
        show_explorer(profile.replay, tape, profile.options, shell.user_ns)
    else:
        show_view(tape)
    watch.show(post_mortem)
    write_page(tape, profile.options, post_mortem)


def _watched(options: Options) -> contextlib.AbstractContextManager[Live]:
    """Return the watched run of a cell."""
    from memexplore.notebook.watching import watch

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
        from memexplore import report

        path = options.html.expanduser()
        page = report.html(tape, post_mortem)
        _, problem = result_files.write(path, lambda path: path.write_text(page, encoding="utf-8"))
        print(problem or f"Wrote {path}")


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the catalogue. Raises UsageError for an unknown name."""
    from memexplore import gpu_catalogue

    try:
        return gpu_catalogue.find(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _virtual_gpu(options: Options, notebook_gpu: Gpu | None) -> str | None:
    """Return the virtual GPU to switch on; None if one is on already, or the profile runs on a real device."""
    from memexplore import targets
    from memexplore.virtual_gpu.device import active

    if notebook_gpu is not None and options.runs_again:
        raise UsageError(
            f"--explore and --slider switch their own GPU on, and the virtual {notebook_gpu.name} is on: "
            f"run %memgpu off first"
        )
    if notebook_gpu is None and active() is not None and options.gpu is None and not options.runs_again:
        return None
    target = options.gpu or ("" if notebook_gpu is not None else targets.default_target())
    if targets.is_real(target):
        if option := _of_virtual_gpu(options):
            raise UsageError(f"{option} has no effect on a real device: add --gpu with the name of a virtual GPU")
        if options.gpu is not None:
            try:
                targets.real_device(target)
            except (ValueError, RuntimeError) as error:
                raise UsageError(str(error)) from None
        return None
    if notebook_gpu is None:
        if options.gpu is not None:
            find_gpu(options.gpu)
        return target
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
    from memexplore.steps.cell import Cell

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


def _metered(device: Any) -> contextlib.AbstractContextManager[Meter]:
    """Meter the operations of a virtual GPU; on a real device the meter stays empty."""
    from memexplore.steps.cost import Meter, measuring

    return contextlib.nullcontext(Meter()) if device is None else measuring(device.mode)


@contextlib.contextmanager
def record_like_replay(device: Any, gpu: str | None) -> Iterator[Recording]:
    """Record a cell under the same conditions as its later runs (`Cell.run`)."""
    from memexplore import capture, targets
    from memexplore.recorder import isolation
    from memexplore.recorder.isolation import Unrelated

    if device is not None:
        with capture.record() as recording:
            yield recording
        return
    target = targets.real_device(gpu or targets.CUDA)
    with isolation.isolated(target), capture.record(target, Unrelated.DROPPED) as recording:
        yield recording


def show_explorer(replay: Replay, tape: Tape, options: Options, names: dict[str, Any]) -> None:
    """Display an explorer of a cell that has run as written, with the variables after its run."""
    from memexplore.knobs.knobs import Knobs
    from memexplore.knobs.report import ApplyReport
    from memexplore.notebook.explore import explore_cell
    from memexplore.steps.trial import Trial

    trial = Trial(Knobs(), tape, ApplyReport(), replay.meter.total())
    release, system = options.release, options.os or Os.LINUX
    sliders = dict(options.sliders)
    display(explore_cell(replay.cell, trial, sliders, options.gpu, release=release, os=system, names=names))


def show_view(tape: Tape) -> None:
    """Display a view of a tape."""
    from memexplore.notebook.view import view

    display(view(tape))
