"""Time from a moved slider to the redrawn figure, in a browser: `python -m tests.bench.bench_explorer [MODEL ...]`.

Prints the median and the 95th percentile in milliseconds beside the goal. The clock starts with the key press and ends
with the first frame after plotly has drawn the new tape. "new" are batches that were never run, without prefetching;
"seen" are the same batches again. The medians of the parts follow: until the page has sent the request; until the new
tape has arrived (the figure, made by the kernel, is a part of it, as is the kernel's run of the step where no picture
was expected); until plotly has drawn; until the next frame. "confirmed" is when the run has ended and all texts and
tables are those of its result; "as expected" counts the pictures drawn before the run that the run left as they were.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from tests.bench.lab import RUN_ALL, opened

GOALS = {"resnet50": 200, "gpt2": 200, "llama7b": 500}
SEEN = 50
RUNS = 40
PARTS = ("sent", "arrived", "drawn", "frame")
WATCH = """
const frames = window.sentAndReceived = [];
const send = WebSocket.prototype.send;
WebSocket.prototype.send = function (data) {
    frames.push({ kind: 'sent', at: performance.now(), size: data.length ?? data.byteLength });
    return send.call(this, data);
};
const Original = WebSocket;
window.WebSocket = class extends Original {
    constructor(...values) {
        super(...values);
        this.addEventListener('message', ({ data }) =>
            frames.push({ kind: 'received', at: performance.now(), size: data.length ?? data.byteLength }));
    }
};
"""
CELL = """import torch, memexplore as mx
from memexplore.jupyter.explorer import Explorer
from memexplore.jupyter.explore import explore
from memexplore.run.programs.step import Step
from tests.models import MODELS
Explorer._prefetch = lambda *_: None
import time
spans = {{"run": [], "figure": [], "expected": []}}
def timed(function, name):
    def wrapped(*values, **named):
        start = time.perf_counter()
        try:
            return function(*values, **named)
        finally:
            spans[name].append(1000 * (time.perf_counter() - start))
    return wrapped
build, make, loss = MODELS[{name!r}]
step = Step(build if {name!r} == "llama7b" else build(), make("cpu"), compute_loss=loss)
explorer = explore(step, gpu="192GiB")
explorer._run_step = timed(explorer._run_step, "run")
explorer.view.show = timed(explorer.view.show, "figure")
confirm = explorer.view.confirm
explorer.view.confirm = lambda *tapes: spans["expected"].append(confirm(*tapes)) or spans["expected"][-1]
from memexplore.run.knobs.control import numbers
import dataclasses
own = step.batch_size
before = explorer._control_named["batch"]
batch = dataclasses.replace(before, options_of=lambda _: numbers(range(own, own + {runs} + 1)))
explorer._table[explorer._table.index(before)] = explorer._control_named["batch"] = batch
explorer"""
MEASURE = """async key => {
    const graph = document.querySelector('.memexplore-timeline');
    const slider = document.querySelector('[data-field=batch] input');
    const frames = window.sentAndReceived;
    frames.length = 0;
    let plotted = 0;
    const drawn = new Promise(done => graph.once('plotly_afterplot', () => {
        plotted = performance.now();
        requestAnimationFrame(() => done(performance.now()));
    }));
    const start = performance.now();
    if (key === 'ArrowRight') slider.stepUp(); else slider.stepDown();
    slider.dispatchEvent(new Event('input', { bubbles: true }));
    const end = await drawn;
    const sent = frames.find(({ kind }) => kind === 'sent')?.at ?? start;
    // The tape is the largest message before the drawing.
    const before = frames.filter(({ kind, at }) => kind === 'received' && at < plotted);
    const arrived = before.sort((a, b) => b.size - a.size)[0]?.at ?? sent;
    const parts = { sent: sent - start, arrived: arrived - sent, drawn: plotted - arrived, frame: end - plotted };
    const frame = () => new Promise(done => requestAnimationFrame(done));
    while (document.querySelector('.memexplore[aria-busy=true]')) await frame();
    return { total: end - start, confirmed: performance.now() - start, ...parts };
}"""
KERNEL = """async () => {
    const { kernel } = window.jupyterapp.shell.currentWidget.sessionContext.session;
    const code = 'import json; print(json.dumps(spans)); [spans[name].clear() for name in spans]';
    const future = kernel.requestExecute({ code });
    let text = '';
    future.onIOPub = ({ content }) => { text += content.text ?? ''; };
    await future.done;
    return JSON.parse(text) }"""


def main() -> None:
    """Measure the named models, or all."""
    names = sys.argv[1:] or list(GOALS)
    with opened({name: [CELL.format(name=name, runs=RUNS)] for name in names}) as page_of:
        for name in names:
            page = page_of(name, WATCH)
            _measure(page, name)
            page.close()


def _settle(page: Any) -> None:
    page.wait_for_function("() => !document.querySelector('.memexplore[aria-busy=true]')")
    page.wait_for_timeout(600)
    page.wait_for_function("() => !document.querySelector('.memexplore[aria-busy=true]')")


def _measure(page: Any, name: str) -> None:
    page.evaluate(RUN_ALL)
    page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    # The slider begins at its left end.
    for kind, key, goal in (("new", "ArrowRight", GOALS[name]), ("seen", "ArrowLeft", SEEN)):
        page.evaluate(KERNEL)  # forgets the runs so far
        times = []
        for _ in range(RUNS):
            _settle(page)
            times.append(page.evaluate(MEASURE, key))
        totals = [entry["total"] for entry in times]
        parts = {part: statistics.median(entry[part] for entry in times) for part in PARTS}
        confirmed = [entry["confirmed"] for entry in times]
        spans = page.evaluate(KERNEL)
        expected = spans.pop("expected")
        print(
            f"{name:10} {kind:5} median {statistics.median(totals):5.0f} ms, 95 % {_late(totals):5.0f} ms, "
            f"slowest {max(totals):5.0f} ms, goal {goal} ms; "
            f"confirmed median {statistics.median(confirmed):5.0f} ms, 95 % {_late(confirmed):5.0f} ms; "
            f"as expected {sum(expected)} of {len(expected)}; parts: "
            + ", ".join(f"{part} {value:.0f}" for part, value in parts.items())
            + "; kernel: "
            + ", ".join(f"{part} {statistics.median(values):.0f}" for part, values in spans.items() if values),
            flush=True,
        )


def _late(times: list[float]) -> float:
    """Return the 95th percentile."""
    return statistics.quantiles(times, n=20, method="inclusive")[-1]


if __name__ == "__main__":
    main()
