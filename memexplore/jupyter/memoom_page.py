"""Show the buttons below a post-mortem: search what would have fitted, apply a setting, free the memory still held.

The search runs beside the kernel; settings are shown as they are found.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets

from memexplore.jupyter.explorer_search import Search
from memexplore.jupyter.main_thread import MainThread
from memexplore.run.knobs.knobs import Knobs

if TYPE_CHECKING:
    from memexplore.jupyter.changed_cell import ChangedCell
    from memexplore.jupyter.memoom import OutOfMemoryWatch
    from memexplore.out_of_memory.failed_program import FailedProgram
    from memexplore.run.search.advice import Option
    from memexplore.run.search.search_process import Report
    from memexplore.tape import Meta

_CHANGE = "Change the cell so that it fits"
_FIND = "Find what would have fitted"
_LATER = "Another cell has run out of memory since: its settings are below it."


class MemoomPage:
    """The buttons of one post-mortem."""

    def __init__(self, watch: OutOfMemoryWatch, failed: FailedProgram | str, meta: Meta) -> None:
        self._watch, self._failed, self._meta = watch, failed, meta
        self._thread = MainThread()
        self._drawing = threading.Lock()
        """Held while a drawing is requested and has not begun."""
        cannot = failed if isinstance(failed, str) else ""
        start = None if cannot else self._begin
        self._search = Search(start, cannot, self._thread, threading.RLock(), self._draw_soon, self._draw_soon)
        tooltip = "Settings of the cell, each run on a virtual GPU beside the kernel"
        self._find = self._button(_FIND, tooltip, self._start)
        tooltip = "%memoom cell: search, then show the failed cell with the smallest change with which it fits"
        self._change = self._button(_CHANGE, tooltip, self._start_change)
        self._change.button_style = "primary"
        self._source, self._is_cell_wanted = watch.failed_source, False
        self._cell = ipywidgets.VBox()
        """The changed cell, with the button that runs it."""
        self._stop = self._button("Stop", "End the search and keep what it has found", lambda: None)
        # At once, also while a cell runs.
        self._stop.on_click(lambda _: self._search.stop())
        self._stop.layout.display = "none"
        free = self._button("Free what the failed cell holds", "%memoom free: no variable is deleted", self._free)
        self._progress = ipywidgets.HTML()
        self._options = ipywidgets.VBox()
        self._drawn: tuple[Any, ...] = ()
        """What the options were drawn from."""
        self._applied: Knobs | None = None
        self._note = ipywidgets.HTML()
        self._said: tuple[Knobs, str] | None = None
        """The setting whose button was pressed last, and what was done as HTML."""
        buttons = [self._change, self._find, self._stop, free]
        buttons = ipywidgets.HBox(buttons, layout=ipywidgets.Layout(flex_flow="row wrap"))
        self.widget = ipywidgets.VBox([buttons, self._progress, self._note, self._cell, self._options])
        self.widget.add_class("memexplore-memoom")

    # -- the search

    def _begin(self, _: Knobs, report: Report, __: MainThread) -> Any:
        from memexplore.out_of_memory.what_fits import FailedProgramSearch

        assert not isinstance(self._failed, str)
        return FailedProgramSearch(self._failed, self._meta, report).stop

    def _start(self) -> None:
        if self._is_newest:
            self._watch.page = self
        self._search.start(Knobs())
        self._draw()

    def _start_change(self) -> None:
        self._is_cell_wanted = True
        if self._search.advice is None or self._search.state.state != "done":
            self._start()
        self._draw()

    @property
    def _is_newest(self) -> bool:
        """Whether no other cell has failed since."""
        return self._watch.failed is self._failed

    def _draw_soon(self) -> None:
        """Draw when the kernel is idle. Called in any thread."""
        if self._drawing.acquire(blocking=False):
            self._thread.run(self._draw_requested)

    def _draw_requested(self) -> None:
        self._drawing.release()
        self._draw()

    def _draw(self) -> None:
        state = self._search.state
        running = self._search.is_running
        self._find.disabled = self._change.disabled = running
        self._stop.layout.display = "" if running else "none"
        self._progress.value = f'<span role="status">{escape(state.text)}</span>' if state.text else ""
        advice = self._search.advice
        if isinstance(self._failed, str) or advice is None:
            return
        from memexplore.out_of_memory.what_fits import what_fits

        if state.state == "stopped":
            advice = dataclasses.replace(advice, cancelled=True)
        result = what_fits(self._failed, advice, None)
        if self._watch.page is self:
            self._watch.what_fits = result
        if self._is_cell_wanted and not running:
            self._is_cell_wanted = False
            self._show_cell(self._watch.changed_cell(self._source, result))
        options = [(option.knobs, option.largest_text) for option in advice.options]
        drawn = (state.state, self._applied, self._said, self._is_newest, options)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        before = self._options.children
        sentences = " ".join(result.sentences)
        rows = [self._row(number, option) for number, option in enumerate(() if result.fits else advice.options, 1)]
        assumed = [_text(f"<small>Assumed: {escape(' '.join(result.assumed))}</small>")]
        self._options.children = (
            _text(escape(sentences)),
            *rows,
            *(assumed if result.assumed and not (running or result.fits) else []),
        )
        for widget in before:
            _close(widget)

    def _show_cell(self, changed: ChangedCell | str) -> None:
        before = self._cell.children
        if isinstance(changed, str):
            self._cell.children = (_text(_status(changed)),)
        else:
            from memexplore.jupyter.changed_cell import RunBelow

            self._cell.children = (_text(_status(changed.text, changed.diff)), RunBelow(changed.source))
        for widget in before:
            _close(widget)

    def _row(self, number: int, option: Option) -> Any:
        reason = self._watch.why_not(option.knobs) if self._is_newest else _LATER
        training = f"<br>Trains differently: {escape(option.training)}" if option.training else ""
        title = escape(reason or "Code")
        code = f"<details><summary>{title}</summary>{_lines(option.code)}</details>" if option.code else ""
        # Below the button, because a list of settings can be longer than the screen.
        said = self._said[1] if self._said is not None and self._said[0] == option.knobs else ""
        text = _text(f"{number}. {escape(str(option))}{training}{code}{said}")
        text.layout = ipywidgets.Layout(flex="1 1 0", min_width="0")
        if reason:
            button = self._button("Apply", reason, lambda: None)
            button.disabled = True
        elif option.knobs == self._applied:
            button = self._button("Undo", "Restore the model", functools.partial(self._undo, option))
        else:
            apply = functools.partial(self._apply, option)
            button = self._button("Apply", f"Apply setting {number} to the model, as far as a model can have it", apply)
        button.layout.min_width = "60px"
        return ipywidgets.HBox([button, text], layout=ipywidgets.Layout(align_items="flex-start"))

    # -- actions

    def _apply(self, option: Option) -> None:
        if not self._is_newest:
            self._show(_LATER, option)
            self._draw()
            return
        self._applied = None
        try:
            applied = self._watch.apply(option.knobs)
        except Exception as error:
            self._show(str(error), option, option.code)
        else:
            self._applied = option.knobs
            self._show(f"{applied.text} Run the cell again.", option, applied.code)
        self._draw()

    def _undo(self, option: Option) -> None:
        self._applied = None
        self._show(self._watch.undo() if self._is_newest else _LATER, option)
        self._draw()

    def _free(self) -> None:
        self._note.value = "…"
        self._note.value = _status(self._watch.free())

    def _show(self, text: str, option: Option, code: str = "") -> None:
        self._note.value = ""
        self._said = (option.knobs, _status(text, code))

    def _button(self, description: str, tooltip: str, action: Any) -> Any:
        layout = ipywidgets.Layout(width="auto", flex="none")
        made = ipywidgets.Button(description=description, tooltip=tooltip, layout=layout)
        # A click may arrive in another thread, and while a cell runs.
        made.on_click(lambda _: self._thread.run(action))
        return made


def _text(html: str) -> Any:
    # The lines of ipywidgets are as high as its buttons.
    return ipywidgets.HTML(f'<div style="line-height:1.45;padding:4px 0">{html}</div>')


def _status(text: str, code: str = "") -> str:
    return f'<div role="status" style="line-height:1.45">{escape(text)}{_lines(code) if code else ""}</div>'


def _lines(code: str) -> str:
    # A width of its own would make the text around it as wide as the longest line.
    style = "white-space:pre;word-break:normal;overflow-x:auto;width:0;min-width:100%"
    return f'<pre style="{style}">{escape(code)}</pre>'


def _close(widget: Any) -> None:
    for child in getattr(widget, "children", ()):
        _close(child)
    widget.close()
