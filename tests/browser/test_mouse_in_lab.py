"""The explorer by mouse: clicked layers, text fields, the legend, the search."""

from __future__ import annotations

import re
from typing import Any

import pytest

from memexplore.run.knobs.knobs import Knobs
from tests.browser.explored import GRAPH, knob, ran, reset, wait_for
from tests.browser.waiting import expect

pytestmark = pytest.mark.browser


def click_layer(book: Any, name: str) -> None:
    """Click the row of a layer."""
    book.settle()
    together = book.page.get_by_role("button", name="4 layers one by one", pressed=False)
    if together.count():
        together.click()
    book.page.get_by_role("treeitem", name=re.compile(f"^{re.escape(name)}, ")).first.click()
    book.page.locator(".memexplore-chip", has_text=f"{name} ✕").wait_for()


def press(book: Any, label: str) -> None:
    """Press a button for the selected layer."""
    button = book.page.locator(".memexplore-selected").get_by_role("button", name=label, exact=True)
    # The page enables it when the kernel has confirmed the selection.
    expect(button).to_be_enabled()
    button.click()


def test_freeze_button_adds_and_removes_the_clicked_layer(explored: Any) -> None:
    click_layer(explored, "2")
    press(explored, "Frozen")
    wait_for(explored, Knobs(frozen=("2",)))
    # Other controls are updated after the chart.
    explored.settle()
    assert knob(explored, "Frozen").input_value() == "2"
    press(explored, "Frozen")
    wait_for(explored, Knobs())


def test_lora_button_adds_the_clicked_layer_and_its_rank_is_dragged(explored: Any) -> None:
    click_layer(explored, "7")
    press(explored, "LoRA")
    wait_for(explored, Knobs(lora=("7",)))
    explored.settle()
    slider = knob(explored, "LoRA rank")
    slider.scroll_into_view_if_needed()
    track = slider.bounding_box()
    middle = track["y"] + track["height"] / 2
    mouse = explored.page.mouse
    # Rank 8 is the fourth of nine positions; the handle is 16 pixels wide.
    mouse.move(track["x"] + 8 + 3 / 8 * (track["width"] - 16), middle)
    mouse.down()
    mouse.move(track["x"] + track["width"] - 2, middle, steps=4)
    mouse.up()
    # The right end of the ranks is 256; on the way there the ranks between may be drawn, or not.
    explored.page.wait_for_function(
        f"peak => {GRAPH}.figure.data.find(trace => trace.name === 'peak').y[0] === peak",
        arg=ran(Knobs(lora=("7",), lora_rank=256)).outcome.peak_allocated,
    )


def test_a_drag_is_one_change(explored: Any) -> None:
    slider = knob(explored, "Batch")
    slider.scroll_into_view_if_needed()
    track = slider.bounding_box()
    mouse = explored.page.mouse
    mouse.move(track["x"] + track["width"] - 8, track["y"] + 12)
    mouse.down()
    mouse.move(track["x"] + 8, track["y"] + 12, steps=30)
    mouse.up()
    # The left end: 64 / 64 samples.
    wait_for(explored, Knobs(batch=1))
    explored.settle()
    explored.page.get_by_role("button", name="Undo", exact=True).click()
    wait_for(explored, Knobs())
    explored.settle()
    assert slider.get_attribute("aria-valuetext") == "64 samples"


def test_text_applies_when_the_field_loses_focus(explored: Any) -> None:
    for label, text, knobs in (
        ("Checkpoint layers", "1 2", Knobs(checkpoint="layers 1 2")),
        ("Frozen", "1 2", Knobs(frozen=("1", "2"))),
        ("LoRA", "7", Knobs(lora="7")),
    ):
        line = knob(explored, label)
        line.click()
        explored.page.keyboard.insert_text(text)
        explored.page.locator(".memexplore-headline").click()
        wait_for(explored, knobs)
        reset(explored)


def test_search_goes_on_while_knobs_turn_and_stops(explored: Any) -> None:
    page = explored.page
    page.get_by_role("button", name="What would fit?").click()
    chosen = page.get_by_role("tab", name="Trade-offs", exact=True)
    chosen.click()
    stop = page.get_by_role("button", name="Stop", exact=True)
    stop.wait_for()
    knob(explored, "Batch").press("ArrowLeft")
    wait_for(explored, Knobs(batch=32))
    # At once if it is visible: a fast machine may have run all settings by now, or have while the mouse moves.
    page.evaluate("""() => [...document.querySelectorAll('.memexplore-fit button')]
        .find(button => button.textContent === 'Stop' && !button.hidden)?.click()""")
    page.get_by_role("button", name="What would fit?").wait_for()
    assert "runs" in page.locator(".memexplore-fit-text").inner_text()
    # The results open their tab only until the person opens another one.
    assert chosen.get_attribute("aria-selected") == "true"


def test_a_tab_closed_during_a_search_comes_back(explored: Any) -> None:
    page = explored.page
    page.get_by_role("button", name="What would fit?").click()
    page.get_by_role("button", name="Stop", exact=True).wait_for()
    explored.save()
    page.goto("about:blank")
    explored.open()
    page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    page.get_by_role("tab", name="Advice", exact=True).click()
    page.get_by_text("As written it needs").filter(visible=True).wait_for(timeout=240_000)
    knob(explored, "Batch").press("ArrowLeft")
    wait_for(explored, Knobs(batch=32))


# The colour in the middle of the activations, at the row at which they are most.
MIDDLE = f"""() => {{ const {{ xaxis, yaxis }} = {GRAPH}._fullLayout, scale = devicePixelRatio;
    const stack = {GRAPH}.figure.data.filter(trace => trace.stackgroup);
    const {{ x, y }} = stack.find(trace => trace.name === 'activation'), at = y.indexOf(Math.max(...y));
    const below = stack.slice(0, stack.findIndex(trace => trace.name === 'activation'));
    const height = below.reduce((sum, trace) => sum + trace.y[at], y[at] / 2);
    const pen = document.querySelector('.memexplore-areas').getContext('2d');
    // The canvas begins 8 pixels before the axes, and a row holds until the next.
    const place = [8 + (xaxis.d2p(x[at]) + xaxis.d2p(x[at + 1])) / 2, 8 + yaxis.d2p(height)];
    return [...pen.getImageData(place[0] * scale, place[1] * scale, 1, 1).data] }}"""


def test_legend_hides_a_category_and_shows_it_again(explored: Any) -> None:
    orange = [0xE6, 0x9F, 0x00, 255]  # #E69F00, DESIGN's colour of activations
    entry = explored.page.locator(".memexplore-entry", has_text="activation")
    assert explored.page.evaluate(MIDDLE) == orange
    entry.click()
    # plotly moves the axis before the canvas is drawn.
    explored.page.wait_for_function(f"orange => String(({MIDDLE})()) !== String(orange)", arg=orange)
    # A hidden category stays hidden when a control moves.
    knob(explored, "Batch").press("ArrowLeft")
    wait_for(explored, Knobs(batch=32))
    explored.settle()
    assert entry.get_attribute("aria-pressed") == "false"
    entry.click()
    explored.page.wait_for_function(f"orange => String(({MIDDLE})()) === String(orange)", arg=orange)


def test_timeline_can_be_downloaded(explored: Any) -> None:
    explored.page.locator(".memexplore-timeline").hover()
    with explored.page.expect_download() as saved:
        explored.page.locator(".memexplore-timeline [data-title='Download plot as a PNG']").click()
    with open(saved.value.path(), "rb") as file:
        assert file.read(8) == b"\x89PNG\r\n\x1a\n"
