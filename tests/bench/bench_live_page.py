"""The cost of a watched run's page for its kernel: steps with the page beside steps without it, in a real kernel.

`python -m tests.bench.bench_live_page` starts a kernel without a browser, trains a small model on a virtual T4 with and
without a page in turn, and prints the processor time of a step, its ratio, and the time of one message with steps. The
goal: a message takes at most 1 ms of the kernel's time, and there are at most 10 a second.
"""

from __future__ import annotations

import nbclient
import nbformat

SET_UP = """
import statistics, time, torch
from torch import nn
import memexplore as mx
from memexplore.live import watch as live_watch
from memexplore.jupyter.live_page import LivePage
%load_ext memexplore
%memgpu T4
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
messages = []
send_steps = LivePage.send_steps

def timed(page):
    began = time.thread_time()
    send_steps(page)
    messages.append(time.thread_time() - began)

LivePage.send_steps = timed

def step():
    model(torch.ones(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)

def seconds(watch, steps=200):
    times = []
    with watch(model, optimizer, first=1, every=10**9):
        step()
        for _ in range(steps):
            began = time.thread_time()
            step()
            times.append(time.thread_time() - began)
    return times
"""
MEASURE = """
page, none = [], []
for _ in range(5):
    none += seconds(live_watch.watch)
    page += seconds(mx.watch)
mean = [1000 * statistics.fmean(times) for times in (none, page)]
print(f"a step: {mean[0]:.2f} ms without a page, {mean[1]:.2f} ms with it, ratio {mean[1] / mean[0]:.3f}")
messages.sort()
count = len(messages)
print(f"a message: median {1000 * messages[count // 2]:.2f} ms, 95 % {1000 * messages[count * 95 // 100]:.2f} ms, "
      f"{count} messages in {sum(page) + len(page) * 0.01:.0f} s")
"""


def main() -> None:
    cells = [nbformat.v4.new_code_cell(SET_UP), nbformat.v4.new_code_cell(MEASURE)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for output in notebook.cells[1].outputs:
        print(output.get("text", ""), end="")


if __name__ == "__main__":
    main()
