"""Time from the end of a watched step to its pixels: `python -m tests.bench.bench_live_pixels`.

A real JupyterLab trains a small model on a virtual T4, one step every 300 ms, so that each step has an update of its
own. The clock starts where the optimizer's step has returned, in the kernel, and ends with the first frame after the
page shows the number of the step. Prints median and 95th percentile in milliseconds beside the goal.
"""

from __future__ import annotations

import json
import statistics

from tests.bench.lab import IDLE, RUN_ALL, opened

GOAL = 200
STEPS = 60
SKIPPED = 10
"""Steps until the page has loaded its parts."""
CELL = f"""import time, torch
from torch import nn
import memexplore as mx
%load_ext memexplore
%memgpu T4
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
ends = []
time.sleep(2)
with mx.watch(model, optimizer):
    for number in range({STEPS}):
        model(torch.ones(64, 256, device="cuda")).sum().backward()
        optimizer.step()
        ends.append(1000 * time.time())
        optimizer.zero_grad()
        time.sleep(0.3)"""
TIMES = "import json\nprint(json.dumps(ends))"
SEE = """() => {
    const seen = window.seenSteps = {};
    const look = () => {
        const text = document.querySelector('.memexplore-run-headline')?.textContent ?? '';
        const number = Number(text.split(' ')[1]?.replace(',', ''));
        // The frame that shows the text ends when the next one begins.
        if (number && !(number in seen)) {
            seen[number] = 0;
            requestAnimationFrame(() => { seen[number] = performance.timeOrigin + performance.now(); });
        }
    };
    new MutationObserver(look).observe(document.body, { childList: true, subtree: true, characterData: true }) }"""
TEXT = """() => {
    const { widgets } = window.jupyterapp.shell.currentWidget.content;
    return widgets.at(-1).model.outputs.toJSON().map(output => output.text ?? '').join('') }"""


def main() -> None:
    """Measure, and print one line."""
    with opened({"live": [CELL, TIMES]}) as page_of:
        page = page_of("live")
        page.evaluate(SEE)
        page.evaluate(RUN_ALL)
        page.wait_for_function(f"() => Object.keys(window.seenSteps).includes('{STEPS}')")
        page.wait_for_function(IDLE)
        page.wait_for_timeout(500)
        ends = json.loads(page.evaluate(TEXT))
        seen = page.evaluate("() => window.seenSteps")
    waits = [at - ends[int(step) - 1] for step, at in seen.items() if int(step) > SKIPPED]
    print(
        f"{len(waits)} steps: median {statistics.median(waits):.0f} ms, "
        f"95 % {statistics.quantiles(waits, n=20)[-1]:.0f} ms, goal {GOAL} ms"
    )


if __name__ == "__main__":
    main()
