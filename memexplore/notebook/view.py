"""The one widget that draws a Tape: a sentence, the timeline, and below it layers, tensors, lines and blocks."""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
import pathlib
import uuid
from typing import Any

import anywidget

# Questions are answered in another thread while a cell runs: plotly would find a pandas there that is half imported.
import pandas  # noqa: F401
import plotly.offline
import traitlets
from IPython.display import display

from memexplore import measure, tables
from memexplore.addresses import fragmentation_text
from memexplore.figures.blocks import blocks_figure
from memexplore.figures.highlight import highlight
from memexplore.figures.layers import layer_of, layers_figure
from memexplore.figures.static import svg
from memexplore.figures.text import timeline_text
from memexplore.figures.timeline import HEIGHT, NARROWEST, timeline
from memexplore.notebook.moment import alive, growing, lines, moment_text
from memexplore.tape import Tape

_HERE = pathlib.Path(__file__).parent
_WIDGET = "application/vnd.jupyter.widget-view+json"


@functools.cache
def _plotly_source() -> bytes:
    """plotly.js of the installed plotly, compressed to a third: it may travel to a far browser."""
    return gzip.compress(plotly.offline.get_plotlyjs().encode(), compresslevel=6)


class View(anywidget.AnyWidget):
    """A Tape on the screen; make one with `view`.

    `cursor` is the row that was clicked in the timeline (the row of the peak at first, -1 on an empty tape), and
    `selection` the layer that was clicked, None for all. Both can be set too: the picture follows.
    """

    _esm = (_HERE / "view.js").read_text(encoding="utf-8")
    _css = (_HERE / "view.css").read_text(encoding="utf-8")

    # These are all the state that a notebook could save: what is drawn is asked for by the browser.
    height = traitlets.Int(HEIGHT).tag(sync=True)
    picture = traitlets.Unicode().tag(sync=True)
    plotly = traitlets.Unicode().tag(sync=True)

    cursor = traitlets.Int()
    selection = traitlets.Unicode(None, allow_none=True)

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        super().__init__(
            picture=f"memexplore-picture-{uuid.uuid4().hex[:12]}",
            plotly=plotly.offline.get_plotlyjs_version(),
            cursor=measure.peak(tape)[1],
        )
        self.on_msg(self._answer)
        # ipykernel 7.4 routes questions of the browser to the shell that spoke last, which is busy while a cell runs.
        if hasattr(self.comm, "_reply_subshell_for"):
            self.comm._reply_subshell_for = lambda data, default: default

    # -- what a person reads and sets

    @traitlets.validate("cursor")
    def _check_cursor(self, proposal: Any) -> int:
        row = proposal["value"]
        if not (0 <= row < len(self.tape) or row == -1 == measure.peak(self.tape)[1]):
            raise traitlets.TraitError(f"row {row} is not on this tape of {len(self.tape)} rows")
        return row

    @traitlets.validate("selection")
    def _check_selection(self, proposal: Any) -> str | None:
        layer = proposal["value"]
        if layer is not None and layer != tables.NO_LAYER and layer not in tables.parents(self.tape.modules):
            raise traitlets.TraitError(f"there is no layer {layer!r} on this tape: measure.layers(tape) lists them")
        return layer

    @traitlets.observe("cursor")
    def _tell_moment(self, _: Any) -> None:
        if self.comm is not None:  # it is None while the view is made
            self._tell("moment", **self._moment())

    @traitlets.observe("selection")
    def _tell_selection(self, _: Any) -> None:
        self._tell("selection", layer=self.selection)

    # -- what the browser asks

    def _answer(self, _: Any, question: dict[str, Any], buffers: Any) -> None:
        asked = question["ask"]
        try:
            if asked == "plotly":
                self.send({"answer": "plotly"}, [_plotly_source()])
            elif asked == "everything":
                self._tell(
                    "everything",
                    sentence=measure.sentence(self.tape).splitlines(),
                    notes=self.tape.meta.notes,
                    oom=measure.oom_text(self.tape),
                    growth=growing(self.tape),
                    tab="Layers" if any(self.tape.modules) else "Lines",
                    timeline=self._timeline(None, question.get("width")),
                    layers=json.loads(layers_figure(self.tape).to_json()),
                    selection=self.selection,
                    **self._moment(),
                )
            elif asked == "timeline":
                window = question["window"]
                self._tell(
                    "timeline",
                    number=question["number"],
                    timeline=self._timeline((window[0], window[1]) if window else None, question.get("width")),
                )
            elif asked == "blocks":
                figure = blocks_figure(self.tape, max(self.cursor, 0) if len(self.tape) else None, self.selection)
                words = fragmentation_text(self.tape, self.cursor) if self.cursor >= 0 else ""
                self._tell("blocks", number=question["number"], blocks=json.loads(figure.to_json()), text=words)
            elif asked == "cursor":
                # A click can land a little beside the first or the last row.
                self.cursor = min(max(round(question["row"]), 0), len(self.tape) - 1)
            elif asked == "select":
                self.selection = layer_of(question["box"]) if question["box"] else None
            elif asked == "block":
                module = int(self.tape.module[question["row"]])
                self.selection = (self.tape.modules[module] or tables.NO_LAYER) if module >= 0 else tables.NO_LAYER
        except Exception as error:
            # A traceback in a comm message is seen by nobody, so the picture says what went wrong.
            self.send({"answer": "error", "text": f"{type(error).__name__}: {error}"})
            raise

    def _tell(self, answer: str, **content: Any) -> None:
        self.send({"answer": answer}, [gzip.compress(json.dumps(content).encode(), compresslevel=4)])

    def _timeline(self, window: tuple[float, float] | None, width: int | None) -> dict[str, Any]:
        figure = timeline(self.tape, window, width=width or NARROWEST)
        if self.selection is not None:
            highlight(figure, self.tape, self.selection)
        # However far the mouse is from an event, a click means the nearest one.
        figure.update_layout(hoverdistance=-1, spikedistance=-1)
        return json.loads(figure.to_json())

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
        words = html.escape(measure.sentence(self.tape))
        source = f"data:image/svg+xml;base64,{data}"
        return f'<img class="{self.picture}" style="max-width: 100%" alt="{words}" src="{source}">'

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = super()._repr_mimebundle_() or ({}, {})
        return {**data, "text/plain": timeline_text(self.tape), "text/html": self._picture()}, metadata

    def _ipython_display_(self) -> None:
        # A trusted notebook without a kernel shows an error in place of a widget, and none of its other formats. So
        # the picture is an output of its own: the widget hides it while it is alive, and it hides a dead widget.
        data, metadata = super()._repr_mimebundle_() or ({}, {})
        live, dead = ".memexplore", f".jp-OutputArea-child:has(+ .jp-OutputArea-child .{self.picture})"
        style = f"<style>{dead}:not(:has({live})) {{ display: none }}</style>"
        display({**data, "text/plain": f"A view of {len(self.tape):,} events"}, raw=True, metadata=metadata)
        display({"text/html": style + self._picture(), "text/plain": timeline_text(self.tape)}, raw=True)


def view(tape: Tape) -> View:
    """Show a tape in a notebook: the sentence, the timeline, and what was alive at the moment that is clicked.

    The tabs tell of layers, tensors, lines of code, blocks in their segments, and what grew from step to step.

    Drag over the timeline to zoom, double click to see all again, click to move the cursor; click a layer or a block to
    light what the layer holds. `view(tape).cursor` and `.selection` are what was clicked. Where no kernel is alive, a
    static picture remains.

    Raises ValueError where the tape is not placed.
    """
    return View(tape)
