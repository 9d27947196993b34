"""The kernel's side of the explorer in a real JupyterLab: quick keys during runs, and the search beside the kernel."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memexplore as mx
from memexplore.run.knobs.knobs import Knobs
from tests.browser.explored import DRAWN, SET_UP, hold, knob, wait_for
from tests.browser.waiting import wait_for_output

pytestmark = pytest.mark.browser

CELL = """%%memprofile --gpu T4 --slider batch=16:256:16
batch = 16
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20))).cuda()
for _ in range(5):
    print('running')
    display('running')
    model(torch.ones(batch * 64, 256, device='cuda')).sum().backward()"""
SHOWN = """import gc
from memexplore.jupyter.explorer import Explorer
explorer = next(one for one in gc.get_objects() if type(one) is Explorer)
state = explorer._state
print(explorer.run.knobs, state.number == state.drawn_number, len(explorer.history))"""
KERNELS = ["newest", "6.29.0", "7.0.1", "7.3.0"]
"""The oldest that pyproject.toml permits, and the first and the last that read requests of pages in another way than
the newest. All minor releases between them passed these tests in November 2026."""
# Of each view: the reason why it is not drawn, for a failure.
STATES = """() => [window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status,
    ...[...document.querySelectorAll('.memexplore')].map(({ className, ariaBusy, innerText }) =>
        [className, ariaBusy, innerText.slice(0, 300)])]"""
VALUE = "() => document.querySelector('[data-field^=variables] output').textContent"


def during(pressed: pathlib.Path, seconds: float) -> str:
    """A cell that, once a file exists, ends when another setting is requested, or after some seconds."""
    return f"""import os
before = explorer._state.number
print('began')
while not os.path.exists({str(pressed)!r}):
    time.sleep(0.05)
end = time.monotonic() + {seconds}
while explorer._state.number == before and time.monotonic() < end:
    time.sleep(0.05)
print(explorer._state.number - before)"""


@pytest.mark.parametrize("kernel", KERNELS)
def test_held_key_ends_with_slider_and_picture_of_the_same_setting(
    notebook: Callable[..., Any], old_kernel: Callable[[str], str], kernel: str, tmp_path: pathlib.Path
) -> None:
    import playwright.sync_api as playwright

    pressed, reads = tmp_path / "pressed", not kernel.startswith("6.")
    cells = ["import torch, time\n%load_ext memexplore", CELL, SHOWN, during(pressed, 60 if reads else 2)]
    book = notebook(*cells, kernel="python3" if kernel == "newest" else old_kernel(kernel))
    book.run(0)
    book.run(1)
    try:
        book.page.wait_for_selector(".memexplore-drawn [data-field^=variables]")
    except playwright.TimeoutError as error:
        error.add_note(f"the page shows {book.page.evaluate(STATES)}")
        raise
    book.settle()
    slider = book.page.locator("[data-field^=variables] input")
    slider.focus()
    book.page.keyboard.down("ArrowRight")
    for _ in range(8):
        # the key repeats faster than the cell runs
        book.page.wait_for_timeout(60)
        book.page.keyboard.down("ArrowRight")
    book.page.keyboard.up("ArrowRight")
    book.settle()
    # 16, and nine times 16 more
    assert book.page.evaluate(VALUE) == "160"
    book.run(2)
    # one entry of the history: the step as written, and the end of the drag
    assert book.text(2) == "batch = 160 True 2\n"
    # During a cell the setting is requested, from ipykernel 7 on, and drawn after its end.
    book.start(3)
    wait_for_output(book, 3, "began")
    slider.press("ArrowRight")
    pressed.touch()
    book.wait(3)
    assert book.text(3) == f"began\n{int(reads)}\n"
    book.settle()
    assert book.page.evaluate(VALUE) == "176"
    book.run(2)
    assert book.text(2) == "batch = 176 True 3\n"
    assert book.errors() == []
    outputs = [output for number in (1, 3) for output in book.outputs(number)]
    # the runs of the explorer print and display nothing
    assert sum("running" in str(output.get("data", "")) for output in outputs) == 5


def test_search_goes_on_beside_cells_and_knobs(notebook: Callable[..., Any]) -> None:
    set_up = """import memexplore as mx, torch
from tests.models import MODELS
build, make, loss = MODELS["resnet50"]
explorer = mx.explore(mx.Step(build(), make("cpu"), compute_loss=loss), gpu="T4")
explorer"""
    book = notebook(set_up, "print(explorer._search.is_running, explorer._search.state.done)", "print(explorer.knobs)")
    book.run(0)
    page = book.page
    page.wait_for_selector(".memexplore-drawn [data-field=batch]")
    book.settle()
    page.get_by_role("button", name="What would fit?").click()
    # streams: rows while it runs
    page.wait_for_selector(".memexplore-settings tbody tr", timeout=120_000)
    book.run(1)
    assert book.text(1).startswith("True ")
    page.locator("[data-field=batch] input").press("ArrowLeft")
    page.wait_for_function("() => document.querySelector('[data-field=batch] output').textContent === '1'")
    book.settle()
    book.run(2)
    assert book.text(2) == "batch 1\n"
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("Stopped after").first.wait_for()
    rows = page.locator(".memexplore-settings tbody tr").count()
    assert rows > 0
    book.run(1)
    assert book.text(1).startswith("False ")
    assert book.errors() == []


DRAGGED_CELL = """%%memprofile --gpu T4 --slider batch=16:64:16
batch = 32
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
model(torch.ones(batch * 256, 256, device='cuda')).sum().backward()"""


def cell_peak(batch: int) -> int:
    """Return the peak of the lines of DRAGGED_CELL, run without a notebook."""

    def lines() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
        model(torch.ones(batch * 256, 256, device="cuda")).sum().backward()

    return mx.simulate(lines, gpu="T4").peak()[0]


@pytest.mark.parametrize("kernel", ["newest", "6.29.0", "7.3.0"])
def test_slider_of_a_cell_on_several_kernels(
    notebook: Callable[..., Any], old_kernel: Callable[[str], str], kernel: str
) -> None:
    cells = ["import torch, time\n%load_ext memexplore", DRAGGED_CELL, "time.sleep(1)\nprint('slept')"]
    book = notebook(*cells, kernel="python3" if kernel == "newest" else old_kernel(kernel))
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    assert book.errors() == []
    slider = knob(book, "batch")
    slider.press("ArrowRight")
    changed = "text => document.querySelector('.memexplore-changed').textContent.includes(text)"
    book.page.wait_for_function(changed, arg="batch 32 → 48")
    # While a cell runs nothing is drawn; the requested setting is drawn after its end.
    book.start(2)
    slider.press("ArrowRight")
    book.wait(2)
    book.page.wait_for_function(changed, arg="batch 32 → 64")
    book.settle()
    peaks = [book.page.evaluate(DRAWN)["peak"]]
    # A held key goes through all positions; the last one is drawn.
    slider.focus()
    hold(book, "ArrowLeft", 12)
    book.page.wait_for_function(changed, arg="batch 32 → 16")
    book.settle()
    peaks.append(book.page.evaluate(DRAWN)["peak"])
    assert peaks == [cell_peak(64), cell_peak(16)]
    assert slider.get_attribute("aria-valuetext") == "16"
    assert book.errors() == []
    # A knob that needs a step is not shown, and the page says why.
    assert book.page.get_by_label("Optimizer", exact=True).count() == 0
    assert "Optimizer" in book.page.locator(".memexplore-hidden-knobs").text_content()


def waiting_tables(released: pathlib.Path) -> str:
    """Lines after which the tables of a setting, which follow its picture, wait until a file exists."""
    return f"""import os
from memexplore.jupyter.idle_work import IdleWork
go_on = IdleWork._continue
def waiting(work, parts):
    if os.path.exists({str(released)!r}):
        go_on(work, parts)
    else:
        work._thread.run_after(0.05, lambda: waiting(work, parts))
IdleWork._continue = waiting"""


def test_tables_of_the_setting_before_are_marked(notebook: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    released = tmp_path / "released"
    released.touch()
    book = notebook(f"{SET_UP}\n{waiting_tables(released)}", "explorer")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    page, total = book.page, book.page.locator(".memexplore-layer-size").first
    before = total.inner_text()
    released.unlink()
    knob(book, "Batch").press("ArrowLeft")
    wait_for(book, Knobs(batch=32))
    # The timeline is that of 32 samples, the layers are still those of 64.
    assert page.locator(".memexplore-stale").count() == 1
    page.locator(".memexplore-stale-note").wait_for()
    assert page.locator(".memexplore").get_attribute("aria-busy") == "true"
    assert total.inner_text() == before
    released.touch()
    book.settle()
    assert page.locator(".memexplore-stale").count() == 0
    assert total.inner_text() != before


@pytest.mark.usefixtures("own_page")
def test_setting_assigned_while_the_page_loads_moves_the_knobs(notebook: Callable[..., Any]) -> None:
    # the page has its first content, and waits for plotly.js, when the state of the next cell arrives
    book = notebook(SET_UP, "explorer", "explorer.knobs = mx.Knobs(batch=128)")
    book.run_all()
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    wait_for(book, Knobs(batch=128))
    book.settle()
    assert knob(book, "Batch").get_attribute("aria-valuetext") == "128 samples"
