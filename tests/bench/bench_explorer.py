"""Time from a moved slider to the redrawn figure, in a browser: `python -m tests.bench.bench_explorer [MODEL ...]`.

Prints the median and the 95th percentile in milliseconds beside the goal. The clock starts with the key press and ends
with the first frame after plotly has drawn the new tape. "new" are batches that were never run, without prefetching;
"seen" are the same batches again.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import nbformat

REPOSITORY = Path(__file__).parents[2]
GOALS = {"resnet50": 300, "gpt2": 300, "llama7b": 700}
SEEN = 60
RUNS = 20
CELL = """import torch, memexplore as mx
from memexplore.notebook.explorer import Explorer
from memexplore.notebook.explore import explore
from memexplore.steps.step import Step
from tests.models import MODELS
Explorer._prefetch = lambda *_: None
build, make, loss = MODELS[{name!r}]
step = Step(build if {name!r} == "llama7b" else build(), make("cpu"), compute_loss=loss)
explorer = explore(step, gpu="192GiB")
from memexplore.notebook.knob import numbers
import dataclasses
own = step.batch_size
batch = dataclasses.replace(explorer._knob_named["batch"], options_of=lambda _: numbers(range(own, own + {runs} + 1)))
explorer._table[explorer._table.index(explorer._knob_named["batch"])] = explorer._knob_named["batch"] = batch
explorer"""
MEASURE = """async key => {
    const graph = document.querySelector('.memexplore-timeline');
    const slider = document.querySelector('[data-field=batch] input');
    const drawn = new Promise(done => graph.once('plotly_afterplot', () => requestAnimationFrame(() => done())));
    const start = performance.now();
    if (key === 'ArrowRight') slider.stepUp(); else slider.stepDown();
    slider.dispatchEvent(new Event('input', { bubbles: true }));
    await drawn;
    return performance.now() - start }"""


def main() -> None:
    """Measure the named models, or all."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        paths = {f"JUPYTER_{name}_DIR": f"{folder}/{name}" for name in ("CONFIG", "DATA", "RUNTIME")}
        environment = dict(os.environ, HOME=folder, PYTHONPATH=str(REPOSITORY), **paths)
        names = sys.argv[1:] or list(GOALS)
        for name in names:
            document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL.format(name=name, runs=RUNS))])
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
                for name in names:
                    page = browser.new_page(viewport={"width": 1400, "height": 1400})
                    page.set_default_timeout(180_000)
                    page.goto(f"http://127.0.0.1:{port}/lab/tree/{name}.ipynb?reset")
                    _measure(page, name)
                    page.close()
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


def _settle(page: Any) -> None:
    page.wait_for_function("() => !document.querySelector('.memexplore[aria-busy=true]')")
    page.wait_for_timeout(600)
    page.wait_for_function("() => !document.querySelector('.memexplore[aria-busy=true]')")


def _measure(page: Any, name: str) -> None:
    page.wait_for_function(
        "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    )
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells') }")
    page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    times: dict[str, list[float]] = {"new": [], "seen": []}
    # The slider begins at its left end.
    for kind, key in (("new", "ArrowRight"), ("seen", "ArrowLeft")):
        for _ in range(RUNS):
            _settle(page)
            times[kind].append(page.evaluate(MEASURE, key))
    for kind, goal in (("new", GOALS[name]), ("seen", SEEN)):
        high = statistics.quantiles(times[kind], n=20)[-1]
        print(
            f"{name:10} {kind:5} median {statistics.median(times[kind]):5.0f} ms, 95 % {high:5.0f} ms, goal {goal} ms"
        )


if __name__ == "__main__":
    main()
