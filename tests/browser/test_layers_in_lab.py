"""Layers as rows, tensors, search, and the picture of a run that does not fit, in a real JupyterLab."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from memexplore.analysis import curves
from memexplore.text.units import parse_size, size_text
from tests.sample_tapes import training_tape

pytestmark = pytest.mark.browser

SET_UP = "import memexplore as mx\nfrom tests.sample_tapes import training_tape\nview = mx.view(training_tape())"
OUT_OF_MEMORY = """import memexplore as mx
from tests.browser.explored import small_step
view = mx.view(mx.fits(small_step(), "40MiB").tape)"""
GRAPH = "document.querySelector('.memexplore-timeline')"
# Texts of the sizes of the rows of the first level.
TOP_SIZES = """() => [...document.querySelectorAll('.memexplore-layer[aria-level="1"] .memexplore-layer-size')]
    .map(size => size.textContent)"""


@pytest.fixture
def shown(notebook: Callable[..., Any]) -> Any:
    """A notebook with a view on the screen."""
    book = notebook(SET_UP, "view", "view.cursor = 100")
    for cell in (0, 1):
        book.run(cell)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    return book


def test_layers_sum_to_the_memory_at_the_cursor(shown: Any) -> None:
    tape = training_tape()
    allocated, _ = curves.peak(tape)
    widths = """() => [...document.querySelectorAll('.memexplore-layer[aria-level="1"] .memexplore-layer-bar')]
        .flatMap(bar => [...bar.children]).reduce((sum, part) => sum + parseFloat(part.style.width), 0)"""
    assert shown.page.evaluate(widths) == pytest.approx(100)
    assert size_text(allocated) in shown.page.locator(".memexplore-position").inner_text()
    before = shown.page.evaluate(TOP_SIZES)
    # Each size has three digits.
    assert sum(map(parse_size, before)) == pytest.approx(allocated, rel=0.005)
    shown.run(2)
    shown.page.wait_for_function(f"before => String(({TOP_SIZES})()) !== String(before)", arg=before)
    assert shown.page.evaluate(widths) == pytest.approx(100)
    at_cursor = int(curves.curve(tape)[100])
    assert sum(map(parse_size, shown.page.evaluate(TOP_SIZES))) == pytest.approx(at_cursor, rel=0.005)
    shown.page.get_by_role("button", name="Each layer's maximum").click()
    shown.page.wait_for_function("() => !document.querySelector('.memexplore-layers-note:empty')")


def test_folded_row_around_the_selected_layer_is_marked(shown: Any) -> None:
    tree = shown.page.get_by_role("tree", name="Layers by bytes")
    inner = tree.locator("[aria-level='2']").first
    inner.click()
    shown.settle()
    assert shown.page.locator(".memexplore-around-selection").count() == 0
    root = tree.get_by_role("treeitem", name=re.compile("^UNet, "))
    root.locator(".memexplore-fold").click()
    assert "contains the selected layer" in (root.get_attribute("aria-label") or "")
    shadow = root.evaluate("row => getComputedStyle(row).boxShadow")
    assert shadow != "none"


def test_layers_are_a_tree_for_the_keyboard(shown: Any) -> None:
    tree = shown.page.get_by_role("tree", name="Layers by bytes")
    assert tree.locator("[role=treeitem][tabindex='0']").count() == 1
    root = tree.get_by_role("treeitem", name=re.compile("^UNet, "))
    root.focus()
    root.press("ArrowLeft")
    assert root.get_attribute("aria-expanded") == "false"
    root.press("ArrowRight")
    root.press("ArrowDown")
    focused = "() => document.activeElement.getAttribute('aria-label')"
    assert shown.page.evaluate(focused).startswith("encoder")
    shown.page.keyboard.press("Enter")
    shown.page.wait_for_selector(".memexplore-chip:visible")
    selected = tree.locator("[aria-selected=true]")
    assert selected.get_attribute("aria-label").startswith("encoder")
    shown.page.keyboard.press("Enter")
    shown.page.wait_for_selector(".memexplore-chip", state="hidden")


def test_search_filters_layers_tensors_and_lines(shown: Any) -> None:
    rows = shown.page.locator(".memexplore-layer")
    shown.page.get_by_role("searchbox").fill("head")
    shown.page.wait_for_function("() => document.querySelectorAll('.memexplore-layer').length < 5")
    assert "head" in rows.last.inner_text()
    shown.page.get_by_role("tab", name=re.compile(r"^Tensors \(\d+\)$")).click()  # how many match
    assert all("head" in text for text in shown.page.locator(".memexplore-tensors tbody tr").all_inner_texts())
    shown.page.get_by_role("searchbox").fill("no such layer")
    shown.page.get_by_text("Nothing matches.").first.wait_for()


def test_tensors_have_their_shape_and_are_found_by_it(shown: Any) -> None:
    shown.page.get_by_role("tab", name="Tensors", exact=True).click()
    rows = shown.page.locator(".memexplore-tensors tbody tr")
    count = rows.count()
    # batch 8, 64 channels, 256 by 256 pixels; other tensors alive at the peak have other shapes
    shown.page.get_by_role("searchbox").fill("float32[8, 64, 256, 256]")
    shown.page.wait_for_function(
        "count => document.querySelectorAll('.memexplore-tensors tbody tr').length < count", arg=count
    )
    found = shown.page.locator(".memexplore-tensors td:nth-child(2) > div:first-child").all_inner_texts()
    assert found
    assert set(found) == {"float32[8, 64, 256, 256]"}


def test_every_column_of_the_tensors_is_visible_beside_the_explorer(explored: Any) -> None:
    page = explored.page
    page.get_by_role("tab", name="Tensors", exact=True).click()
    explored.settle()
    panel = page.locator(".memexplore-panel:has(.memexplore-tensors)").bounding_box()
    line = page.locator(".memexplore-tensors td.memexplore-line").first.bounding_box()
    assert line["x"] + line["width"] <= panel["x"] + panel["width"]
    assert line["width"] >= 110
    # two lines of 18 px, and 3 px above and below
    assert page.locator(".memexplore-tensors tbody tr").first.bounding_box()["height"] <= 2 * 18 + 7


def test_run_that_does_not_fit_is_drawn_whole(notebook: Callable[..., Any]) -> None:
    book = notebook(OUT_OF_MEMORY, "view", "print(len(view.drawn), len(view.tape))")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    names = f"() => {GRAPH}.figure.data.map(trace => trace.name)"
    phases = f"() => {GRAPH}.layout.annotations.map(note => note.text)"
    assert "over capacity" in book.page.evaluate(names)
    assert any("stops here" in text for text in book.page.evaluate(phases))
    # The whole run has the optimizer's phase; what happened has no backward pass, it ends in the forward pass.
    assert "optimizer state" in book.page.evaluate(names)
    book.page.get_by_label("Picture:").select_option("What happened")
    book.page.wait_for_function(f"() => !({names})().includes('over capacity')")
    book.settle()
    assert "optimizer state" not in book.page.evaluate(names)
    book.run(2)
    drawn, happened = map(int, book.text(2).split())
    assert drawn == happened
