"""Verdicts and values in a real JupyterLab: cells that fit, leak, raise or run out of memory; sweeps and their bar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.waiting import expect

pytestmark = pytest.mark.browser

CHOICE = """import torch
%load_ext memexplore
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 8).to(device)"""
TRAINING = """%%memprofile --gpu T4
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8, device=device)).sum().backward()
optimizer.step()"""
RAISING = """%%memprofile --gpu T4
x = torch.ones(3, device="cuda")
raise ValueError(f"{int(x.long().max())} is wrong")"""
CAUGHT = """%%memprofile --gpu T4
try:
    torch.empty(2**36, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    torch.empty(2**30, dtype=torch.uint8, device="cuda")"""


LEAKING = """%%memprofile --gpu 100MiB
model, kept = torch.nn.Linear(1024, 1024).cuda(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    loss = model(torch.ones(1024, 1024, device="cuda"))
    kept.append(loss.detach() * 1)
    loss.sum().backward()
    optimizer.step()
    optimizer.zero_grad()"""
STOPPING = """%%memprofile --gpu 1GiB
network = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(12))).cuda()
network(torch.ones(4096, 4096, device="cuda")).sum().backward()"""
SWEEP = """import memexplore as mx
step = mx.Step(torch.nn.Linear(8, 8), torch.zeros(4, 8), loss=torch.mean)
mx.sweep(step, [mx.Knobs(batch=2), mx.Knobs(batch=8)], gpu="T4")"""


def shown(book: Any, number: int) -> dict[str, Any]:
    """Run a cell and return the verdict of the view that it shows."""
    book.run(number)
    book.page.wait_for_selector(".memexplore-drawn")  # it begins to draw
    book.settle()
    return book.page.evaluate(
        """() => {
            const view = [...document.querySelectorAll('.memexplore-verdict')].at(-1);
            const text = name => view.querySelector(`.memexplore-${name}`).textContent;
            return { level: view.dataset.level, headline: text('headline'), detail: text('detail'),
                     where: [...view.querySelectorAll('.memexplore-where li')].map(line => line.textContent) } }"""
    )


def test_cell_without_the_gpu_says_what_to_write(notebook: Callable[..., Any]) -> None:
    book = notebook(CHOICE, TRAINING)
    book.run(0)
    found = shown(book, 1)
    assert found["headline"] == "Nothing trained on the Tesla T4: Linear trained on the CPU"
    assert found["detail"].startswith(
        "device is the CPU, set by a cell that ran before the virtual GPU was on: write %memgpu T4"
    )


def test_cell_that_raises_names_its_line(notebook: Callable[..., Any]) -> None:
    book = notebook(CHOICE, RAISING)
    book.run(0)
    found = shown(book, 1)
    assert found["level"] == "error"
    assert found["headline"].startswith("Ended by an error: ValueError: ")
    assert found["headline"].endswith("(Cell In[2], line 3)")
    assert found["detail"].startswith("Peak so far ")
    assert found["where"] == ['Cell In[2], line 3raise ValueError(f"{int(x.long().max())} is wrong")']


def test_cell_that_catches_the_error_fits(notebook: Callable[..., Any]) -> None:
    book = notebook(CHOICE, CAUGHT)
    book.run(0)
    found = shown(book, 1)
    assert (found["level"], found["headline"][:6]) == ("fits", "Fits: ")
    # 2**36 bytes are 64 GiB.
    assert (
        "The program went on after 1 out-of-memory error: aten::empty requested 64.0 GiB at Cell In[2], line 3"
        in found["detail"]
    )


def test_leak_is_in_the_verdict_with_its_line(notebook: Callable[..., Any]) -> None:
    book = notebook(CHOICE, LEAKING)
    book.run(0)
    found = shown(book, 1)
    assert found["level"] == "growing"
    # 1024 * 1024 floats are 4 MiB
    assert found["headline"].startswith("Fits now, but grows 4.00 MiB a step: full at about step ")
    assert found["where"][0] == "Cell In[2], line 6kept.append(loss.detach() * 1)"


def test_leak_leads_to_its_line_by_mouse_and_by_keyboard(notebook: Callable[..., Any]) -> None:
    book = notebook(CHOICE, LEAKING)
    book.run(0)
    shown(book, 1)
    page = book.page
    link = page.get_by_role("button", name="Grows at Cell In[2], line 6")
    assert link.inner_text().endswith("kept.append(loss.detach() * 1)")
    marked = page.locator(".memexplore tr[aria-current]:visible")
    for open_line in (page.locator(".memexplore-headline").click, lambda: link.press("Enter")):
        page.get_by_role("tab", name="Layers").click()
        assert marked.count() == 0
        open_line()
        assert page.get_by_role("tab", name="Growth").get_attribute("aria-selected") == "true"
        assert "Cell In[2], line 6" in marked.inner_text()
        assert page.evaluate("() => document.activeElement.matches('tr[aria-current]')")


@pytest.mark.usefixtures("own_page")
def test_tabs_and_disclosures_are_whole_beside_the_side_bar(notebook: Callable[..., Any]) -> None:
    book = notebook(CHOICE, LEAKING)
    page = book.page
    page.set_viewport_size({"width": 800, "height": 1000})
    page.evaluate("() => window.jupyterapp.commands.execute('filebrowser:activate')")
    book.run(0)
    shown(book, 1)
    widget = page.locator(".memexplore:has(.memexplore-verdict):visible").first
    width = widget.bounding_box()["width"]
    assert 340 < width < 400
    tabs = widget.get_by_role("tab").filter(visible=True)
    assert "Growth" in tabs.all_inner_texts()
    tabs.last.scroll_into_view_if_needed()
    # Neither cut nor covered by the search beside them.
    whole = """tab => { const box = tab.getBoundingClientRect();
        return tab.scrollWidth <= tab.clientWidth
            && [1, box.width - 1].every(x => tab.contains(document.elementFromPoint(box.x + x, box.y + 15))) }"""
    assert [tab.inner_text() for tab in tabs.all() if not tab.evaluate(whole)] == []
    for each in widget.locator(".memexplore-disclosure > summary").filter(visible=True).all():
        assert each.bounding_box()["height"] < 2 * 19, each.inner_text()


def test_out_of_memory_is_said_once_with_the_users_line_first(notebook: Callable[..., Any]) -> None:
    book = notebook(CHOICE, STOPPING)
    book.run(0)
    found = shown(book, 1)
    assert found["level"] == "oom"
    assert found["headline"].startswith("Needs more than ")
    assert "\xa0· stops in step 1, forward of " in found["detail"]
    assert found["where"][0].startswith("Cell In[2], line 3network(")
    assert found["where"][1].startswith("torch/nn/")
    text = book.page.locator(".memexplore").inner_text()
    assert [text.count(words) for words in (found["headline"], "stops in", "GPU has")] == [1, 1, 1]


def test_one_disclosure_is_open_at_a_time_and_none_after_a_click_beside_it(notebook: Callable[..., Any]) -> None:
    book = notebook(CHOICE, STOPPING)
    book.run(0)
    shown(book, 1)
    where, notes = (book.page.locator(f".memexplore-{name}").last for name in ("where", "notes"))
    opened = [lambda: where.evaluate("it => it.open"), lambda: notes.evaluate("it => it.open")]
    where.locator("summary").click()
    lines = where.locator("li").all_inner_texts()
    assert [line.split(",")[0] for line in lines if not line.startswith("Cell In")] == [
        "torch/nn/modules/linear.py",
        "torch/nn/modules/container.py",
    ]
    notes.locator("summary").click()
    assert [one() for one in opened] == [False, True]
    book.page.locator(".memexplore-headline").last.click()
    assert [one() for one in opened] == [False, False]


def test_progress_is_a_bar_in_its_own_output_and_a_sweep_has_curves(notebook: Callable[..., Any]) -> None:
    book = notebook(CHOICE, SWEEP)
    book.run(0)
    book.run(1)
    bar, table = book.outputs(1)
    assert [one["output_type"] for one in (bar, table)] == ["display_data", "execute_result"]
    assert "3 of 3 runs in " in "".join(bar["data"]["text/plain"])
    expect(book.page.locator(".jp-OutputArea-output [role=progressbar]")).to_have_attribute("aria-valuenow", "3")
    expect(book.page.locator(".jp-OutputArea-output svg[role=img]")).to_have_count(2)
    assert "".join(table["data"]["text/plain"]) == "<Sweep of 2 settings: 2 fit, 0 out of memory>"
