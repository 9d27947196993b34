"""The view in a real JupyterLab: the drawn figures, and mouse and keyboard actions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from memexplore.analysis import curves
from tests.browser.waiting import expect
from tests.sample_tapes import training_tape

pytestmark = pytest.mark.browser

# 16 steps are more rows than the 2000 points that a timeline draws, so that zooming has something to fetch.
STEPS = 16
SET_UP = (
    "import memexplore as mx\nfrom tests.sample_tapes import training_tape\n"
    f"tape = training_tape(steps={STEPS})\nview = mx.view(tape)"
)
GRAPH = "const graph = document.querySelector('.memexplore-timeline');"
ROWS = f"""() => {{ {GRAPH}
    return [...graph.data.find(trace => trace.name === 'allocated').customdata] }}"""
CURSOR = f"""row => {{ {GRAPH}
    return graph.layout.shapes.find(shape => shape.name === 'cursor') && graph.dataset.row === String(row) }}"""


@pytest.fixture
def shown(notebook: Callable[..., Any]) -> Any:
    """A notebook with a view on the screen, and an empty cell below it."""
    book = notebook(SET_UP, "view", "print(view.cursor, view.selection)")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    unfold(book)
    return book


def unfold(book: Any) -> None:
    """Show every step: the steps of the tape are alike."""
    book.page.get_by_role("button", name="Equal steps folded").click()
    book.page.wait_for_function(
        f"() => {{ {GRAPH} return graph.figure.axis.can_fold && !graph.figure.axis.is_folded }}"
    )
    book.settle()


def visible(book: Any, selector: str) -> int:
    """Return the number of visible elements of a selector."""
    return sum(element.is_visible() for element in book.page.locator(selector).all())


def click_timeline(book: Any, row: float) -> int:
    """Click into the timeline near a row; return the row below the mouse."""
    book.settle()
    place = book.page.evaluate(
        f"""row => {{ {GRAPH} const box = graph.getBoundingClientRect(), {{ xaxis, yaxis }} = graph._fullLayout;
            const {{ rows, xs }} = graph.figure.axis, knot = rows.findLastIndex(first => first <= row);
            const share = (row - rows[knot]) / ((rows[knot + 1] ?? row + 1) - rows[knot]);
            const x = xs[knot] + share * ((xs[knot + 1] ?? xs[knot]) - xs[knot]);
            return [box.x + xaxis._offset + xaxis.d2p(x), box.y + yaxis._offset + yaxis._length / 2] }}""",
        row,
    )
    book.page.mouse.move(*place)
    hovered = book.page.wait_for_function(f"() => {{ {GRAPH} return graph._hoverdata?.[0] }}").evaluate(
        "it => it.customdata"
    )
    book.page.mouse.click(*place)
    return hovered


def test_browser_draws_the_tape(shown: Any) -> None:
    tape = training_tape(steps=STEPS)
    names = shown.page.evaluate(f"() => {{ {GRAPH} return graph.figure.data.map(trace => trace.name) }}")
    assert names[:2] == ["parameter", "buffer"]
    assert names[-3:] == ["allocated", "reserved", "peak"]
    rows = shown.page.evaluate(ROWS)
    assert rows[0] == 0
    assert rows[-1] == len(tape) - 1
    assert len(rows) <= 2000 < len(tape)
    labels = shown.page.locator(".memexplore-layer-label").all_inner_texts()
    assert labels[0] == "UNet"
    assert labels[-1] == "not in a layer"
    assert shown.errors() == []


def drag(book: Any, low: float, high: float) -> None:
    """Zoom by dragging over a part of the timeline, from one share of its width to another."""
    book.page.evaluate("() => document.querySelector('.memexplore-timeline').scrollIntoView({block: 'center'})")
    book.settle()
    left, middle, width = book.page.evaluate(
        f"""() => {{ {GRAPH} const box = graph.getBoundingClientRect(), {{ xaxis, yaxis }} = graph._fullLayout;
            return [box.x + xaxis._offset, box.y + yaxis._offset + yaxis._length / 2, xaxis._length] }}"""
    )
    mouse = book.page.mouse
    mouse.move(left + width * low, middle)
    mouse.down()
    mouse.move(left + width * high, middle, steps=5)
    mouse.up()


ROW = "() => document.querySelector('.memexplore-timeline').dataset.row"
EVERY_ROW = f"() => {{ const rows = ({ROWS})(); return rows.every((row, i) => !i || row === rows[i - 1] + 1) }}"


def double_click(book: Any, pause: float) -> None:
    """Double-click the middle of the timeline, with a time between the clicks in milliseconds."""
    box = book.page.locator(".memexplore-timeline .nsewdrag").first.bounding_box()
    mouse = book.page.mouse
    mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    book.page.wait_for_timeout(pause)
    # `click(click_count=2)` would press twice more.
    mouse.down(click_count=2)
    mouse.up(click_count=2)


# plotly itself takes two clicks for a double click within 600 ms.
@pytest.mark.parametrize("pause", [0, 400, 900])
def test_zoom_fetches_every_row_and_double_click_shows_all(shown: Any, pause: float) -> None:
    whole, row = shown.page.evaluate(ROWS), shown.page.evaluate(ROW)
    drag(shown, 0.5, 0.55)
    shown.page.wait_for_function(EVERY_ROW)
    part = shown.page.evaluate(ROWS)
    # a twentieth of the rows, to the pixel
    assert 0.045 * whole[-1] < len(part) < 0.055 * whole[-1]
    shown.settle()
    double_click(shown, pause)
    shown.page.wait_for_function(f"last => ({ROWS})().at(-1) === last", arg=whole[-1])
    assert shown.page.evaluate(ROWS) == whole
    shown.settle()  # a double click is no choice of an event: the cursor stays
    assert shown.page.evaluate(ROW) == row


def test_zoom_works_while_a_cell_runs(notebook: Callable[..., Any]) -> None:
    book = notebook(SET_UP, "view", "while True: pass")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    unfold(book)
    book.start(2)
    drag(book, 0.5, 0.55)
    book.page.wait_for_function(EVERY_ROW)
    assert book.state(2) == "running"
    book.interrupt()
    book.wait(2)


def test_click_sets_the_cursor_for_the_next_cell(shown: Any) -> None:
    row = click_timeline(shown, 3000)
    shown.page.wait_for_function(CURSOR, arg=row)
    shown.page.get_by_role("tab", name="Tensors", exact=True).click()
    # The kernel sends what the tabs show there.
    expect(shown.page.locator(".memexplore-position")).to_have_text(re.compile(f" · event {row:,}$"))
    assert visible(shown, ".memexplore-tensors tbody tr") > 10
    shown.run(2)
    assert shown.text(2) == f"{row} None\n"
    shown.page.locator(".memexplore-timeline").press("ArrowRight")
    shown.page.wait_for_function(
        CURSOR,
        arg=row + 1,
    )


def test_click_on_a_layer_highlights_it_and_sets_the_selection_for_the_next_cell(shown: Any) -> None:
    lit = f"""() => {{ {GRAPH}
        return graph.figure.data.filter(trace => trace.stackgroup === 'layer').map(trace => trace.name) }}"""
    assert shown.page.evaluate(lit) == []
    shown.settle()
    shown.page.locator(".memexplore-layer", has_text="encoder").first.click()
    shown.page.wait_for_function(f"() => ({lit})().length > 0")
    assert "activation" in shown.page.evaluate(lit)
    shown.run(2)
    assert shown.text(2).endswith(" encoder\n")
    shown.page.locator(".memexplore-chip").click()
    shown.page.wait_for_function(f"() => ({lit})().length === 0")


BLOCKS = "document.querySelector('.memexplore-blocks')"
DRAWN = f"() => {BLOCKS}?.data && {BLOCKS}.querySelectorAll('.barlayer .point').length > 0"
ALLOCATED = f"""() => {BLOCKS}.calcdata.filter(bars => bars[0].trace.name !== 'free')
    .flatMap(bars => bars.map(bar => bar.s)).reduce((sum, size) => sum + size, 0)"""


def test_blocks_follow_the_cursor(shown: Any) -> None:
    tape = training_tape(steps=STEPS)
    shown.page.get_by_role("tab", name="Blocks", exact=True).click()
    shown.page.wait_for_function(DRAWN)
    peak, _ = curves.peak(tape)
    assert shown.page.evaluate(ALLOCATED) == peak
    assert " are allocated; " in shown.page.locator(".memexplore-fragmentation").inner_text()
    row = click_timeline(shown, 3000)
    # a block whose free is requested and not completed is still shown
    active = int(curves.curve(tape, "active")[row])
    assert active != peak
    shown.page.wait_for_function(f"size => ({ALLOCATED})() === size", arg=active)


def test_buttons_of_the_blocks_cover_no_segment(shown: Any) -> None:
    shown.page.get_by_role("tab", name="Blocks", exact=True).click()
    shown.page.wait_for_function(DRAWN)
    panel = shown.page.locator(".memexplore-panel:visible")
    buttons, axes = panel.locator(".modebar").bounding_box(), panel.locator(".nsewdrag").bounding_box()
    assert buttons["y"] + buttons["height"] <= axes["y"]


def test_selected_layer_highlights_its_blocks_and_a_block_selects_its_layer(shown: Any) -> None:
    shown.page.get_by_role("tab", name="Blocks", exact=True).click()
    shown.page.wait_for_function(DRAWN)
    shown.settle()
    pale = f"() => {BLOCKS}.calcdata.flatMap(bars => bars.map(bar => bar.mo ?? 1)).filter(share => share < 1).length"
    assert shown.page.evaluate(pale) == 0
    place = shown.page.evaluate(
        f"""() => {{ const points = [...{BLOCKS}.querySelectorAll('.trace.bars')]
            .filter(trace => trace.__data__[0].trace.name === 'activation')
            .flatMap(trace => [...trace.querySelectorAll('.point path')]);
            const boxes = points.map(path => path.getBoundingClientRect()).sort((a, b) => b.width - a.width);
            return [boxes[0].x + boxes[0].width / 2, boxes[0].y + boxes[0].height / 2] }}"""
    )
    shown.page.mouse.move(*place)
    shown.page.wait_for_selector(".memexplore-blocks .hoverlayer .hovertext")
    shown.page.mouse.click(*place)
    shown.page.wait_for_selector(".memexplore-chip:not([hidden])")
    shown.page.wait_for_function(f"() => ({pale})() > 0")
    shown.run(2)
    assert shown.text(2).split()[-1] in training_tape().modules


def test_growth_tab_shows_what_grows(notebook: Callable[..., Any]) -> None:
    book = notebook("import memexplore as mx\nfrom tests.sample_tapes import leaking_tape\nmx.view(leaking_tape(4))")
    book.run(0)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.page.get_by_role("tab", name="Growth", exact=True).click()
    assert book.page.locator(".memexplore-growth td").first.inner_text() == "+200 B"


def test_growth_tab_is_hidden_without_growth(shown: Any) -> None:
    assert shown.page.get_by_role("tab", name="Growth", exact=True).count() == 0


def test_colours_follow_the_theme(shown: Any) -> None:
    colour = f"() => {{ {GRAPH} return getComputedStyle(graph.querySelector('.xtick text')).fill }}"
    light = shown.page.evaluate(colour)
    shown.page.evaluate("() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    shown.page.wait_for_function(f"light => ({colour})() !== light", arg=light)
    shown.settle()  # a theme changes several marks of the page
    brightness = [sum(map(int, text[4:-1].split(","))) for text in (light, shown.page.evaluate(colour))]
    # text is dark on the light page, and light on the dark page: 3 x 255 is white
    assert brightness[0] < 200
    assert brightness[1] > 565


def test_output_of_the_view_has_no_scroll_bar(shown: Any) -> None:
    assert shown.page.evaluate(
        """() => { const output = document.querySelector('.jp-OutputArea-output:has(.memexplore)');
            return output.scrollHeight === output.clientHeight && output.offsetWidth === output.clientWidth }"""
    )


def test_width_follows_the_page(shown: Any) -> None:
    width = f"() => {{ {GRAPH} return graph._fullLayout.width }}"
    wide = shown.page.evaluate(width)
    shown.page.set_viewport_size({"width": 900, "height": 1000})
    shown.page.wait_for_function(f"wide => ({width})() < wide - 400", arg=wide)
    shown.settle()  # the legend and the labels follow the width
    overflow = shown.page.evaluate(
        "() => { const e = document.querySelector('.memexplore'); return e.scrollWidth - e.clientWidth }"
    )
    assert overflow <= 0


def test_reopened_without_a_kernel_shows_one_image(shown: Any) -> None:
    picture, live = "img[class^=memexplore-picture]", ".memexplore-timeline .main-svg"
    assert visible(shown, picture) == 0
    shown.save()
    shown.shut_down()
    shown.open_without_kernel()
    shown.page.wait_for_selector(picture, state="visible")
    assert visible(shown, picture) == 1
    assert visible(shown, live) == 0
    assert shown.page.get_by_text("Error displaying widget").filter(visible=True).count() == 0
    natural = shown.page.evaluate(f"() => document.querySelector('{picture}').naturalWidth")
    assert natural > 300


def test_reloaded_page_is_alive_again(shown: Any) -> None:
    shown.save()
    shown.open()
    shown.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    assert visible(shown, "img[class^=memexplore-picture]") == 0


@pytest.mark.usefixtures("own_page")
def test_plotly_of_the_page_is_restored(notebook: Callable[..., Any]) -> None:
    book = notebook(SET_UP, "view")
    book.page.evaluate("() => { globalThis.Plotly = 'mine' }")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn")
    assert book.page.evaluate("() => globalThis.Plotly") == "mine"


def at_the_peak(book: Any) -> Any:
    """Wait until the cursor is at the peak."""
    peak = curves.peak(training_tape(steps=STEPS))[1]
    book.page.wait_for_function(f"row => {{ {GRAPH} return graph.dataset.row === String(row) }}", arg=peak)


def test_button_moves_the_cursor_to_the_peak(shown: Any) -> None:
    button = shown.page.get_by_role("button", name="To the peak")
    assert not button.is_visible()  # the cursor is there
    click_timeline(shown, 100)
    button.click()
    at_the_peak(shown)
    shown.settle()
    assert not button.is_visible()


def test_key_moves_the_cursor_to_the_peak(shown: Any) -> None:
    click_timeline(shown, 100)
    shown.settle()
    shown.page.locator(".memexplore-timeline").press("p")
    at_the_peak(shown)


def test_click_beside_the_marker_of_the_peak_is_at_the_peak(shown: Any) -> None:
    click_timeline(shown, 100)
    shown.settle()
    x, y = shown.page.evaluate(
        f"""() => {{ {GRAPH} const box = graph.getBoundingClientRect(), {{ xaxis, yaxis }} = graph._fullLayout;
            const peak = graph.figure.data.find(({{ name }}) => name === "peak");
            return [box.x + xaxis._offset + xaxis.d2p(peak.x[0]), box.y + yaxis._offset + yaxis.d2p(peak.y[0])] }}"""
    )
    # 6² + 6² is less than 10²; on this tape of 16 steps a pixel is more than a row.
    shown.page.mouse.click(x + 6, y + 6)
    at_the_peak(shown)


def test_search_counts_what_it_finds_in_each_tab(shown: Any) -> None:
    shown.page.locator(".memexplore-search").fill("conv")
    counts = shown.page.evaluate(
        """() => Object.fromEntries(
            [...document.querySelectorAll('[data-count]')].map(tab => [tab.textContent, +tab.dataset.count]))"""
    )
    rows = shown.page.locator(".memexplore-layer-label", has_text="conv")
    assert counts["Layers"] == rows.count() > 0
    shown.page.get_by_role("tab", name="Tensors").click()
    assert counts["Tensors"] == visible(shown, ".memexplore-tensors tbody tr")
    shown.page.locator(".memexplore-search").fill("")
    assert shown.page.locator("[data-count]").count() == 0


def test_rows_below_the_panel_are_announced(shown: Any) -> None:
    more = shown.page.locator(".memexplore-layers-more")
    for fold in ("▸",) * 8:  # open what is closed, until the rows are more than the panel shows
        closed = shown.page.locator(".memexplore-fold", has_text=fold)
        if closed.count():
            closed.first.click()
    below = """() => { const end = document.querySelector('.memexplore-layers-more').getBoundingClientRect().top;
        const rows = [...document.querySelectorAll('.memexplore-layer')];
        return rows.filter(row => row.getBoundingClientRect().bottom > end + 1).length }"""
    count = shown.page.evaluate(below)
    assert count > 0
    shown.page.wait_for_function(
        "count => document.querySelector('.memexplore-layers-more').textContent.startsWith(`▾ ${count} more row`)",
        arg=count,
    )
    shown.page.locator(".memexplore-layers").evaluate("tree => tree.lastElementChild.scrollIntoView()")
    shown.page.locator(".memexplore-panel").first.evaluate("panel => panel.scrollTo(0, panel.scrollHeight)")
    shown.page.wait_for_function("() => !document.querySelector('.memexplore-layers-more').textContent")
    assert not more.is_visible()
