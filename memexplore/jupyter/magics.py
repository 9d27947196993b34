"""The magics `%%memprofile`, `%memprofile`, `%memgpu` and `%memoom`: record cells, choose the GPU, out of memory."""

from __future__ import annotations

import ast
import weakref
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import (
    Magics,
    line_cell_magic,
    line_magic,
    magics_class,
    needs_local_scope,
    no_var_expand,
)

from memexplore.jupyter import dry_run, profile
from memexplore.jupyter.memoom import of_shell
from memexplore.jupyter.notebook_gpu import NotebookGpu, restore_torch
from memexplore.jupyter.options import Options, gpu_line, parse, rewrite_first_line
from memexplore.jupyter.profile import Profile
from memexplore.jupyter.receiving import read_requests_after_replies
from memexplore.jupyter.traceback_below import TracebackBelow
from memexplore.virtual_gpu.values.setting import Values


@magics_class
class MemoryMagics(Magics):
    """The magics of one shell, its running profile and its notebook-wide virtual GPU."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._profile: Profile | None = None
        self._running_cells: list[str] = []
        self._notebook = NotebookGpu()
        self._oom = of_shell(shell)
        self._traceback = TracebackBelow(shell, lambda: bool(self._running_cells))

    # -- magics

    @no_var_expand
    @needs_local_scope
    @line_magic
    def memprofile(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Any:
        """Record the GPU memory of a cell or one statement, and show it.

            %%memprofile [--gpu NAME] [--release RELEASE] [--os SYSTEM] [--values SETTING]
                         [--world N [--rank R]] [-o NAME] [--html FILE]
                         [--dry-run] [--live] [--explore] [--slider NAME=LOW:HIGH:STEP]         (first line of a cell)
            %memprofile [the same options] STATEMENT

        --gpu NAME       run on a virtual GPU: a name that mx.gpus() lists, such as "RTX 4090", or a size such as
                         24GiB; cuda is the real GPU, cpu is training on the CPU. Default: the GPU of %memgpu, or else
                         the real GPU if usable, else a virtual T4.
        --release RELEASE
                         the PyTorch release whose rules the virtual GPU follows, such as 2.13.
        --os SYSTEM      the system whose GPU driver places segments: linux (the default), wsl or windows. Up to
                         PyTorch 2.11 this can change peaks.
        --values SETTING the values of the virtual GPU's tensors: known computes those that follow from known values
                         (the default), none computes none, real computes all of them on the CPU.
        --world N        run as one of N processes, as torchrun starts them on nodes of eight GPUs; --rank R says
                         which one (0 by default).
        -o NAME          store the Tape in the variable NAME.
        --html FILE      write a page that works without a notebook and without a network.
        --dry-run        only say whether the cell fits, and at which op it would fail: it runs on the virtual GPU and
                         in a copy of the names, so no variable is changed. Without --gpu on a machine with a GPU:
                         whether it fits into what that GPU has free right now.
        --live           show every training step while the cell runs, as mx.watch does; some steps are recorded
                         completely. -o NAME then stores the watched run: NAME.steps(), NAME.layers(), NAME.tape().
        --explore        show controls for the knobs beside the chart; each change runs the cell again, on the same
                         GPU.
        --slider NAME=LOW:HIGH:STEP
                         a slider for a variable that the cell assigns, such as batch=8:256:8; may be repeated. Each
                         assignment of the variable outside of functions gets the slider's value.

        The cell first runs as written, except with --dry-run. --explore and --slider then run it in a copy of the names
        that existed before it. They and --dry-run discard its printed output. Models, optimizers, schedulers and random
        states of earlier cells are restored. What cannot be undone: files that the cell writes, iterators and
        generators of earlier cells that it advances, its changes to other objects of earlier cells, and its work on the
        CPU beside a virtual GPU, which is executed.

        Variables, results and exceptions are those of an ordinary cell.
        """
        options, statement = parse(line)
        if cell is not None:
            _refuse_statement(statement)
            statement = cell
        if not statement.strip():
            raise UsageError("The cell has no code to profile: write %%memprofile above code, or %memprofile STATEMENT")
        if options.dry_run:
            raw = self._running_cells[-1] if self._running_cells else statement
            names = self.shell.user_ns if local_ns is None else {**self.shell.user_ns, **local_ns}
            dry_run.dry_run(self.shell, options, statement, raw, names)
            return None
        if options.runs_again:
            raise UsageError("--explore and --slider run a whole cell again: write %%memprofile as its first line")
        code = self._compile(statement)
        self._start(options, cell=None)
        __tracebackhide__ = True
        error: BaseException | None = None
        try:
            return _execute(code, self.shell.user_ns, self.shell.user_ns if local_ns is None else local_ns)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._finish(error)
            del error  # a cycle of the exception and this frame

    @no_var_expand
    @line_magic
    def _memprofile_cell(self, line: str) -> None:
        """Start the profile of the running cell; `rewrite_first_line` replaces `%%memprofile` by this magic."""
        options, statement = parse(line)
        _refuse_statement(statement)
        self._start(options, cell=self._running_cells[-1] if self._running_cells else "")

    @no_var_expand
    @line_magic
    def memgpu(self, line: str) -> None:
        """Run the whole notebook on a virtual GPU.

        %memgpu NAME [--values SETTING] [--world N [--rank R]]
                        from now on `cuda` is a virtual GPU: a name that mx.gpus() lists, or a size such as 24GiB;
                        --values as for %%memprofile; with --world the notebook is one rank of N, as torchrun starts it
        %memgpu off     return to the devices of this machine
        %memgpu         print which virtual GPU is on
        """
        from memexplore.run.machine import machine_of, release_or_installed
        from memexplore.text.units import size_text
        from memexplore.virtual_gpu.device import active
        from memexplore.virtual_gpu.files import session

        name, setting, world, rank = gpu_line(line)
        gpu = self._notebook.gpu
        if name and self._profile is not None:
            raise UsageError("A profile is running, and %memgpu cannot change its GPU: move %memgpu to its own cell")
        if name.lower() == "off":
            off = self._notebook.turn_off() or restore_torch()
            print("No virtual GPU is on." if off is None else f"The virtual {off} is off.")
            if off is not None:
                for text in session.report():
                    print(text)
            return
        if name:
            requested = profile.find_gpu(name)
            if gpu is not None and requested != gpu:
                raise UsageError(f"The virtual {gpu.name} is on: run %memgpu off before %memgpu {name}")
            on = active()
            if gpu is not None and on is not None and setting not in (None, on.values):
                raise UsageError(f"The virtual {gpu.name} is on with --values {on.values}: run %memgpu off first")
            if gpu is not None and on is not None and world is not None and (rank, world) != on.rank:
                raise UsageError(f"The virtual {gpu.name} is on as another rank: run %memgpu off first")
            if gpu is None:
                try:
                    device = machine_of(requested, values=setting or Values.KNOWN, world=world, rank=rank).turned_on()
                    self._notebook.turn_on(requested, device)
                except (RuntimeError, ValueError) as error:
                    raise UsageError(str(error)) from None
                gpu = requested
        if gpu is None:
            print("No virtual GPU is on. Run %memgpu T4 to use one in this notebook.")
        else:
            usable = size_text(gpu.for_release(release_or_installed(None)).capacity)
            print(f"The virtual {gpu.name} is on: {usable} usable.\nRun %memgpu off to switch it off.")

    @no_var_expand
    @line_magic
    def memoom(self, line: str) -> None:
        """Show a post-mortem of each cell that runs out of memory, and free what it holds.

        %memoom on              show a post-mortem for each cell that runs out of memory
        %memoom off             show none
        %memoom                 print whether they are shown
        %memoom advise          search what would have fitted, for the step that failed last: the model, its last call
                                and its optimizer are run on a virtual GPU with other settings, in another process;
                                where that cannot be, such as for several models, the cell in a copy of its names;
                                an interrupt keeps what was found
        %memoom apply NUMBER    apply a setting that was found to the model, and free what the failed cell holds; what
                                only the code of the loop can change is put into the next cell as lines
        %memoom cell            write the failed cell, changed so that it fits, into the next cell
        %memoom undo            restore the model
        %memoom free [--out]    free what failed cells still hold: frames of tracebacks, leftovers of autograd, cached
                                blocks. No variable is deleted; --out also drops the notebook's outputs (Out, _)
        %memoom save FILE       save the last post-mortem: FILE.html is a page, FILE.tape its tape, FILE.pickle a
                                PyTorch snapshot

        On a virtual GPU each cell is recorded meanwhile. On a real GPU the allocator records its history, unless you
        do so by torch.cuda.memory._record_memory_history; then yours goes on.
        `%debug` works until `%memoom free`.
        """
        self._oom.command(line)

    @no_var_expand
    @needs_local_scope
    @line_cell_magic
    def memcompare(self, line: str, cell: str | None = None, local_ns: dict[str, Any] | None = None) -> Any:
        """Compare what a program takes on the GPU of this machine with what memexplore predicts.

        %memcompare STEP        run an mx.Step, the value of an expression, on both, and show what differs
        %%memcompare            the same with the cell, which is run in a copy of the notebook's names

        The value is a Comparison: str() is the answer with a table, .differing the requests that differ.
        """
        from memexplore.jupyter.comparing import compared

        names = self.shell.user_ns if local_ns is None else {**self.shell.user_ns, **local_ns}
        raw = self._running_cells[-1] if self._running_cells else cell or ""
        return compared(self.shell, line, cell, raw, names)

    # -- a profile

    def _start(self, options: Options, *, cell: str | None) -> None:
        if self._profile is not None:
            if cell is None or cell == self._profile.cell:
                raise UsageError("A profile is running: end it before you start another")
            self._finish()
        self._profile = profile.start(self.shell, options, cell=cell, notebook_gpu=self._notebook.gpu)

    def _finish(self, error: BaseException | None = None) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            profile.finish(self.shell, running, self._oom, error)

    def _compile(self, statement: str) -> tuple[Any, Any]:
        """Compile the statements and a last expression separately; tracebacks show their lines."""
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
                raise UsageError("%memprofile cannot await: write %%memprofile as the first line of the cell") from None
            raise
        return body, value

    # -- events of the shell

    def pre_run_cell(self, info: Any) -> None:
        """Push the text of a cell that starts."""
        self._running_cells.append(info.raw_cell)
        self._notebook.cell_begins()
        if len(self._running_cells) == 1:
            self._oom.cell_begins(info.raw_cell)

    def post_run_cell(self, result: Any) -> None:
        """Finish the profile of a cell that has ended, also after an exception or interrupt."""
        # Cells are identified by their text: a cell may run other cells, and IPython creates a new `info` after an
        # interrupt. `result` is None if IPython itself was interrupted.
        cell = None if result is None else result.info.raw_cell
        while self._running_cells and (cell is None or cell in self._running_cells):
            if self._running_cells.pop() == cell:
                break
        error = KeyboardInterrupt() if result is None else result.error_in_exec
        running = self._profile
        if running is not None and running.cell is not None and (cell is None or cell == running.cell):
            self._finish(error)
        if not self._running_cells:
            self._oom.cell_ends(error, profile.show_view)

    def close(self) -> None:
        """Stop the running profile without showing it, and switch the notebook's virtual GPU off."""
        running, self._profile = self._profile, None
        if running is not None:
            running.contexts.close()
        self._oom.close()
        self._traceback.close()
        if (name := self._notebook.turn_off()) is not None:
            print(f"The virtual {name} is off: %memgpu turns one on again")


def _refuse_statement(statement: str) -> None:
    """Raise UsageError if a statement stands in the first line of a cell."""
    if statement:
        raise UsageError(f"%%memprofile takes options only: move {statement!r} to the lines below it")


def _execute(code: tuple[Any, Any], global_names: dict[str, Any], local_names: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    body, value = code
    exec(body, global_names, local_names)
    return None if value is None else eval(value, global_names, local_names)


_LOADED: weakref.WeakKeyDictionary[InteractiveShell, MemoryMagics] = weakref.WeakKeyDictionary()


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add the magics of `MemoryMagics` to the shell. Loading twice has no further effect."""
    if shell in _LOADED:
        return
    read_requests_after_replies()
    magics = MemoryMagics(shell)
    shell.register_magics(magics)
    # Registered apart, because IPython calls the cell magic only if `rewrite_first_line` left the cell unchanged.
    shell.register_magic_function(magics.memprofile, "cell", "memprofile")
    shell.input_transformers_cleanup.append(rewrite_first_line)
    shell.events.register("pre_run_cell", magics.pre_run_cell)
    shell.events.register("post_run_cell", magics.post_run_cell)
    _LOADED[shell] = magics


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove what loading has added, stop the running profile, and switch the virtual GPU off."""
    magics = _LOADED.pop(shell, None)
    if magics is None:
        return
    magics.close()
    shell.input_transformers_cleanup.remove(rewrite_first_line)
    shell.events.unregister("pre_run_cell", magics.pre_run_cell)
    shell.events.unregister("post_run_cell", magics.post_run_cell)
    for kind, names in {**magics.magics, "cell": {**magics.magics["cell"], "memprofile": ""}}.items():
        for name in names:
            shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop(type(magics).__name__, None)
