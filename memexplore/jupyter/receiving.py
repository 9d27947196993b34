"""The browser's requests are read: while a cell runs, and by kernels that may stop reading any."""

from __future__ import annotations

import sys
from typing import Any

import zmq
from IPython.core.getipython import get_ipython


class _ReplySocket:
    """A kernel's socket of requests and replies, whose requests are read after each reply.

    Sending a reply consumes the one event that reports a request which arrived meanwhile. ipykernel before 7.4 then
    reads neither this request nor any later one (ipykernel issue 1554, mended by its pull request 1529).
    """

    def __init__(self, socket: Any, requests: Any) -> None:
        self._socket = socket
        self._requests = requests

    def send_multipart(self, message: list[Any]) -> None:
        self._socket.send_multipart(message)
        self._requests.flush(zmq.POLLIN)


def read_requests_after_replies() -> None:
    """Let a kernel with ipykernel 7.0 to 7.3 read the requests that arrive while it replies; nothing with others.

    A widget's page sends requests when a cell ends, which is when the kernel replies to it.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    manager: Any = getattr(getattr(kernel, "shell_channel_thread", None), "manager", None)
    socket = getattr(manager, "_shell_socket", None)  # from 7.4 on a manager has none
    if kernel is None or socket is None or isinstance(socket, _ReplySocket):
        return
    manager._shell_socket = _ReplySocket(socket, kernel.shell_stream)


def reads_while_busy() -> bool:
    """Return whether the kernel reads messages of pages while a cell runs: ipykernel from 7 on does."""
    ipykernel = sys.modules.get("ipykernel")
    return ipykernel is None or int(ipykernel.__version__.split(".")[0]) >= 7


def receive_while_busy(*widgets: Any) -> None:
    """Receive the browser's messages to some widgets while a cell runs, on kernels that support it (ipykernel >= 7).

    ipykernel 7.4 routes an incoming message to the shell that last sent one on the same comm: during a cell that is
    the busy main shell.
    """
    read_requests_after_replies()
    for widget in widgets:
        if hasattr(widget.comm, "_reply_subshell_for"):
            widget.comm._reply_subshell_for = lambda data, default: default
