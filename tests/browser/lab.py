"""A running JupyterLab, and the kernels of its notebooks."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


@dataclasses.dataclass(frozen=True)
class Lab:
    """A running JupyterLab."""

    url: str
    token: str
    root: pathlib.Path
    kernels: pathlib.Path
    """Folder for kernel specifications, which may be added while the server runs."""
    settings: pathlib.Path
    """Folder of the user's settings."""

    def end_kernel(self, notebook: str) -> None:
        """Shut down the kernel of a notebook, if it has one."""
        with self._request("GET", "sessions") as answer:
            sessions = json.load(answer)
        for session in sessions:
            if session["path"] == notebook:
                self._request("DELETE", f"sessions/{session['id']}").close()

    def start_kernel(self) -> str:
        """Start a kernel that no notebook has yet; return its number."""
        with self._request("POST", "kernels", {"name": "python3"}) as answer:
            return str(json.load(answer)["id"])

    def give_kernel(self, kernel: str, notebook: str) -> None:
        """Let a notebook use a kernel when it is opened."""
        session = {"path": notebook, "name": notebook, "type": "notebook", "kernel": {"id": kernel}}
        self._request("POST", "sessions", session).close()

    def _request(self, method: str, path: str, content: dict[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"token {self.token}"}
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.url}/api/{path}", method=method, headers=headers, data=body)
        return urllib.request.urlopen(request, timeout=60)


class Kernels:
    """A kernel for each notebook: the next one starts while a test runs, and the one before ends meanwhile."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._next: str | None = None
        self._thread = ThreadPoolExecutor(1)
        self._ending: list[Future[None]] = []

    def prepare(self) -> None:
        """Start the kernel of the next notebook."""
        if self._next is None:
            self._next = self._lab.start_kernel()

    def give(self, notebook: str) -> None:
        """Let a notebook use the kernel that was started for it."""
        self.prepare()
        assert self._next is not None
        self._lab.give_kernel(self._next, notebook)
        self._next = None

    def end(self, notebook: str) -> None:
        """Shut down the kernel of a notebook without waiting for its end."""
        self._ending.append(self._thread.submit(self._lab.end_kernel, notebook))

    def close(self) -> None:
        """Wait for the kernels that end, and raise their errors; the server ends the one for the next notebook."""
        self._thread.shutdown()
        for ending in self._ending:
            ending.result()
