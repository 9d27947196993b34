"""A watched run in a real JupyterLab: it streams while its cell runs, and what is drawn at the end equals the run."""

from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import nbformat
import pytest

from tests.browser.waiting import expect

pytestmark = pytest.mark.browser

SET_UP = """%load_ext memexplore
import time, torch
from torch import nn
import memexplore as mx

def step(batch=64, pause=0.01):
    model(torch.ones(batch, 256, device='cuda')).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(pause)"""
GPU = "%memgpu T4"
MODEL = """torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6))).cuda()
optimizer = torch.optim.AdamW(model.parameters())"""
LOOP = """with mx.watch(model, optimizer) as live:
    for number in range(500):
        step(8192 if number > 250 else 64)"""
ROWS = """import json
table = live.steps()
print(json.dumps([table['step'].tolist(), table['peak_allocated'].tolist()]))"""
HEADLINE = ".memexplore-run-headline"
NUMBER = f"Number(document.querySelector('{HEADLINE}')?.textContent.split(' ')[1]?.replace(',', ''))"
GRAPH = "const graph = document.querySelector('.memexplore-history');"
PEAKS = f"() => {{ {GRAPH} return graph.figure?.data.find(trace => trace.name === 'peak').y.length ?? 0 }}"
TRACE = f"""name => {{ {GRAPH}
    const trace = graph.figure.data.find(trace => trace.name === name); return [[...trace.x], [...trace.y]] }}"""
# The history from its begin: a column has at most as many steps as there are hundreds of steps.
FROM_BEGIN = f"() => {{ {GRAPH} return graph.figure?.data.find(trace => trace.name === 'peak').x[0] < 20 }}"
CHANGED = f"() => {{ {GRAPH} return graph.figure?.data.find(trace => trace.name === 'setting changed').x.length }}"


def loop_until(done: pathlib.Path, batch: int = 64) -> str:
    """A cell that trains until a file exists."""
    return f"""import os
with mx.watch(model, optimizer) as live:
    while not os.path.exists({str(done)!r}):
        step({batch})"""


def open_loop(notebook: Callable[..., Any], *cells: str, **options: Any) -> Any:
    book = notebook(SET_UP, GPU, MODEL, *cells, **options)
    for number in range(3):
        book.run(number)
    return book


def number_of(book: Any) -> int:
    """The newest step on the page."""
    return int(book.page.locator(HEADLINE).inner_text().split()[1].replace(",", ""))


def wait_for_steps(book: Any, count: int) -> None:
    book.page.wait_for_function(f"count => {NUMBER} >= count", arg=count, timeout=60_000)


def another_number(book: Any, seen: list[int]) -> int:
    """Wait until the newest step on the page is none of these, and return it."""
    book.page.wait_for_function(f"seen => !seen.includes({NUMBER})", arg=seen)
    return number_of(book)


def shot(book: Any, name: str) -> None:
    """Write a picture of the page into the folder LIVE_SHOTS, where that is set: for eyes, not for a test."""
    if folder := os.environ.get("LIVE_SHOTS"):
        book.page.locator(".memexplore").screenshot(path=f"{folder}/{name}.png")


def test_five_hundred_steps_stream_and_the_figure_equals_the_run(
    notebook: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    # On numbers 20, 60, 100 and so on the run waits for a slow page to have shown 1, 2, 3 and so on of its steps.
    wait = f"""        if number % 40 == 20 and number < 400:
            while not os.path.exists(os.path.join({str(tmp_path)!r}, str(number // 40 + 1))):
                time.sleep(0.01)"""
    book = open_loop(notebook, f"import os\n{LOOP}\n{wait}", ROWS, "print(live.recorded[-1])")
    book.start(3)
    wait_for_steps(book, 20)
    seen: list[int] = []
    while len(seen) < 10:
        seen.append(another_number(book, seen))
        assert book.state(3) == "running"  # the page moved while the cell ran
        (tmp_path / str(len(seen))).touch()
    shot(book, "streaming")
    book.wait(3)
    wait_for_steps(book, 500)
    expect(book.page.locator(".memexplore-run-title")).to_have_text("Ended")
    book.settle()
    book.run(4)
    steps, peaks = json.loads(book.text(4))
    x, y = book.page.evaluate(TRACE, "peak")
    # 500 steps are drawn as 250 columns of two: the mean of both medians in the middle of both
    assert x == [(steps[index] + steps[index + 1]) / 2 for index in range(0, 500, 2)]
    assert y == [(peaks[index] + peaks[index + 1]) / 2 for index in range(0, 500, 2)]
    rises = book.page.evaluate(TRACE, "peak rose")[0]
    assert rises == [1, 252]
    assert "larger batch" in book.page.evaluate(
        f"() => {{ {GRAPH} return graph.figure.data.find(t => t.name === 'peak rose').text[1] }}"
    )
    book.run(5)
    recorded = book.text(5).strip()
    expect(book.page.locator(".memexplore-run-which")).to_have_text(re.compile(f"^Step {recorded} "))
    shot(book, "ended")


def test_pause_and_a_reload_lose_nothing(notebook: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    done = tmp_path / "done"
    book = open_loop(notebook, loop_until(done), "print(live.state)")
    book.start(3)
    wait_for_steps(book, 10)
    book.page.get_by_role("button", name="Pause", exact=True).click()
    book.page.wait_for_function("() => document.querySelector('.memexplore-run-title').textContent === 'Paused'")
    paused = number_of(book)
    book.page.wait_for_timeout(1000)
    assert number_of(book) == paused
    book.page.get_by_role("button", name="Resume", exact=True).click()
    wait_for_steps(book, paused + 20)
    book.save()
    book.open_without_kernel()
    done.touch()  # JupyterLab finds the widgets of a kernel when its cell has ended
    wait_for_steps(book, paused + 20)
    book.page.wait_for_function(FROM_BEGIN)
    book.page.wait_for_function("() => document.querySelector('.memexplore-run-title').textContent === 'Ended'")
    book.run(4)
    assert book.text(4) == "ended\n"


def test_a_page_reloaded_in_the_middle_streams_again(notebook: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    done = tmp_path / "done"
    book = open_loop(notebook, loop_until(done), "print(live.state, live.changes()['state'].tolist())")
    book.start(3)
    wait_for_steps(book, 10)
    book.save()
    newest = number_of(book)
    book.open_without_kernel()
    wait_for_steps(book, newest + 100)  # the cell runs until `done` exists
    book.page.wait_for_function(FROM_BEGIN)
    expect(book.page.locator(".memexplore-timeline .main-svg").first).to_be_visible()
    # The buttons act, and so do the knobs.
    book.page.get_by_role("button", name="Pause", exact=True).click()
    book.page.wait_for_function("() => document.querySelector('.memexplore-run-title').textContent === 'Paused'")
    book.page.get_by_role("button", name="Resume", exact=True).click()
    book.page.locator("[data-field=checkpoint] select").select_option(label="every block")
    book.page.wait_for_function(CHANGED)
    shot(book, "reloaded")
    done.touch()
    book.page.wait_for_function("() => document.querySelector('.memexplore-run-title').textContent === 'Ended'")
    book.run(4)
    assert book.text(4) == "ended ['applied']\n"
    expect(book.page.locator(".memexplore")).to_have_count(1)


def test_a_page_reloaded_before_its_notebook_was_saved_streams_again(
    notebook: Callable[..., Any], old_kernel: Callable[[str], str], tmp_path: pathlib.Path
) -> None:
    done = tmp_path / "done"
    book = open_loop(notebook, loop_until(done), "print(live.state)", kernel=old_kernel("6.29.0"))
    book.save()
    book.start(3)
    wait_for_steps(book, 10)
    newest = number_of(book)
    book.open_without_kernel()
    # The page has the outputs of the file only until the kernel reaches it, some seconds after its connection.
    assert nbformat.read(book.lab.root / book.name, as_version=4).cells[3].outputs == []
    is_changed = f"() => {{ {book.CURRENT} return panel.context.model.dirty }}"
    assert not book.page.evaluate(is_changed)
    wait_for_steps(book, newest + 20)
    book.page.get_by_role("button", name="Pause", exact=True).click()
    book.page.wait_for_function("() => document.querySelector('.memexplore-run-title').textContent === 'Paused'")
    done.touch()
    book.page.wait_for_function("() => document.querySelector('.memexplore-run-title').textContent === 'Ended'")
    # The kernel replaces the image after the message to the page.
    book.page.wait_for_function(
        f"""() => {{ {book.CURRENT} const [, image] = panel.content.widgets[3].model.outputs.toJSON();
            return JSON.stringify(image ?? '').includes(document.querySelector('{HEADLINE}').textContent) }}"""
    )
    last = book.page.locator(HEADLINE).inner_text()
    # What a notebook without a kernel shows is the end too, and the page does not write the file unasked.
    widget, image = book.outputs(3)
    assert "application/vnd.jupyter.widget-view+json" in widget["data"]
    assert last in "".join(image["data"]["text/html"])
    assert not book.page.evaluate(is_changed)
    book.run(4)
    assert book.text(4) == "ended\n"


def test_two_pages_show_the_run_while_it_goes_on(notebook: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    done = tmp_path / "done"
    book = open_loop(notebook, loop_until(done))
    book.start(3)
    wait_for_steps(book, 10)
    book.save()
    second = type(book)(book.page.context.new_page(), book.lab, book.name).open_without_kernel()
    wait_for_steps(second, number_of(book) + 20)
    book.page.bring_to_front()
    wait_for_steps(book, number_of(second) + 20)
    second.page.bring_to_front()
    wait_for_steps(second, number_of(book) + 20)
    done.touch()
    for each in (book, second):
        each.page.wait_for_function("() => document.querySelector('.memexplore-run-title').textContent === 'Ended'")


def test_a_line_opens_to_the_page_while_the_run_goes_on(notebook: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    done = tmp_path / "done"
    loop = loop_until(done).replace("mx.watch(model, optimizer)", "mx.watch(model, optimizer, form='line')")
    book = open_loop(notebook, loop)
    book.start(3)
    wait_for_steps(book, 5)
    root = book.page.locator(".memexplore")
    assert root.bounding_box()["height"] < 90  # a line of 30 px, at most two on a narrow page
    assert not book.page.locator(".memexplore-timeline").is_visible()
    shot(book, "line")
    book.page.set_viewport_size({"width": 800, "height": 1000})
    # A page that a run moves on may never be quiet.
    book.page.wait_for_function("() => document.querySelector('.memexplore').clientWidth < 800")
    pause, line = book.page.get_by_role("button", name="Pause", exact=True).bounding_box(), root.bounding_box()
    assert pause["x"] + pause["width"] <= line["x"] + line["width"]
    book.page.set_viewport_size({"width": 1400, "height": 1000})
    book.page.get_by_role("button", name="Show the whole page of the run").click()
    book.page.wait_for_selector(".memexplore-timeline .main-svg", state="visible")
    book.page.wait_for_selector(".memexplore-history .main-svg", state="visible")
    book.page.get_by_role("button", name="Show the run as one line").click()
    book.page.wait_for_selector(".memexplore-timeline", state="hidden")
    newest = number_of(book)
    wait_for_steps(book, newest + 5)
    done.touch()
    book.wait(3)


def test_an_old_kernel_streams_too(
    notebook: Callable[..., Any], old_kernel: Callable[[str], str], tmp_path: pathlib.Path
) -> None:
    done = tmp_path / "done"
    cells = [loop_until(done), "print(len(live.steps()), live.steps()['step'].iloc[-1])"]
    book = open_loop(notebook, *cells, kernel=old_kernel("6.29.0"))
    book.start(3)
    wait_for_steps(book, 100)
    assert book.state(3) == "running"
    book.page.get_by_role("button", name="Pause", exact=True).click()
    book.page.wait_for_function("() => document.querySelector('.memexplore-run-title').textContent === 'Paused'")
    book.page.get_by_role("button", name="Resume", exact=True).click()
    done.touch()
    book.wait(3)
    book.run(4)
    wait_for_steps(book, int(book.text(4).split()[1]))


def test_an_interrupt_leaves_the_last_picture(notebook: Callable[..., Any]) -> None:
    book = open_loop(
        notebook, LOOP.replace("500", "10**6"), "print(live.state, live.recorded[-1] in live.steps()['step'].tolist())"
    )
    book.start(3)
    wait_for_steps(book, 30)
    book.interrupt()
    book.wait(3)
    book.page.wait_for_function("() => document.querySelector('.memexplore-run-title').textContent === 'Failed'")
    book.settle()
    assert "KeyboardInterrupt" in book.page.locator(".memexplore-run .memexplore-problem").inner_text()
    book.run(4)
    assert book.text(4) == "failed True\n"
    shot(book, "interrupted")


def test_a_kernel_restart_leaves_a_true_picture(notebook: Callable[..., Any]) -> None:
    book = open_loop(notebook, LOOP.replace("500", "10**6"))
    book.start(3)
    wait_for_steps(book, 30)
    book.page.evaluate(f"() => {{ {book.CURRENT} return panel.sessionContext.session.kernel.restart() }}")
    book.page.wait_for_selector(".memexplore-gone .memexplore-run")
    book.page.wait_for_function(f"() => ({PEAKS})() >= 30")
    expect(book.page.get_by_role("button", name="Pause", exact=True)).to_be_hidden()


PROFILED = """%%memprofile --live -o run
for number in range(60):
    step()"""
WHICH = "text => document.querySelector('.memexplore-run-which').textContent.includes(text)"


def corners(book: Any) -> tuple[float, float, float]:
    """The left and the right end of the history, and the middle of its height, in pixels of the page."""
    book.page.locator(".memexplore-history").scroll_into_view_if_needed()
    box = book.page.locator(".memexplore-history .nsewdrag").first.bounding_box()
    return box["x"] + 3, box["x"] + box["width"] - 3, box["y"] + box["height"] / 2


def test_a_clicked_step_is_shown_two_are_compared_and_the_newest_followed_again(notebook: Callable[..., Any]) -> None:
    book = open_loop(notebook, PROFILED, "print(len(run.steps()))")
    book.run(3)
    wait_for_steps(book, 60)
    book.settle()
    left, _, height = corners(book)
    book.page.mouse.move(left, height)
    book.page.wait_for_function(f"() => {{ {GRAPH} return graph._hoverdata?.[0] }}")
    book.page.mouse.click(left, height)
    book.page.wait_for_function(WHICH, arg="Step 1 (")
    book.page.get_by_role("button", name="Newest step").click()
    book.page.wait_for_function(f"text => !({WHICH})(text)", arg="Step 1 (")
    book.settle()
    left, right, height = corners(book)
    book.page.mouse.move(left, height)
    book.page.mouse.down()
    book.page.mouse.move(right, height, steps=6)
    book.page.mouse.up()
    book.page.wait_for_function(WHICH, arg="outline: step 1")
    book.run(4)
    assert book.text(4) == "60\n"


def test_a_knob_turned_while_the_loop_runs_changes_the_next_step(
    notebook: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    done = tmp_path / "done"
    show = "print(live.changes()[['setting', 'state']].to_numpy().tolist())\nprint(live.applied, *live.recorded[-1:])"
    book = open_loop(notebook, loop_until(done, batch=4096), show)
    book.start(3)
    wait_for_steps(book, 10)
    book.page.locator("[data-field=checkpoint] select").select_option(label="every block")
    book.page.wait_for_function(CHANGED)
    wait_for_steps(book, number_of(book) + 10)
    shot(book, "knob")
    done.touch()
    book.wait(3)
    book.run(4)
    changes, applied = book.text(4).splitlines()
    assert changes == "[['checkpoint every 1', 'applied']]"
    step = applied.split()[-1]
    expect(book.page.locator(".memexplore-run-which")).to_have_text(re.compile(f"^Step {int(step):,} "))
