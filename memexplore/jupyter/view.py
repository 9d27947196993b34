"""The widget that shows a Tape: summary, timeline, and tabs for layers, tensors, lines, blocks and growth."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import anywidget

# Messages are answered in another thread while a cell runs, where plotly could find a half-imported pandas.
import pandas  # noqa: F401
import plotly.offline
import traitlets
from IPython.display import display

from memexplore.analysis import curves, tables
from memexplore.analysis.layer_rows import has_layer
from memexplore.analysis.picture import Picture, first_moment, has_same_picture, picture
from memexplore.figures.alignment import clipped, matching_row, matching_window
from memexplore.figures.positions import DEFAULT_X, EqualSteps, XAxis, XChoice
from memexplore.figures.text import timeline_text
from memexplore.figures.timeline_layout import VIEW_HEIGHT, Window
from memexplore.jupyter import view_content
from memexplore.jupyter.bundle import bundle, plotly_source
from memexplore.jupyter.controls import Controls
from memexplore.jupyter.packing import pack
from memexplore.jupyter.receiving import receive_while_busy
from memexplore.jupyter.static_output import image_html, static_output
from memexplore.jupyter.view_content import Scene
from memexplore.tape import Tape

FRONTEND = pathlib.Path(__file__).parent / "frontend"

Tab = dict[str, Any]
"""Content of an added tab: `kind` ("figure", "table" or "code") and the fields of that kind (`frontend/types.d.ts`)."""


class Screen(NamedTuple):
    """Present state of the browser's display."""

    tape_number: int = 0
    """Number of tapes shown before this one; requests about earlier tapes are stale."""
    window: Window = None
    width: int | None = None
    """Width of the timeline in pixels, None before a browser has reported it."""
    picture: Picture = Picture.WITH_ROOM
    """Which picture is drawn of a run that ended out of memory."""
    x: XChoice = DEFAULT_X
    """Horizontal axis of the timeline."""


class View(anywidget.AnyWidget):
    """Widget that shows a Tape. Create it with `view`.

    `cursor` is the row that was clicked in the timeline (initially the row of the peak, -1 on an empty tape; `view`
    begins at the request that ended a run out of memory).
    `selection` is the layer that was clicked, None for all layers; `h.0–11.mlp` stands for several layers. `tape` is
    the tape shown, and `before` a tape drawn as a pale outline behind it. Assigning any of the four updates the
    browser.
    """

    _esm = bundle(FRONTEND / "index.js")
    _css = "\n".join(file.read_text(encoding="utf-8") for file in sorted(FRONTEND.glob("*.css")))

    # The only state that a notebook can save: the browser requests everything it draws.
    # The timeline shares a screen with the knobs above it and the tabs below it.
    height = traitlets.Int(VIEW_HEIGHT).tag(sync=True)
    picture = traitlets.Unicode().tag(sync=True)
    plotly = traitlets.Unicode().tag(sync=True)
    comm_id = traitlets.Unicode().tag(sync=True)  # also the model's: by it the page finds the model

    cursor = traitlets.Int()
    selection = traitlets.Unicode(None, allow_none=True)

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._before: Tape | None = None
        self._screen = Screen()
        self._is_silent = False
        self._tabs: dict[str, Tab] = {}
        self._controls: Controls | None = None
        self._on_drawn: Callable[[], None] | None = None
        self._details_number = -1  # of the tape whose details were sent
        self._asked: dict[str, Any] = {}  # the request being answered
        # One thread may answer requests while another changes the tape or the controls.
        self.lock = threading.RLock()
        number = uuid.uuid4().hex
        super().__init__(
            model_id=number,
            comm_id=number,
            picture=f"memexplore-picture-{number[:12]}",
            plotly=plotly.offline.get_plotlyjs_version(),
            cursor=curves.peak(picture(tape))[1],
        )
        self.on_msg(self._answer)
        receive_while_busy(self)

    # -- public state

    @property
    def tape(self) -> Tape:
        """The tape shown, of the run as it happened."""
        return self._tape

    @tape.setter
    def tape(self, tape: Tape) -> None:
        self.show(tape, self._before)
        self.send_details()

    @property
    def drawn(self) -> Tape:
        """The tape drawn, which has the row `cursor`: a run that did not fit is drawn as if there were room."""
        return self._drawn_of(self._tape)

    def _drawn_of(self, tape: Tape) -> Tape:
        return tape if self._screen.picture is Picture.AS_IT_HAPPENED else picture(tape)

    @property
    def before(self) -> Tape | None:
        """The tape whose allocated curve is drawn as an outline."""
        return self._before

    @before.setter
    def before(self, before: Tape | None) -> None:
        self.show(self._tape, before)
        self.send_details()

    def show(
        self,
        tape: Tape,
        before: Tape | None = None,
        on_drawn: Callable[[], None] | None = None,
    ) -> None:
        """Replace the tape. Zoom, cursor and selection move to the same position in the run and the same layer.

        Tables and the chart of layers stay those of the old tape until `send_details`. `on_drawn` is called once, when
        a browser has drawn the tape; never if another tape is shown first.

        Raises ValueError, and changes nothing, if a tape has no addresses.
        """
        curves.peak(tape)
        if before is not None:
            curves.peak(before)
        with self.lock:
            old = self.drawn
            self._tape, self._before, self._on_drawn = tape, before, on_drawn
            self._redraw(old)

    def confirm(self, expected: Tape, tape: Tape, before: Tape | None) -> bool:
        """Take a tape in place of the one shown as `expected` if both are drawn alike; return whether they are."""
        with self.lock:
            is_shown = self._tape is expected and self._before is before
            if is_shown and has_same_picture(self._drawn_of(expected), self._drawn_of(tape)):
                self._tape = tape
                return True
            return False

    def _redraw(self, old: Tape) -> None:
        """Send the tape drawn, with the positions that they had in the tape drawn before."""
        tape = self.drawn
        cursor = matching_row(self.cursor, old, tape)
        is_known = self.selection is None or has_layer(tape, self.selection)
        window = clipped(matching_window(self._screen.window, old, tape), len(tape))
        self._screen = self._screen._replace(tape_number=self._screen.tape_number + 1, window=window)
        with self._silently():
            self.cursor, self.selection = cursor, self.selection if is_known else None
        self.send(self._about_tape("tape") | self._sender(), self._packed_tape())

    def send_details(self) -> None:
        """Send tables, hover texts and the chart of layers of the tape that `show` has drawn."""
        with self.lock:
            self.send(self._about_tape("details"), view_content.packed_details_content(self._scene()))
            self._details_number = self._screen.tape_number

    def _about_tape(self, kind: str) -> dict[str, Any]:
        return {"type": kind, "tape": self._screen.tape_number}

    def _packed_tape(self) -> list[bytes]:
        scene = self._scene()
        return [*view_content.packed_tape_content(scene), *pack(view_content.scene_content(scene))]

    def _sender(self) -> dict[str, Any]:
        """Return the fields that identify the request being answered, in a message to all views."""
        identity = _identity(self._asked)
        return {"sender": identity["view"], "number": identity["number"]} if len(identity) == 2 else {}

    def put_tabs(self, tabs: dict[str, Tab]) -> None:
        """Add tabs after the built-in ones, in this order, or replace their content."""
        with self.lock:
            self._tabs.update(tabs)
            self.send_packed("tabs", tabs=_named(tabs))

    def open_tab(self, name: str) -> None:
        """Show a tab."""
        self.send_packed("open", tab=name)

    def attach(self, controls: Controls) -> None:
        """Show controls on the page, and send their requests to them."""
        self._controls = controls

    def send_controls(self) -> None:
        """Send the state of the attached controls to the page."""
        with self.lock:
            if self._controls is not None:
                self.send({**self._about_tape("explorer"), "explorer": self._controls.message()})

    def send_unasked(self) -> None:
        """Send everything to all pages, for a kernel that reads no request while a cell runs (ipykernel before 7)."""
        with self.lock:
            self.send({"type": "plotly"}, [plotly_source()])
            self._answer_request({"type": "everything", "width": self._screen.width})

    @contextlib.contextmanager
    def _silently(self) -> Iterator[None]:
        """Change cursor and selection without sending a message."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    @traitlets.validate("cursor")
    def _check_cursor(self, proposal: Any) -> int:
        row = proposal["value"]
        if not (0 <= row < len(self.drawn) or row == -1 == curves.peak(self.drawn)[1]):
            raise traitlets.TraitError(
                f"row {row} is not on this tape of {len(self.drawn)} rows: set cursor to a row from 0 to the last"
            )
        return row

    @traitlets.validate("selection")
    def _check_selection(self, proposal: Any) -> str | None:
        layer = proposal["value"]
        if layer is not None and not has_layer(self.drawn, layer):
            raise traitlets.TraitError(f"this tape has no layer {layer!r}: tables.layers(tape) lists the layers")
        return layer

    @traitlets.observe("cursor")
    def _send_cursor(self, _: Any) -> None:
        if self.comm is not None and not self._is_silent:  # the comm is None while the widget is constructed
            self.send_packed("cursor", self._sender(), **view_content.cursor_content(self._scene()))

    @traitlets.observe("selection")
    def _send_selection(self, _: Any) -> None:
        if not self._is_silent:
            self.send_packed("selection", self._sender(), layer=self.selection)

    # -- requests of the browser

    def _answer(self, _: Any, request: dict[str, Any], buffers: Any) -> None:
        with self.lock:
            try:
                self._asked = request
                if self._controls is None or not self._controls.receive(request):
                    self._answer_request(request)
            except Exception as error:
                # Jupyter shows no traceback of a message handler, so the widget shows the error.
                self.send({"type": "error", "text": f"{type(error).__name__}: {error}", **_identity(request)})
                raise
            finally:
                self._asked = {}

    def _answer_request(self, request: dict[str, Any]) -> None:
        kind = request["type"]
        if kind == "plotly":
            self.send({"type": "plotly"}, [plotly_source()])
        elif kind == "ping":
            self.send({"type": "pong", **_identity(request)})
        elif kind == "everything":
            self._screen = self._screen._replace(window=None, width=request.get("width"))
            tab = "Layers" if any(self.tape.modules) else "Lines"
            scene = self._scene()
            content = {"tab": tab, "tabs": _named(self._tabs), **view_content.tape_content(scene)}
            content |= view_content.scene_content(scene) | view_content.details_content(scene)
            if self._controls is not None:
                content[self._controls.name] = self._controls.message()
            message = {"type": "everything", "tape": self._screen.tape_number, **_identity(request)}
            self.send(message, pack(content))
            self._details_number = self._screen.tape_number
        elif request.get("tape", self._screen.tape_number) == self._screen.tape_number:
            self._answer_about_tape(request)
        elif "again" in request:
            self._send_again(request)
        # Another request about an earlier tape needs no answer: the message with the present one is under way.

    def _send_again(self, request: dict[str, Any]) -> None:
        """Send the tape shown, and its details if they were sent before, to the view of a request."""
        identity = _identity(request)
        self.send(self._about_tape("tape") | identity, self._packed_tape())
        if self._details_number == self._screen.tape_number:
            self._send_details_again(request)

    def _send_details_again(self, request: dict[str, Any]) -> None:
        buffers = view_content.packed_details_content(self._scene())
        self.send(self._about_tape("details") | _identity(request), buffers)

    def _answer_about_tape(self, request: dict[str, Any]) -> None:
        kind = request["type"]
        if kind == "timeline":
            window = request["window"]
            window = (window[0], window[1]) if window else None
            x = XChoice(XAxis(request.get("axis", XAxis.EVENT)), EqualSteps(request.get("equal", EqualSteps.FOLDED)))
            self._screen = self._screen._replace(window=window, width=request.get("width"), x=x)
            self._reply(request, timeline=view_content.timeline_content(self._scene()))
        elif kind == "picture":
            old = self.drawn
            self._screen = self._screen._replace(picture=Picture(request["picture"]))
            self._redraw(old)
            self.send_details()
        elif kind == "blocks":
            self._reply(request, **view_content.blocks_content(self._scene()))
        elif kind == "highest layers":
            self._reply(request, **view_content.highest_layers_content(self._scene()))
        elif kind == "drawn":
            on_drawn, self._on_drawn = self._on_drawn, None
            if on_drawn is not None:
                on_drawn()
            elif "again" in request and self._details_number == self._screen.tape_number:
                self._send_details_again(request)
        elif kind == "cursor":
            # A click can be slightly left of the first row or right of the last one.
            row = min(max(round(request["row"]), 0), len(self.drawn) - 1)
            if row == self.cursor:
                self._reply(request, **view_content.cursor_content(self._scene()))
            self.cursor = row
        elif kind == "select":
            self._select(request, request["layer"])
        elif kind == "block":
            module = int(self.drawn.module[request["row"]])
            self._select(request, (self.drawn.modules[module] or tables.NO_LAYER) if module >= 0 else tables.NO_LAYER)

    def _select(self, request: dict[str, Any], layer: str | None) -> None:
        if layer == self.selection:
            # The view may have missed the message about the change.
            self._reply({**request, "type": "selection"}, layer=layer)
        self.selection = layer

    def _reply(self, request: dict[str, Any], **content: Any) -> None:
        self.send({"type": request["type"], **_identity(request)}, pack(content))

    def send_packed(self, kind: str, identity: dict[str, Any] | None = None, **content: Any) -> None:
        """Send a message to all pages; `identity` are the fields of the request that caused it."""
        self.send({"type": kind, **(identity or {})}, pack(content))

    def _scene(self) -> Scene:
        screen = self._screen
        before = None if self._before is None else picture(self._before)
        window, width = screen.window, screen.width
        return Scene(self.drawn, self.cursor, self.selection, before, window, width, self._tape, screen.x)

    # -- display

    def static_output(self, sentence: str = "") -> dict[str, str]:
        """Return the static image as an output of its own, shown in a notebook without a kernel."""
        return static_output(self.tape, self.picture, sentence)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = super()._repr_mimebundle_() or ({}, {})
        text, image = timeline_text(self.tape), image_html(self.tape, self.picture)
        return {**data, "text/plain": text, "text/html": image}, metadata

    def live_bundle(self, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the output of the widget alone, with its text where there are no widgets, and its metadata."""
        data, metadata = super()._repr_mimebundle_() or ({}, {})
        return {**data, "text/plain": text}, metadata

    def _ipython_display_(self) -> None:
        data, metadata = self.live_bundle(f"View of a tape of {len(self.tape):,} events")
        display(data, raw=True, metadata=metadata)
        display(self.static_output(), raw=True)


def _identity(request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that identify a request among all views of the widget, to be echoed in its reply."""
    return {key: request[key] for key in ("view", "number") if key in request}


def _named(tabs: dict[str, Tab]) -> list[dict[str, Any]]:
    return [{"name": name, **tab} for name, tab in tabs.items()]


def view(tape: Tape) -> View:
    """Show a tape in a notebook: its summary, its timeline, and the tensors alive at the cursor.

    Tabs show layers, tensors, lines of code, blocks in their segments, and what grew from step to step.

    Drag over the timeline to zoom, double-click to show all of it, click to move the cursor. Click a layer or a block
    to highlight the memory of that layer. `view(tape).cursor` and `.selection` hold what was clicked. In a notebook
    without a kernel a static image remains.

    Raises ValueError if the tape has no addresses.
    """
    shown = View(tape)
    shown.cursor = first_moment(shown.drawn).row
    return shown
