"""The one widget that draws a Tape: a sentence, the timeline, and below it layers, tensors, lines and blocks."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
import pathlib
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import anywidget
import numpy as np

# Questions are answered in another thread while a cell runs: plotly would find a pandas there that is half imported.
import pandas  # noqa: F401
import plotly.offline
import traitlets
from IPython.display import display

from memexplore.analysis import curves, groups, summary, tables
from memexplore.analysis.addresses import fragmentation_text
from memexplore.figures.alignment import same_moment, window_on
from memexplore.figures.blocks import blocks_figure
from memexplore.figures.highlight import highlight
from memexplore.figures.layers import layer_of, layers_figure
from memexplore.figures.static import svg
from memexplore.figures.text import timeline_text
from memexplore.figures.timeline import (
    HEIGHT,
    NARROWEST,
    Window,
    hovering,
    named,
    outline_trace,
    timeline_frame,
    timeline_traces,
)
from memexplore.notebook.cursor_details import alive, growing, lines, moment_text
from memexplore.tape import Tape

_HERE = pathlib.Path(__file__).parent
_WIDGET = "application/vnd.jupyter.widget-view+json"


@functools.cache
def _plotly_source() -> bytes:
    """plotly.js of the installed plotly, compressed to a third: it may travel to a far browser."""
    return gzip.compress(plotly.offline.get_plotlyjs().encode(), compresslevel=6)


class Shown(NamedTuple):
    """What the browser has on the screen."""

    number: int = 0
    """How many tapes were there before this one: what is asked about an earlier one is stale."""
    window: Window = None
    width: int | None = None
    told: bool = True
    """Whether a change of cursor or selection is news to the browser."""


Sheet = dict[str, Any]
"""A tab beside those of the tape: `kind` ("figure", "table" or "code") and what that kind shows (view.js)."""

_drawings: weakref.WeakKeyDictionary[Tape, dict[Any, list[bytes]]] = weakref.WeakKeyDictionary()


def keep_live(*widgets: Any) -> None:
    """Have the browser's messages to some widgets taken while a cell runs, where the kernel can do that.

    ipykernel 7.4 routes them to the shell that spoke last, which is busy while a cell runs.
    """
    for widget in widgets:
        if hasattr(widget.comm, "_reply_subshell_for"):
            widget.comm._reply_subshell_for = lambda data, default: default


_LONG = 1 << 15
"""Bytes of text beyond which it travels compressed: unpacking a shorter one takes longer than its way."""


def _packed(content: dict[str, Any]) -> list[bytes]:
    """Two buffers: text, and the float arrays, which the text names by their first place and their length."""
    arrays: list[np.ndarray[Any, Any]] = []
    place = 0

    def put_aside(value: Any) -> Any:
        nonlocal place
        array = np.ascontiguousarray(value)
        if array.dtype != np.float64:
            return array.tolist()
        arrays.append(array)
        place += array.size
        return {"place": place - array.size, "length": array.size}

    text = json.dumps(content, default=put_aside).encode()
    if len(text) > _LONG:
        text = gzip.compress(text, compresslevel=1)
    return [text, b"".join(array.tobytes() for array in arrays)]


def _cut(window: Window, count: int) -> Window:
    """A window cut to a tape; None where nothing is left of it."""
    if window is None:
        return None
    low, high = max(window[0], 0.0), min(window[1], count - 1.0)
    return (low, high) if high - low >= 1 else None


class View(anywidget.AnyWidget):
    """A Tape on the screen; make one with `view`.

    `cursor` is the row that was clicked in the timeline (the row of the peak at first, -1 on an empty tape), and
    `selection` the layer that was clicked, None for all. Both can be set too: the picture follows. So does it when
    `tape` is set to another tape, and `before` to one whose curve is to be a pale outline behind it.
    """

    _esm = "".join((_HERE / f"{part}.js").read_text(encoding="utf-8") for part in ("wire", "areas", "view"))
    _css = (_HERE / "view.css").read_text(encoding="utf-8")

    # These are all the state that a notebook could save: what is drawn is asked for by the browser.
    height = traitlets.Int(HEIGHT).tag(sync=True)
    picture = traitlets.Unicode().tag(sync=True)
    plotly = traitlets.Unicode().tag(sync=True)

    cursor = traitlets.Int()
    selection = traitlets.Unicode(None, allow_none=True)

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._before: Tape | None = None
        self._shown = Shown()
        self._sheets: dict[str, Sheet] = {}
        self._pickers: list[Callable[[str, int], None]] = []
        self._drawn: Callable[[], None] | None = None
        # The browser's questions may be answered in another thread than the one that changes the tape.
        self._lock = threading.RLock()
        super().__init__(
            picture=f"memexplore-picture-{uuid.uuid4().hex[:12]}",
            plotly=plotly.offline.get_plotlyjs_version(),
            cursor=curves.peak(tape)[1],
        )
        self.on_msg(self._answer)
        keep_live(self)

    # -- what a person reads and sets

    @property
    def tape(self) -> Tape:
        """The tape that is drawn."""
        return self._tape

    @tape.setter
    def tape(self, tape: Tape) -> None:
        self.show(tape, self._before)
        self.tell_details()

    @property
    def before(self) -> Tape | None:
        """The tape whose allocated curve is drawn as an outline."""
        return self._before

    @before.setter
    def before(self, before: Tape | None) -> None:
        self.show(self._tape, before)
        self.tell_details()

    def show(self, tape: Tape, before: Tape | None = None, drawn: Callable[[], None] | None = None) -> None:
        """Draw another tape in place of this one; zoom, cursor and selection go to the same moment and layer of it.

        Tables and the chart of the layers stay those of the old tape until `tell_details`. `drawn` is called once, when
        a browser has drawn the tape, and not where another is shown before.

        Raises ValueError where a tape is not placed; then nothing is changed.
        """
        peak = curves.peak(tape)[1]
        if before is not None:
            curves.peak(before)
        with self._lock:
            old, at_peak = self._tape, self.cursor == curves.peak(self._tape)[1]
            cursor = peak
            if not at_peak and peak >= 0:
                cursor = min(round(float(same_moment(np.array([float(self.cursor)]), old, tape)[0])), len(tape) - 1)
            kept = self.selection in (None, tables.NO_LAYER) or self.selection in tables.module_parents(tape.modules)
            window = _cut(window_on(self._shown.window, old, tape), len(tape))
            self._tape, self._before, self._drawn = tape, before, drawn
            self._shown = self._shown._replace(number=self._shown.number + 1, window=window, told=False)
            self.cursor, self.selection = cursor, self.selection if kept else None
            self._shown = self._shown._replace(told=True)
            self.send({"answer": "tape", "tape": self._shown.number}, [*self._lasting(), *_packed(self._passing())])

    def tell_details(self) -> None:
        """Draw tables and layers of the tape that `show` has put on the screen."""
        with self._lock:
            self.send({"answer": "details", "tape": self._shown.number}, self._detailed())

    def put_sheets(self, sheets: dict[str, Sheet]) -> None:
        """Add tabs beside those of the tape, in this order, or change what they hold."""
        with self._lock:
            self._sheets.update(sheets)
            self._tell("sheets", sheets=[{"name": name, **sheet} for name, sheet in sheets.items()])

    def on_pick(self, picker: Callable[[str, int], None]) -> None:
        """Have a function called with tab and number when something on one of the added tabs is clicked."""
        self._pickers.append(picker)

    def open_tab(self, tab: str) -> None:
        """Show a tab."""
        self._tell("open", tab=tab)

    def working(self, is_working: bool) -> None:
        """Say that another tape is being made, or that it is not coming."""
        self.send({"answer": "working" if is_working else "rest"})

    @traitlets.validate("cursor")
    def _check_cursor(self, proposal: Any) -> int:
        row = proposal["value"]
        if not (0 <= row < len(self.tape) or row == -1 == curves.peak(self.tape)[1]):
            raise traitlets.TraitError(f"row {row} is not on this tape of {len(self.tape)} rows")
        return row

    @traitlets.validate("selection")
    def _check_selection(self, proposal: Any) -> str | None:
        layer = proposal["value"]
        if layer is not None and layer != tables.NO_LAYER and layer not in tables.module_parents(self.tape.modules):
            raise traitlets.TraitError(f"there is no layer {layer!r} on this tape: tables.layers(tape) lists them")
        return layer

    @traitlets.observe("cursor")
    def _tell_moment(self, _: Any) -> None:
        if self.comm is not None and self._shown.told:  # it is None while the view is made
            self._tell("moment", **self._moment())

    @traitlets.observe("selection")
    def _tell_selection(self, _: Any) -> None:
        if self._shown.told:
            self._tell("selection", layer=self.selection)

    # -- what the browser asks

    def _answer(self, _: Any, question: dict[str, Any], buffers: Any) -> None:
        with self._lock:
            try:
                # What was asked about a tape that is no longer on the screen needs no answer.
                if question.get("tape", self._shown.number) == self._shown.number:
                    self._answer_now(question)
            except Exception as error:
                # A traceback in a comm message is seen by nobody, so the picture says what went wrong.
                self.send({"answer": "error", "text": f"{type(error).__name__}: {error}"})
                raise

    def _answer_now(self, question: dict[str, Any]) -> None:
        asked = question["ask"]
        if asked == "plotly":
            self.send({"answer": "plotly"}, [_plotly_source()])
        elif asked == "everything":
            self._shown = self._shown._replace(window=None, width=question.get("width"))
            tab = "Layers" if any(self.tape.modules) else "Lines"
            sheets = [{"name": name, **sheet} for name, sheet in self._sheets.items()]
            told = {"tab": tab, "sheets": sheets, **self._drawing(), **self._passing(), **self._details()}
            self.send({"answer": "everything", "tape": self._shown.number}, _packed(told))
        elif asked == "timeline":
            window = question["window"]
            window = (window[0], window[1]) if window else None
            self._shown = self._shown._replace(window=window, width=question.get("width"))
            self._tell("timeline", number=question["number"], timeline=self._timeline())
        elif asked == "blocks":
            figure = blocks_figure(self.tape, max(self.cursor, 0) if len(self.tape) else None, self.selection)
            words = fragmentation_text(self.tape, self.cursor) if self.cursor >= 0 else ""
            self._tell("blocks", number=question["number"], blocks=json.loads(figure.to_json()), text=words)
        elif asked == "drawn":
            drawn, self._drawn = self._drawn, None
            if drawn is not None:
                drawn()
        elif asked == "cursor":
            # A click can land a little beside the first or the last row.
            self.cursor = min(max(round(question["row"]), 0), len(self.tape) - 1)
        elif asked == "select":
            self.selection = layer_of(question["box"]) if question["box"] else None
        elif asked == "block":
            module = int(self.tape.module[question["row"]])
            self.selection = (self.tape.modules[module] or tables.NO_LAYER) if module >= 0 else tables.NO_LAYER
        elif asked == "pick":
            for picker in self._pickers:
                picker(question["sheet"], question["number"])

    def _tell(self, answer: str, **content: Any) -> None:
        self.send({"answer": answer}, _packed(content))

    def _lasting(self) -> list[bytes]:
        """What `show` tells of a tape whatever was there before; remembered, so that what was seen is drawn at once."""
        if self._shown.window is not None or self.selection is not None:
            return _packed(self._drawing())
        known = _drawings.setdefault(self.tape, {})
        if "drawing" not in known:
            known["drawing"] = _packed(self._drawing())
        return known["drawing"]

    def _detailed(self) -> list[bytes]:
        if self._shown.window is not None or self.cursor != curves.peak(self.tape)[1]:
            return _packed(self._details())
        known = _drawings.setdefault(self.tape, {})
        if "details" not in known:
            known["details"] = _packed(self._details())
        return known["details"]

    def _drawing(self) -> dict[str, Any]:
        return {
            "sentence": summary.sentence(self.tape).splitlines(),
            "notes": self.tape.meta.notes,
            "oom": groups.oom_text(self.tape),
            "data": self._traces(),
        }

    def _passing(self) -> dict[str, Any]:
        return {
            "outline": self._outline(),
            "layout": self._frame(),
            "row": self.cursor,
            "selection": self.selection,
            "window": self._shown.window,
        }

    def _details(self) -> dict[str, Any]:
        layers = json.loads(layers_figure(self.tape).to_json())
        hover = {"window": self._shown.window, **hovering(self.tape, named(self._traces(), "allocated")["x"])}
        return {"growth": growing(self.tape), "layers": layers, "hover": hover, **self._moment()}

    def _timeline(self) -> dict[str, Any]:
        traces = self._traces()
        allocated = named(traces, "allocated")
        allocated |= hovering(self.tape, allocated["x"])
        return {"data": [*traces, *self._outline()], "layout": self._frame()}

    def _traces(self) -> list[dict[str, Any]]:
        traces = timeline_traces(self.tape, self._shown.window)
        if self.selection is None:
            return traces
        return highlight(traces, self.tape, self.selection)

    def _outline(self) -> list[dict[str, Any]]:
        return [] if self._before is None else [outline_trace(self._before, self.tape, self._shown.window)]

    def _frame(self) -> dict[str, Any]:
        layout = timeline_frame(
            self.tape, self._shown.window, width=self._shown.width or NARROWEST, before=self._before
        )
        # However far the mouse is from an event, a click means the nearest one.
        return {**layout, "hoverdistance": -1, "spikedistance": -1}

    def _moment(self) -> dict[str, Any]:
        return {
            "row": self.cursor,
            "text": moment_text(self.tape, self.cursor),
            "tensors": alive(self.tape, self.cursor),
            "lines": lines(self.tape, self.cursor),
        }

    # -- where no kernel is alive

    def _picture(self) -> str:
        """The static picture as HTML."""
        data = base64.b64encode(svg(self.tape).encode()).decode()
        words = html.escape(summary.sentence(self.tape))
        source = f"data:image/svg+xml;base64,{data}"
        return f'<img class="{self.picture}" style="max-width: 100%" alt="{words}" src="{source}">'

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = super()._repr_mimebundle_() or ({}, {})
        return {**data, "text/plain": timeline_text(self.tape), "text/html": self._picture()}, metadata

    def _ipython_display_(self) -> None:
        # A trusted notebook without a kernel shows an error in place of a widget, and none of its other formats. So
        # the picture is an output of its own: the widget hides it while it is alive, and it hides a dead widget.
        data, metadata = super()._repr_mimebundle_() or ({}, {})
        display({**data, "text/plain": f"A view of {len(self.tape):,} events"}, raw=True, metadata=metadata)
        display(self.still(), raw=True)

    def still(self) -> dict[str, str]:
        """The static picture as an output of its own, which hides a dead widget before it."""
        live, dead = ".memexplore", f".jp-OutputArea-child:has(+ .jp-OutputArea-child .{self.picture})"
        style = f"<style>{dead}:not(:has({live})) {{ display: none }}</style>"
        return {"text/html": style + self._picture(), "text/plain": timeline_text(self.tape)}


def view(tape: Tape) -> View:
    """Show a tape in a notebook: the sentence, the timeline, and what was alive at the moment that is clicked.

    The tabs tell of layers, tensors, lines of code, blocks in their segments, and what grew from step to step.

    Drag over the timeline to zoom, double click to see all again, click to move the cursor; click a layer or a block to
    light what the layer holds. `view(tape).cursor` and `.selection` are what was clicked. Where no kernel is alive, a
    static picture remains.

    Raises ValueError where the tape is not placed.
    """
    return View(tape)
