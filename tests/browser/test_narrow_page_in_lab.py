"""Texts and controls of the explorer on a narrow page: nothing is cut, and every name says what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.explored import SET_UP, choose, knob

pytestmark = pytest.mark.browser
ARROW = 20
"""Pixels of a list's arrow and padding."""
CUT_LISTS = """arrow => [...document.querySelectorAll('.memexplore select')].filter(list => {
    if (!list.checkVisibility() || !list.selectedOptions.length) return false;
    const pen = document.createElement('canvas').getContext('2d');
    pen.font = getComputedStyle(list).font;
    return pen.measureText(list.selectedOptions[0].text).width > list.clientWidth - arrow;
}).map(list => list.selectedOptions[0].text)"""
CUT = "element => element.scrollWidth > element.clientWidth"


@pytest.fixture
def narrow(explored: Any) -> Any:
    """An explorer on a page of 800 pixels."""
    explored.page.set_viewport_size({"width": 800, "height": 1000})
    explored.settle()
    return explored


@pytest.mark.parametrize("width", [800, 1000, 1400])
def test_lists_show_their_whole_value(explored: Any, width: int) -> None:
    page = explored.page
    page.set_viewport_size({"width": width, "height": 1000})
    page.get_by_label("GPU", exact=True).select_option(label="RTX 3060 · 11.5 GiB")
    explored.settle()
    assert page.evaluate(CUT_LISTS, ARROW) == []


@pytest.mark.parametrize("width", [800, 1400])
def test_several_gpus_by_keyboard(explored: Any, width: int) -> None:
    page = explored.page
    page.set_viewport_size({"width": width, "height": 1000})
    gpus, strategy, offload = (knob(explored, label) for label in ("GPUs", "Strategy", "FSDP offload"))
    assert gpus.get_attribute("aria-valuetext") == "1 GPU"
    assert strategy.is_disabled()
    gpus.press("ArrowRight")
    explored.settle()
    assert gpus.get_attribute("aria-valuetext") == "2 GPUs, each with this batch"
    assert strategy.is_enabled()
    assert offload.is_disabled()
    gpus.press("ArrowRight")  # HSDP shards inside one half of a node: from 4 GPUs on
    explored.settle()
    for name in ("FSDP2, no resharding", "DDP with ZeRO-1", "HSDP", "DDP", "FSDP2"):
        strategy.select_option(label=name)
        explored.settle()
        assert page.evaluate(CUT_LISTS, ARROW) == [], name
    assert offload.is_enabled()
    assert page.locator(".memexplore-knob-problem").filter(visible=True).count() == 0


@pytest.mark.parametrize("width", [800, 1400])
def test_more_knobs_names_how_many_are_changed(explored: Any, width: int) -> None:
    page = explored.page
    page.set_viewport_size({"width": width, "height": 1000})
    page.get_by_role("button", name="More knobs").click()
    page.get_by_label("Frozen", exact=True).fill("1")
    page.keyboard.press("Enter")
    explored.settle()
    toggle = page.locator(".memexplore-more")
    assert "(1 changed)" in toggle.inner_text().replace("\xa0", " ")
    box, row = toggle.bounding_box(), page.locator(".memexplore-primary").bounding_box()
    assert box["x"] + box["width"] <= row["x"] + row["width"]
    assert not toggle.evaluate(CUT)


@pytest.mark.parametrize("width", [800, 900, 1250])
def test_nothing_moves_or_overlaps_while_knobs_turn(explored: Any, width: int) -> None:
    page = explored.page
    page.set_viewport_size({"width": width, "height": 1000})
    explored.settle()
    places = """() => ['verdict-side', 'changes', 'knobs', 'timeline', 'lower'].map(name =>
        document.querySelector(`.memexplore-${name}`).getBoundingClientRect().top
            - document.querySelector('.memexplore').getBoundingClientRect().top)"""
    before = page.evaluate(places)
    for label, option in [("Precision", "bf16"), ("Checkpoint", "every block"), ("GPU", "RTX 3060"), ("GPU", "H200")]:
        choose(explored, label, option)
        explored.settle()
        assert page.evaluate(places) == before, (label, option)
    page.get_by_role("button", name="Pin", exact=True).click()
    for key in ("ArrowLeft", "End"):
        knob(explored, "Batch").press(key)
        explored.settle()
        assert page.evaluate(places) == before, key
    row = page.locator(".memexplore-changes").bounding_box()
    for part in page.locator(".memexplore-changes button, .memexplore-against").filter(visible=True).all():
        box = part.bounding_box()
        assert row["y"] <= box["y"], part.inner_text()
        assert box["y"] + box["height"] <= row["y"] + row["height"], part.inner_text()
        assert box["x"] + box["width"] <= row["x"] + row["width"], part.inner_text()


@pytest.mark.parametrize("width", [800, 1400])
def test_changes_show_their_new_values(explored: Any, width: int) -> None:
    page = explored.page
    page.set_viewport_size({"width": width, "height": 1000})
    for label, option in [("Precision", "bf16"), ("Checkpoint", "every block")]:
        choose(explored, label, option)
        explored.settle()
    values = page.locator(".memexplore-change-value")
    assert values.all_inner_texts() == ["→ every block", "→ bf16 autocast"]  # in the order of the knobs
    assert not any(value.evaluate(CUT) for value in values.all())


def test_legend_lies_below_the_controls_of_the_timeline(narrow: Any) -> None:
    page = narrow.page
    page.get_by_label("Batch", exact=True).press("ArrowLeft")  # with an outline in the legend
    narrow.settle()
    page.evaluate("""() => { const label = document.querySelector('.memexplore-timeline-controls label');
        label.querySelector('select').append(new Option('As if there were room'));
        label.hidden = false }""")
    graph, legend = (page.locator(f".memexplore-{name}").bounding_box() for name in ("timeline", "legend"))
    for control in page.locator(".memexplore-timeline-controls select").all():
        box = control.bounding_box()
        assert graph["x"] <= box["x"]
        assert box["x"] + box["width"] <= graph["x"] + graph["width"]
        assert box["y"] + box["height"] <= legend["y"] + 4  # the padding of an entry's line


def test_list_of_pictures_shows_its_whole_value(notebook: Callable[..., Any]) -> None:
    cell = "from tests.browser.explored import small_step\nmx.view(mx.fits(small_step(), '40MiB').tape)"
    book = notebook(SET_UP, cell)
    book.page.set_viewport_size({"width": 900, "height": 1000})
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    assert book.page.get_by_label("Picture:").input_value() == "As if there were room"
    assert book.page.evaluate(CUT_LISTS, ARROW) == []


def test_range_of_equal_layers_is_in_the_tooltip_where_there_is_no_room(narrow: Any) -> None:
    row = narrow.page.locator(".memexplore-layer:has(.memexplore-layer-count)").first
    assert not row.locator(".memexplore-layer-end").is_visible()
    assert " · each " in row.get_attribute("title")


def test_mark_of_the_verdict_stands_beside_its_sentence(narrow: Any) -> None:
    mark, headline = (
        narrow.page.locator(f".memexplore-verdict .memexplore-{name}").bounding_box() for name in ("mark", "headline")
    )
    assert mark["y"] == headline["y"]


def test_reason_beside_a_knob_stays_on_the_page_and_escape_hides_it(narrow: Any) -> None:
    page = narrow.page
    page.get_by_role("button", name="More knobs").click()
    field = page.get_by_label("Frozen", exact=True)  # in the right column
    assert field.get_attribute("placeholder") == "names of layers"
    field.fill("a layer that the model does not have")
    field.press("Enter")
    reason = page.locator(".memexplore-knob-problem:not(:empty)")
    reason.wait_for()
    box, whole = reason.bounding_box(), page.locator(".memexplore").bounding_box()
    assert box["x"] + box["width"] <= whole["x"] + whole["width"]
    field.press("Escape")
    assert reason.count() == 0
    assert page.evaluate("() => document.activeElement.placeholder") == "names of layers"  # the focus stays


def test_line_of_a_tensor_keeps_its_number(narrow: Any) -> None:
    page = narrow.page
    page.get_by_role("tab", name="Tensors", exact=True).click()
    narrow.settle()
    cells = page.locator(".memexplore-tensors td.memexplore-line > div")
    assert cells.first.inner_text().replace("\n", "").count(", line ") == 1
    numbers = "() => [...document.querySelectorAll('.memexplore-tensors .memexplore-line-number')].filter(number => {"
    numbers += " const cell = number.closest('td').getBoundingClientRect();"
    numbers += " return number.textContent && number.getBoundingClientRect().right > cell.right + 1 })"
    assert page.evaluate(numbers + ".length") == 0


def test_outline_is_named_after_the_setting_that_it_is_of(explored: Any) -> None:
    page = explored.page
    page.get_by_label("Batch", exact=True).press("ArrowLeft")
    explored.settle()
    legend = page.locator(".memexplore-legend")
    assert legend.get_by_role("button", name="as written", exact=True).is_visible()
    assert legend.get_by_role("button", name="before", exact=True).count() == 0
    page.get_by_role("button", name="Pin", exact=True).click()
    page.get_by_label("Batch", exact=True).press("ArrowLeft")
    explored.settle()
    assert legend.get_by_role("button", name="pinned", exact=True).is_visible()


def test_tab_key_follows_the_order_on_the_page_below_the_timeline(explored: Any) -> None:
    page = explored.page
    page.locator(".memexplore-timeline-controls select").last.focus()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.className") == "memexplore-entry"


def test_range_of_equal_layers_is_readable(notebook: Callable[..., Any]) -> None:
    cell = """from torch import nn
import torch
layers = [nn.Linear(1000 + 4 * number, 1004 + 4 * number) for number in range(12)]
explore(mx.Step(nn.Sequential(*layers), (torch.zeros(2, 1000), torch.zeros(2, 1048)), loss=nn.functional.mse_loss))"""
    book = notebook(SET_UP, cell)
    for number, width in enumerate((1400, 800)):
        book.page.set_viewport_size({"width": width, "height": 1000})
        if not number:
            book.run(0)
            book.run(1)
            book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
        book.settle()
        ends = book.page.locator(".memexplore .memexplore-layer-end")
        # the longest text of two sizes of three digits
        ends.first.evaluate("element => { element.textContent = 'each 990 MiB–1.01 GiB' }")
        assert not ends.first.evaluate(CUT)


def test_reason_why_nothing_can_be_searched_is_visible(notebook: Callable[..., Any]) -> None:
    book = notebook(
        "%load_ext memexplore\nimport torch", "%%memprofile --explore --gpu T4\ntorch.ones(8, device='cuda')"
    )
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn")
    book.page.set_viewport_size({"width": 800, "height": 1000})
    book.settle()
    text = book.page.locator(".memexplore-fit-text")
    assert "explore a Step instead" in text.inner_text()
    assert not text.evaluate("element => element.scrollHeight > element.clientHeight")


def test_a_long_setting_goes_on_in_the_next_line_of_its_table(explored: Any) -> None:
    page = explored.page
    knob(explored, "Expandable segments").check()
    explored.settle()
    page.get_by_role("tab", name="History").click()
    setting = page.get_by_role("button", name="settings expandable_segments:True")
    long, short = (
        setting.evaluate(f"button => {{ button.style.width = '{width}'; return button.offsetHeight }}")
        for width in ("min-content", "max-content")
    )
    assert long >= 3 * short  # "settings", "expandable_", "segments:", "True"
