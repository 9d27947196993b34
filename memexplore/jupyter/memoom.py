"""Run `%memoom`: post-mortems of a whole notebook, and the memory of failed cells given back.

Each cell that runs out of memory gets a post-mortem, in a notebook above its traceback. On a virtual GPU each cell is
recorded for it; on a real GPU the allocator records its history.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

from memexplore.jupyter.recorded_cell import RecordedCell, end_history, keep_history, record_cell
from memexplore.text import ipython_shell, result_files

if TYPE_CHECKING:
    import torch

    from memexplore.jupyter.applied_setting import AppliedSetting
    from memexplore.jupyter.changed_cell import ChangedCell
    from memexplore.jupyter.memoom_page import MemoomPage
    from memexplore.out_of_memory.evidence_types import Evidence, Holder
    from memexplore.out_of_memory.failed_program import FailedProgram
    from memexplore.out_of_memory.names_before import NamesBefore
    from memexplore.out_of_memory.value import PostMortem
    from memexplore.out_of_memory.what_fits import WhatFits
    from memexplore.run.knobs.knobs import Knobs
    from memexplore.tape import Tape

USAGE = """Write one of:
  %memoom on              show a post-mortem for each cell that runs out of memory
  %memoom off             show none
  %memoom advise          search what would have fitted, for the cell that failed last
  %memoom apply NUMBER    apply a setting that was found to the model, and write the rest into the next cell
  %memoom cell            write the failed cell, changed so that it fits, into the next cell
  %memoom undo            restore the model
  %memoom free [--out]    free what failed cells still hold; --out also drops the notebook's outputs
  %memoom save FILE       save the last post-mortem: .html a page, .tape its tape, .pickle a PyTorch snapshot"""


AS_IT_STANDS = "The cell fits as it stands, without what the failed one holds."
RUN_AGAIN = "Run the cell again; %memoom undo restores the model."


class OutOfMemoryWatch:
    """The post-mortems of one shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell: InteractiveShell = weakref.proxy(shell)
        self.is_on = False
        self._cell: RecordedCell | None = None
        self._has_shown = False
        """Whether the running cell has shown a post-mortem."""
        self._earlier: Holder | None = None
        """What the error before the running cell holds."""
        self._source = self.failed_source = ""
        """The running cell, and the one that failed last, as they are written."""
        self.failed: FailedProgram | str = ""
        """The cell that failed last, or why it cannot be run again."""
        self.names_before: NamesBefore | None = None
        """What the names meant when the running cell began, None where it is not known."""
        self._models: weakref.WeakSet[torch.nn.Module] | None = None
        """The models of the notebook when the running cell began, None where they are not known."""
        self._is_made_by_cell = False
        """Whether the failed cell made its model."""
        self.last: PostMortem | None = None
        """The last post-mortem."""
        self.what_fits: WhatFits | None = None
        """What would have fitted, as far as it is known."""
        self._applied: AppliedSetting | None = None
        self.page: MemoomPage | None = None
        """The page whose search is the last one, None for a search without a page."""

    def command(self, line: str) -> None:
        """Carry out `%memoom`. Raises UsageError for an unknown command."""
        words = line.split(maxsplit=1)
        match words:
            case [] | ["on"]:
                self.is_on = True if words else self.is_on
                print(f"Post-mortems are {'on' if self.is_on else 'off: %memoom on shows them'}.")
            case ["off"]:
                self.is_on = False
                end_history()
                print("Post-mortems are off.")
            case ["advise"]:
                display(self.advise())
            case ["apply", number]:
                print(self._apply_number(number))
            case ["cell"]:
                print(self._cell_that_fits())
            case ["undo"]:
                print(self.undo())
            case ["free"]:
                print(self.free())
            case ["free", "--out"]:
                print(self.free(outputs=True))
            case ["save", name]:
                self._save(pathlib.Path(name.strip("\"'")).expanduser())
            case _:
                raise UsageError(f"{line!r} is no command of %memoom. {USAGE}")

    # -- cells

    def cell_begins(self, source: str) -> None:
        """Note what the error before holds, and record a cell on the virtual GPU that is on, for its post-mortem."""
        is_profiled = source.lstrip().startswith("%%memprofile")
        self._source = source
        self._earlier, self.names_before, self._models, self._has_shown = None, None, None, False
        if self.is_on or is_profiled:
            self._models = weakref.WeakSet()
        if "torch" in sys.modules:
            from memexplore.out_of_memory.names_before import NamesBefore

            self.names_before = NamesBefore(self._shell.user_ns)
        if (self.is_on or is_profiled) and "torch" in sys.modules:
            from memexplore.out_of_memory.evidence import earlier_error
            from memexplore.out_of_memory.failed_program import models_in

            self._earlier, self._models = earlier_error(), weakref.WeakSet(models_in(self._shell.user_ns))
        if self.is_on:
            keep_history()
        if self.is_on and not is_profiled and self._cell is None:
            self._cell = record_cell()

    def cell_ends(self, error: BaseException | None, show_view: Callable[[Tape], object]) -> None:
        """Show the tape and the post-mortem of a cell that ran out of memory, unless its profile has shown them."""
        cell, self._cell = self._cell, None
        if cell is None and not self.is_on:
            return
        try:
            evidence = self.evidence(error) if self.is_on and not self._has_shown else None
            tape = cell.end(error) if cell is not None else None
            if evidence is not None:
                from memexplore.out_of_memory.value import of_failure
                from memexplore.tape import Action

                # What a cell that turned its GPU on itself did is not recorded.
                post_mortem = of_failure(tape, evidence)
                pictures = []
                if post_mortem is not None and np.any(post_mortem.tape.action == Action.ALLOC):
                    pictures.append(functools.partial(show_view, post_mortem.tape))
                ipython_shell.most_important_first(functools.partial(self.show, post_mortem), *pictures)
        except Exception as failure:
            # The cell's own error has been shown; this one must not hide it.
            print(f"The post-mortem failed ({type(failure).__name__}: {failure}); please report this.")

    def evidence(self, error: BaseException | None) -> Evidence | None:
        """Note the cell that ran out of memory, and return what is known of the error; None for another error."""
        # Without torch there is no such error, and importing it takes a second.
        if error is None or "torch" not in sys.modules:
            return None
        from memexplore.out_of_memory.evidence import Shell, collect
        from memexplore.recorder.endings import out_of_memory_error

        if out_of_memory_error(error) is None:
            return None
        names, self.failed_source = self._shell.user_ns, self._source
        self.what_fits = None
        self._take_cell()
        self._is_made_by_cell = self._models is not None and any(
            model is not None and model not in self._models for model in self._failed_models()
        )
        if self._applied is not None:
            self.failed = "A cell is run again without an applied setting only: run %memoom undo, then the cell again."
        hidden = self._shell.user_ns_hidden
        own = {name: value for name, value in names.items() if name not in hidden or name in ("_", "__", "___")}
        return collect(error, Shell(own, names.get("Out", {})), earlier=self._earlier)

    def _take_cell(self) -> None:
        """Keep the cell that failed, to be run again in another process."""
        from memexplore.out_of_memory.failed_program import failed_cell

        self.failed = failed_cell(self.running_code(), self._shell.user_ns, self.names_before)

    def running_code(self) -> str:
        """Return the running cell as Python code; empty where it is not known."""
        code: str = self._shell.transform_cell(ipython_shell.cell_magic(self._source)[1])
        return code

    def _failed_models(self) -> list[torch.nn.Module | None]:
        """Return the models of the cell that failed last, None for each that is gone."""
        failed = self.failed
        return [] if isinstance(failed, str) else [model() for model in failed.models]

    def post_mortem(self, tape: Tape | None, evidence: Evidence | None) -> PostMortem | None:
        """Return the post-mortem of a failure; an error of its own is printed and ends nothing."""
        if evidence is None:
            return None
        from memexplore.out_of_memory.value import of_failure

        try:
            return of_failure(tape, evidence)
        except Exception as failure:
            print(f"The post-mortem failed ({type(failure).__name__}: {failure}); please report this.")
            return None

    def show(self, post_mortem: PostMortem | None) -> None:
        """Display a post-mortem, with a button that frees what the failed cell holds."""
        if post_mortem is None:
            return
        self.last, self._has_shown = post_mortem, True
        display(post_mortem)
        if getattr(self._shell, "kernel", None) is not None:
            from memexplore.jupyter.memoom_page import MemoomPage

            self.page = MemoomPage(self, self.failed, post_mortem.tape.meta)
            display(self.page.widget)

    def show_after_cell(self, post_mortem: PostMortem | None) -> None:
        """Display a post-mortem when the running cell has ended, below its traceback."""
        events = self._shell.events

        def ended(result: Any) -> None:
            events.unregister("post_run_cell", ended)
            self.show(post_mortem)

        if post_mortem is not None:
            self._has_shown = True
            events.register("post_run_cell", ended)

    # -- commands

    def advise(self) -> WhatFits:
        """Return what would have fitted for the cell that failed last. Raises UsageError before the first failure."""
        if self.last is None:
            raise UsageError("Nothing has run out of memory: run the cell that fails after %memoom on")
        from memexplore.out_of_memory.what_fits import WhatFits, search

        if isinstance(self.failed, str):
            return WhatFits(None, failed=self.failed)
        self.page = None
        self.what_fits = search(self.failed, self.last.tape.meta)
        return self.what_fits

    def apply(self, knobs: Knobs) -> AppliedSetting:
        """Apply a setting to the models of the cell that failed last, instead of one applied before.

        What the failed cell holds is freed, as the setting fits only without it. Raises ValueError where the setting
        cannot be applied.
        """
        from memexplore.jupyter.applied_setting import AppliedSetting

        self.undo()
        # Known before it changes anything: an interrupt at any line leaves what `undo` restores.
        self._applied = applied = AppliedSetting()
        try:
            applied.apply(knobs, *self._changeable_models())
        except BaseException:
            self.undo()
            raise
        self.free()
        return applied

    def why_not(self, knobs: Knobs) -> str:
        """Return why nothing of a setting can be applied to the models of the cell that failed last, "" if it can."""
        from memexplore.jupyter.applied_setting import why_not

        return why_not(knobs, *self._changeable_models())

    def _changeable_models(self) -> tuple[list[torch.nn.Module], str]:
        """Return the models of the cell that failed last (none if one is gone), and why they cannot be changed."""
        from memexplore.jupyter.applied_setting import MADE_BY_CELL

        models = [model for model in self._failed_models() if model is not None]
        is_complete = len(models) == len(self._failed_models())
        return models if is_complete else [], MADE_BY_CELL if self._is_made_by_cell else ""

    def undo(self) -> str:
        """Restore the model that a setting was applied to, and return what was done as a sentence."""
        if self._applied is None:
            return "No setting is applied."
        self._applied.undo()
        self._applied = None
        return "The model is as it was."

    def _apply_number(self, number: str) -> str:
        """Apply a setting of the last search, and write the lines of what only code can change into the next cell."""
        options = () if self.what_fits is None else self.what_fits.options
        if not number.isdecimal() or not 1 <= int(number) <= len(options):
            known = f"give a number from 1 to {len(options)}" if options else "run %memoom advise first"
            raise UsageError(f"There is no setting {number!r}: {known}")
        option = options[int(number) - 1]
        if not option.knobs.changed():
            return f"{AS_IT_STANDS} {self.undo()} {self.free()}"
        try:
            applied = self.apply(option.knobs)
        except ValueError as error:
            text, code = str(error), option.code
        else:
            text, code = f"{applied.text} {RUN_AGAIN}", applied.code
        if code:
            self._shell.set_next_input(code)
        return text

    def _cell_that_fits(self) -> str:
        """Write the failed cell with the smallest change with which it fits into the next cell, and say what changes.

        The cell frees first what the failed one holds. It runs when its user runs it.
        """
        what_fits = self.advise() if self.what_fits is None else self.what_fits
        changed = self.changed_cell(self.failed_source, what_fits)
        if isinstance(changed, str):
            return changed
        self._shell.set_next_input(changed.source)
        return f"{changed.text} Run it, as it stands in the next cell:\n{changed.diff}"

    def changed_cell(self, source: str, what_fits: WhatFits) -> ChangedCell | str:
        """Return a cell that failed, changed so that it fits, or the reason why it cannot be."""
        from memexplore.jupyter.changed_cell import changed_cell

        return changed_cell(source, self._shell.user_ns, what_fits)

    def free(self, outputs: bool = False) -> str:
        """Free what failed cells hold, with `outputs` also what `Out` holds; return two lines about what came back."""
        from memexplore.out_of_memory.release import release

        shell = self._shell
        result = getattr(shell, "last_execution_result", None)
        formatter = getattr(shell, "InteractiveTB", None)
        errors = [getattr(result, "error_in_exec", None), getattr(formatter, "value", None)]
        for name in ("tb", "value", "etype"):
            if formatter is not None and hasattr(formatter, name):
                setattr(formatter, name, None)
        return release(errors, self._drop_outputs if outputs else None).text

    def _drop_outputs(self) -> None:
        outputs = self._shell.user_ns.get("Out", {})
        names = {"_", "__", "___", *(f"_{number}" for number in outputs)}
        outputs.clear()
        for table in (self._shell.user_ns, self._shell.user_ns_hidden):
            for name in names & table.keys():
                table[name] = ""
        hook = self._shell.displayhook
        for name in ("_", "__", "___"):
            if hasattr(hook, name):
                setattr(hook, name, "")

    def _save(self, path: pathlib.Path) -> None:
        if self.last is None:
            raise UsageError("There is no post-mortem to save: run the cell that fails after %memoom on")
        try:
            _, problem = result_files.write(path, _writer(self.last, path))
        except (ValueError, ImportError) as error:
            raise UsageError(str(error)) from None
        print(problem or f"Wrote {path}")

    def close(self) -> None:
        """Turn post-mortems off, drop the recording of the running cell, and restore the model."""
        if self._cell is not None:
            self._cell.close()
        self._cell, self.is_on = None, False
        end_history()
        self.undo()


_WATCHES: weakref.WeakKeyDictionary[InteractiveShell, OutOfMemoryWatch] = weakref.WeakKeyDictionary()


def of_shell(shell: InteractiveShell) -> OutOfMemoryWatch:
    """Return the post-mortems of a shell."""
    if shell not in _WATCHES:
        _WATCHES[shell] = OutOfMemoryWatch(shell)
    return _WATCHES[shell]


def _writer(post_mortem: PostMortem, path: pathlib.Path) -> Callable[[pathlib.Path], object]:
    def write_page(path: pathlib.Path) -> None:
        from memexplore.page import report

        path.write_text(report.html(post_mortem.tape, post_mortem), encoding="utf-8")

    def write_snapshot(path: pathlib.Path) -> None:
        from memexplore.snapshot import save_snapshot

        save_snapshot(post_mortem.tape, path)

    writers: dict[str, Callable[[pathlib.Path], object]] = {
        ".html": write_page,
        ".tape": post_mortem.tape.save,
        ".parquet": post_mortem.tape.to_parquet,
        ".pickle": write_snapshot,
    }
    if path.suffix not in writers:
        raise UsageError(f"{path}: give the file the ending {', '.join(writers)}")
    return writers[path.suffix]
