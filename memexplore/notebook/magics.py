"""`%%memprofile`, `%memprofile` and `%memgpu`: record a cell or a line, and choose the GPU of a notebook."""

from __future__ import annotations

import ast
import contextlib
import keyword
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_magic, magics_class, needs_local_scope, no_var_expand
from IPython.display import display

from memexplore.notebook.options import Options, begin_natively, parser, split_options

if TYPE_CHECKING:
    from memexplore.capture import Recording
    from memexplore.gpu_catalogue import Gpu
    from memexplore.steps.cell import Cell
    from memexplore.steps.cost import Meter
    from memexplore.tape import Tape


class _Explored(NamedTuple):
    """What an explorer of a cell needs to begin with: the cell before its run, and what its run will have cost."""

    cell: Cell
    meter: Meter


class _Run(NamedTuple):
    """A profile that is going on, and the cell that it ends with (None: it ends with its statement)."""

    options: Options
    contexts: contextlib.ExitStack
    recording: Recording
    cell: str | None
    explored: _Explored | None = None


@magics_class
class MemoryMagics(Magics):
    """The magics of one shell, and what of them is going on."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._parser = parser()
        self._run: _Run | None = None
        self._cells: list[str] = []
        self._notebook_gpu: Gpu | None = None
        self._notebook_context = contextlib.ExitStack()

    # -- magics

    @no_var_expand
    @needs_local_scope
    @line_magic
    def memprofile(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Any:
        """Record where GPU memory goes while a cell or one statement runs, and show it.

            %%memprofile [--gpu NAME] [--release RELEASE] [-o NAME] [--html FILE] [--explore]
                         [--slider NAME=LOW:HIGH:STEP]                              (first line of a cell)
            %memprofile [the same options] STATEMENT

        --gpu NAME       run on a virtual GPU: a name that mx.gpus() lists, such as "RTX 4090", or a size such as
                         24GiB; cuda is the real GPU, cpu plain training without one. Default: the GPU of
                         %memgpu, or else the real GPU if usable, else a virtual T4.
        --release RELEASE
                         the PyTorch release whose rules the virtual GPU follows, such as 2.13.
        -o NAME          keep the Tape in the variable NAME.
        --html FILE      write a page that works without a notebook and without a network.
        --explore        show the knobs beside the picture: turning one runs the cell again, where it ran first.
        --slider NAME=LOW:HIGH:STEP
                         a slider for a variable that the cell assigns, such as batch=8:256:8; may be given again.
                         The variable gets the value wherever the cell assigns it outside of functions.

        The cell is first run as it is written. --explore and --slider then run it in a copy of the names that it
        found, and drop what it prints. Models, optimizers, schedulers and random states of earlier cells come back as
        they were. What cannot be undone: files that the cell writes, iterators and generators of earlier cells that it
        moves on, what it changes in other objects of earlier cells, and what it runs on the CPU beside a virtual GPU,
        which runs for real.

        Variables, results and exceptions are those of an ordinary cell.
        """
        options, statement = self._read(line)
        if cell is not None:
            if statement:
                raise UsageError(f"%%memprofile takes options only, {statement!r} belongs into the lines below it")
            statement = cell
        if not statement.strip():
            raise UsageError("there is nothing to profile: write %%memprofile above code, or %memprofile STATEMENT")
        if options.explore or options.sliders:
            raise UsageError("--explore and --slider run a cell again: write %%memprofile as its first line")
        code = self._compile(statement)
        self._begin(options, cell=None)
        __tracebackhide__ = True
        try:
            return _execute(code, self.shell.user_ns, self.shell.user_ns if local_ns is None else local_ns)
        finally:
            self._end()

    @no_var_expand
    @line_magic
    def _memprofile_cell(self, line: str) -> None:
        """Begin the profile of the cell that is running; `%%memprofile` becomes this."""
        options, statement = self._read(line)
        if statement:
            raise UsageError(f"%%memprofile takes options only, {statement!r} belongs into the lines below it")
        self._begin(options, cell=self._cells[-1] if self._cells else "")

    @no_var_expand
    @line_magic
    def memgpu(self, line: str) -> None:
        """Run the whole notebook on a virtual GPU.

        %memgpu NAME    from here on `cuda` is a virtual GPU: a name that mx.gpus() lists, or a size such as 24GiB
        %memgpu off     back to what the machine has
        %memgpu         say which GPU is on
        """
        from memexplore import capture
        from memexplore.units import size_text

        wanted = line.strip().strip("\"'")
        gpu = self._notebook_gpu
        if wanted and self._run is not None:
            raise UsageError("%memgpu cannot change the GPU while a profile is running: put it into a cell of its own")
        if wanted.lower() == "off":
            self._notebook_gpu = None
            self._notebook_context.close()
            print("No virtual GPU is on." if gpu is None else f"The virtual {gpu.name} is off.")
            return
        if wanted:
            found = _find(wanted)
            if gpu is not None and found != gpu:
                raise UsageError(f"the virtual {gpu.name} is on: run %memgpu off before you take another GPU")
            if gpu is None:
                self._notebook_context.enter_context(capture.virtual(wanted))
                gpu = self._notebook_gpu = found
        if gpu is None:
            print("No virtual GPU is on; %memgpu T4 makes this notebook run on one.")
        else:
            usable = size_text(gpu.under(capture.release_or_installed(None)).capacity)
            print(f"Virtual {gpu.name} is on: {usable} usable. %memgpu off ends it.")

    # -- a profile

    def _read(self, line: str) -> tuple[Options, str]:
        arguments, statement = split_options(line)
        options = Options(**vars(self._parser.parse_args(arguments)))
        if options.name is not None and (not options.name.isidentifier() or keyword.iskeyword(options.name)):
            raise UsageError(f"-o needs the name of a variable, {options.name!r} is none")
        # Said before the run: a typing error must not cost the run.
        if options.html is not None and not options.html.expanduser().absolute().parent.is_dir():
            raise UsageError(f"--html {options.html}: there is no folder {options.html.parent}")
        return options, statement

    def _virtual_gpu(self, options: Options) -> str | None:
        """The virtual GPU to switch on for this profile; None where the running one or a real device is taken."""
        from memexplore import targets
        from memexplore.virtual_gpu.device import active

        on, again = self._notebook_gpu, options.explore or options.sliders
        if on is not None and again:
            raise UsageError(f"--explore needs a GPU of its own: run %memgpu off first, {on.name} is on")
        if on is None and active() is not None and options.gpu is None and not again:
            return None
        place = options.gpu or ("" if on is not None else targets.default_target())
        if targets.is_real(place):
            if options.release is not None:
                raise UsageError("--release needs --gpu: a real GPU follows the PyTorch that is installed")
            if options.gpu is not None:
                try:
                    targets.real_device(place)
                except (ValueError, RuntimeError) as error:
                    raise UsageError(str(error)) from None
            return None
        if options.gpu is not None:
            found = _find(options.gpu)
            if on is not None and found != on:
                raise UsageError(
                    f"the virtual {on.name} is on and --gpu asks for {found.name}: "
                    f"run %memgpu off first, or leave --gpu out"
                )
        if on is not None:
            if options.release is not None:
                raise UsageError(f"--release needs a GPU of its own: run %memgpu off first, {on.name} is on")
            return None
        return place

    def _begin(self, options: Options, *, cell: str | None) -> None:
        from memexplore import capture

        if self._run is not None:
            if cell is None or cell == self._run.cell:
                raise UsageError("a profile is running already: one %memprofile at a time")
            self._end()
        gpu = self._virtual_gpu(options)
        explored = None
        with contextlib.ExitStack() as contexts:
            # Before the GPU is on: the cell is to find everything as it is now when it is run again.
            again = self._cell(cell or "", options) if options.explore or options.sliders else None
            device: Any = None
            if gpu is not None:
                try:
                    device = contexts.enter_context(capture.virtual(gpu, release=options.release))
                except (ValueError, RuntimeError) as error:
                    raise UsageError(str(error)) from None
            if again is None:
                on_cpu = options.gpu == "cpu"
                recording = contexts.enter_context(capture.record(device="cpu") if on_cpu else capture.record())
            else:
                explored = _Explored(again, contexts.enter_context(_metered(device)))
                recording = contexts.enter_context(_as_again(device, options.gpu))
            self._run = _Run(options, contexts.pop_all(), recording, cell, explored)

    def _cell(self, raw: str, options: Options) -> Cell:
        """The running cell, to be run again; its lines keep their numbers, and its file in tracebacks its name."""
        from memexplore.steps.cell import Cell

        shell = self.shell
        transformed = shell.transform_cell(raw)
        name = shell.compile.cache(transformed, shell.execution_count, raw)
        # The first line is the one that started the profile.
        try:
            cell = Cell("\n" + transformed.partition("\n")[2], shell.user_ns, name)
        except ValueError as error:
            raise UsageError(str(error)) from None
        own = cell.assigned()
        for variable, _ in options.sliders:
            if variable not in own:
                raise UsageError(
                    f"--slider {variable}: the cell assigns no variable {variable!r}; "
                    f"it assigns {', '.join(own) or 'none'}"
                )
        return cell

    def _end(self, error: BaseException | None = None) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        run.contexts.close()
        tape = run.recording.tape
        if run.options.name is not None:
            self.shell.user_ns[run.options.name] = tape
        if run.explored is not None and _ran_to_its_end(error):
            if error is not None:
                from memexplore.steps.out_of_memory import without_locals

                # What its frames hold on a real GPU would leave no room to try a knob.
                without_locals(error)
            _explore(run.explored, tape, run.options)
        else:
            _show(tape)
        if run.options.html is not None:
            from memexplore import report

            path = run.options.html.expanduser()
            path.write_text(report.html(tape), encoding="utf-8")
            print(f"Wrote {path}")

    def _compile(self, statement: str) -> tuple[Any, Any]:
        """Compile all statements but a last expression, and that expression, for the traceback to show their lines."""
        shell = self.shell
        source = shell.transform_cell(statement)
        name = shell.compile.cache(source, len(shell.user_ns.get("In", [""])) - 1)
        try:
            tree = ast.parse(source, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            body = compile(tree, name, "exec", dont_inherit=True)
            value = None if last is None else compile(ast.Expression(last.value), name, "eval", dont_inherit=True)
        except SyntaxError as error:
            if "outside" in str(error) and "await" in statement:
                raise UsageError("%memprofile cannot await: write %%memprofile above the statement") from None
            raise
        return body, value

    # -- events of the shell

    def pre_run_cell(self, info: Any) -> None:
        """Note the cell that starts."""
        self._cells.append(info.raw_cell)

    def post_run_cell(self, result: Any) -> None:
        """End the profile of the cell that has ended, however it has ended."""
        # A cell may run cells itself, and where the shell had to catch an interrupt it makes a new `info`: only the
        # text tells which cell this is. There is no result where even that was interrupted.
        cell = None if result is None else result.info.raw_cell
        while self._cells and (cell is None or cell in self._cells):
            if self._cells.pop() == cell:
                break
        if self._run is not None and self._run.cell is not None and (cell is None or cell == self._run.cell):
            self._end(None if result is None else result.error_in_exec)

    def close(self) -> None:
        """End everything that is going on."""
        run, self._run = self._run, None
        if run is not None:
            run.contexts.close()
        self._notebook_gpu = None
        self._notebook_context.close()


def _find(name: str) -> Gpu:
    from memexplore import gpu_catalogue

    try:
        return gpu_catalogue.find(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _execute(code: tuple[Any, Any], global_names: dict[str, Any], local_names: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    body, value = code
    exec(body, global_names, local_names)
    return None if value is None else eval(value, global_names, local_names)


def _ran_to_its_end(error: BaseException | None) -> bool:
    """Whether a cell can be run again: running out of memory is what the knobs are for."""
    import torch

    return error is None or isinstance(error, torch.OutOfMemoryError)


def _metered(device: Any) -> contextlib.AbstractContextManager[Meter]:
    """Note the work of a virtual GPU, and none where the cell runs for real."""
    from memexplore.steps.cost import Meter, measuring

    return contextlib.nullcontext(Meter()) if device is None else measuring(device.mode)


@contextlib.contextmanager
def _as_again(device: Any, gpu: str | None) -> Iterator[Recording]:
    """Record a cell in the way in which `Cell.run` will do it again."""
    from memexplore import capture, targets
    from memexplore.recorder import isolation
    from memexplore.recorder.real_device import Unrelated

    if device is not None:
        with capture.record() as recording:
            yield recording
        return
    found = targets.real_device(gpu or targets.CUDA)
    with isolation.isolated(found), capture.record(found, Unrelated.DROPPED) as recording:
        yield recording


def _explore(explored: _Explored, tape: Tape, options: Options) -> None:
    from memexplore.knobs.knobs import Knobs
    from memexplore.knobs.report import Applied
    from memexplore.notebook.explorers import explore_cell
    from memexplore.steps.trial import Trial

    trial = Trial(Knobs(), tape, Applied(), explored.meter.total())
    sliders = dict(options.sliders)
    display(explore_cell(explored.cell, trial, sliders, options.gpu, release=options.release))


def _show(tape: Tape) -> None:
    from memexplore.notebook.view import view

    display(view(tape))


_LOADED: weakref.WeakKeyDictionary[InteractiveShell, MemoryMagics] = weakref.WeakKeyDictionary()
_NAMES: Sequence[tuple[str, str]] = (
    ("line", "memprofile"),
    ("cell", "memprofile"),
    ("line", "memgpu"),
    ("line", "_memprofile_cell"),
)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add `%%memprofile`, `%memprofile` and `%memgpu` to the shell; a second time changes nothing."""
    if shell in _LOADED:
        return
    magics = MemoryMagics(shell)
    shell.register_magics(magics)
    # One function is both: `line_cell_magic` would hide that the cell magic is only the way round the transformer.
    shell.register_magic_function(magics.memprofile, "cell", "memprofile")
    shell.input_transformers_cleanup.append(begin_natively)
    shell.events.register("pre_run_cell", magics.pre_run_cell)
    shell.events.register("post_run_cell", magics.post_run_cell)
    _LOADED[shell] = magics


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take everything away that loading has added, and end what is going on."""
    magics = _LOADED.pop(shell, None)
    if magics is None:
        return
    magics.close()
    shell.input_transformers_cleanup.remove(begin_natively)
    shell.events.unregister("pre_run_cell", magics.pre_run_cell)
    shell.events.unregister("post_run_cell", magics.post_run_cell)
    for kind, name in _NAMES:
        shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop(type(magics).__name__, None)
