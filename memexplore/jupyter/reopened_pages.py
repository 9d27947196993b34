"""Give a page that is opened while a cell runs the views that it lacks.

A page that is opened or reloaded asks the kernel for its widgets on the shell channel, which is read when the cell has
ended. So after each connection of a page the kernel sends a small widget without a view (`frontend/reopened`) a few
times. On a page that lacks the view it asks for the view's state through the control channel, which is read while a
cell runs, makes the view's model from it, and sends the view's requests through that channel from then on. The outputs
of a cell that runs are in the notebook's file only if the file was written since; else the page gets them too.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import ipywidgets
from comm import create_comm
from IPython.core.getipython import get_ipython

from memexplore.jupyter.bundle import bundle
from memexplore.jupyter.receiving import reads_while_busy

_TIMES = (2.0, 4.0, 8.0, 16.0)
"""Seconds after a connection, when the page may have come far enough to receive widgets."""
_AFTER_ANSWER = 10.0
"""Seconds after the answer to a page, when another page that connected with it gets a last offer."""
_CLOSED_AFTER = 10.0
_TARGET = "jupyter.widget"


Bundle = tuple[dict[str, Any], dict[str, Any]]
"""Data and metadata of an output."""


class _Offered(NamedTuple):
    view: ipywidgets.DOMWidget
    outputs: Callable[[], list[Bundle]]
    cell: str
    """Id of the cell that displays the view, "" if unknown."""
    image: tuple[str, str]
    """Id of the display of the static image, and a text that only its output has."""


class Offer:
    """Offers one view, the latest, to the pages that connect to this kernel."""

    def __init__(self) -> None:
        self._offered: _Offered | None = None
        self._follows = False
        self._timers: list[Any] = []
        """Of offers to come; in the thread of the socket of outputs."""

    def put(
        self, view: ipywidgets.DOMWidget, outputs: Callable[[], list[Bundle]], image: tuple[str, str] = ("", "")
    ) -> None:
        """Offer a view, and the outputs of the running cell with it, to pages that connect from now on.

        `image` is the id of the display that is updated at the end, and a text that only its output has.
        Does nothing without a kernel that a browser can reach.
        """
        kernel: Any = getattr(get_ipython(), "kernel", None)
        if not hasattr(kernel, "control_handlers") or not hasattr(kernel, "iopub_thread"):
            return
        self._offered = _Offered(view, outputs, _running_cell(kernel), image)
        thread = kernel.iopub_thread
        if not self._follows:
            self._follows = True
            # ipykernel reads messages to comms on the shell channel only.
            kernel.control_handlers.setdefault("comm_msg", kernel.comm_manager.comm_msg)
            # Sockets may be used in the thread of their own only.
            thread.schedule(functools.partial(self._follow, thread))
        if not reads_while_busy():
            thread.schedule(functools.partial(self.send, thread.io_loop))

    def _follow(self, thread: Any) -> None:
        """Call `_on_connection` for each connection to the socket of outputs; in its thread."""
        import zmq
        from zmq.eventloop.zmqstream import ZMQStream

        # Some kernels have a stand-in for the socket, and nothing to follow.
        with contextlib.suppress(AttributeError, zmq.ZMQError):
            monitor = thread.socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
            self._stream = ZMQStream(monitor, thread.io_loop)
            self._stream.on_recv(lambda _: self._on_connection(thread.io_loop))

    def _on_connection(self, loop: Any) -> None:
        self._timers += [loop.call_later(seconds, self.send, loop) for seconds in _TIMES]

    def _on_answer(self, loop: Any) -> None:
        """Disturb a page no more that has the view and draws it."""
        for timer in self._timers:
            loop.remove_timeout(timer)
        self._timers = [loop.call_later(_AFTER_ANSWER, self.send, loop)]

    def send(self, loop: Any) -> None:
        """Send the offer to all pages, and withdraw it later: a page keeps each widget that it gets."""
        if self._offered is not None and self._offered.view.comm is not None:
            comm = _open_comm(self._offered, lambda: loop.add_callback(self._on_answer, loop))
            loop.call_later(_CLOSED_AFTER, comm.close)


def _running_cell(kernel: Any) -> str:
    """Return the id of the cell that runs, as JupyterLab sends it with its code."""
    parent = kernel.get_parent("shell") if hasattr(kernel, "get_parent") else {}
    return str(parent.get("metadata", {}).get("cellId", ""))


def _open_comm(offered: _Offered, on_answer: Callable[[], None]) -> Any:
    """Open the comm of an offer, which answers with the states of the models, and the outputs of the cell."""
    view = offered.view
    widgets = [view.layout, view]
    comm_id, models = uuid.uuid4().hex, [widget.model_id for widget in widgets]
    state = {key: value for key, value in view.get_state().items() if key.startswith(("_model_", "_view_"))}
    state |= {"_esm": _source(), "_anywidget_id": "memexplore.reopened", "models": models, "comm": comm_id}
    state["reconnects"] = not reads_while_busy()

    def answer(message: dict[str, Any]) -> None:
        request = message["content"]["data"]
        if request.get("method") == "request_state":  # of a page that restores all widgets
            comm.send({"method": "update", "state": state, "buffer_paths": []})
        elif request.get("content") == {"type": "states"}:
            states = {widget.model_id: widget.get_state() for widget in widgets}
            outputs = [
                {"output_type": "display_data", "data": data, "metadata": metadata}
                for data, metadata in offered.outputs()
            ]
            content = {"states": states, "cell": offered.cell, "view": view.model_id, "outputs": outputs}
            display, image = offered.image
            comm.send({"method": "custom", "content": {**content, "display": display, "image": image}})
            on_answer()

    version = {"version": ipywidgets._version.__protocol_version__}
    opened = {"state": state, "buffer_paths": []}
    comm = create_comm(target_name=_TARGET, comm_id=comm_id, data=opened, metadata=version)
    comm.on_msg(answer)
    return comm


@functools.cache
def _source() -> str:
    return bundle(pathlib.Path(__file__).parent / "frontend" / "reopened" / "index.js")


offer = Offer()
"""The offer of this kernel."""
