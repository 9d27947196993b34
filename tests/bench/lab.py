"""A JupyterLab and a headless Chromium for benchmarks."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat

REPOSITORY = Path(__file__).parents[2]
IDLE = "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
RUN_ALL = "() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }"


@contextlib.contextmanager
def opened(notebooks: dict[str, list[str]]) -> Iterator[Callable[[str], Any]]:
    """Yield a function that opens a notebook by its name in a tab of its own; `notebooks` has the cells of each."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        paths = {f"JUPYTER_{name}_DIR": f"{folder}/{name}" for name in ("CONFIG", "DATA", "RUNTIME")}
        environment = dict(os.environ, HOME=folder, PYTHONPATH=str(REPOSITORY), **paths)
        for name, cells in notebooks.items():
            document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
            document.metadata["kernelspec"] = {"name": "python3", "display_name": "python3", "language": "python"}
            nbformat.write(document, f"{folder}/{name}.ipynb")
        options = ["--no-browser", "--allow-root", "--LabApp.expose_app_in_browser=True", "--IdentityProvider.token="]
        options += ["--ServerApp.disable_check_xsrf=True", f"--ServerApp.port={port}", f"--ServerApp.root_dir={folder}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], env=environment, **quiet)
        try:
            _wait(f"http://127.0.0.1:{port}/api/status")
            with sync_playwright() as driver:
                path = os.environ.get("MEMEXPLORE_CHROMIUM") or shutil.which("chromium")
                browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])

                def page_of(name: str, script: str = "") -> Any:
                    page = browser.new_page(viewport={"width": 1400, "height": 1400})
                    page.set_default_timeout(180_000)
                    page.add_init_script(script)
                    page.goto(f"http://127.0.0.1:{port}/lab/tree/{name}.ipynb?reset")
                    page.wait_for_function(IDLE)
                    return page

                yield page_of
        finally:
            server.terminate()
            server.wait(30)


def _wait(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=2).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError("JupyterLab did not start")
