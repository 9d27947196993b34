"""Two views of one widget on a page: both share a comm, and each takes only the replies to its own requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

# 16 steps are more rows than the 2000 points of a timeline, so that each zoom requests its rows.
SET_UP = (
    "import memexplore as mx\nfrom tests.sample_tapes import training_tape\nview = mx.view(training_tape(steps=16))"
)
# Each view's first and last row, and its number of rows.
ROWS = """() => [...document.querySelectorAll('.memexplore-timeline')].map(graph => {
    const { x } = graph.figure.data.find(trace => trace.name === 'allocated'); return [x[0], x.at(-1), x.length] })"""


def drag(book: Any, number: int, low: float, high: float) -> None:
    """Zoom one of the views by dragging from one share of its width to another."""
    graph = f"document.querySelectorAll('.memexplore-timeline')[{number}]"
    book.page.evaluate(f"() => {graph}.scrollIntoView({{block: 'center'}})")
    book.settle()
    left, middle, width = book.page.evaluate(
        f"""() => {{ const graph = {graph}, box = graph.getBoundingClientRect(), {{ xaxis, yaxis }} = graph._fullLayout;
            return [box.x + xaxis._offset, box.y + yaxis._offset + yaxis._length / 2, xaxis._length] }}"""
    )
    mouse = book.page.mouse
    mouse.move(left + width * low, middle)
    mouse.down()
    mouse.move(left + width * high, middle, steps=5)
    mouse.up()
    book.settle()


def test_each_view_keeps_its_own_zoom(notebook: Callable[..., Any]) -> None:
    book = notebook(SET_UP, "view", "view")
    for number in range(3):
        book.run(number)
    book.page.wait_for_function(
        "() => document.querySelectorAll('.memexplore-drawn .memexplore-layers:not(:empty)').length === 2"
    )
    book.settle()
    whole = book.page.evaluate(ROWS)
    assert whole[0] == whole[1]
    # Both views have made one request when the second reply comes: only its view differs.
    drag(book, 0, 0.5, 0.55)
    first, second = book.page.evaluate(ROWS)
    assert second == whole[1]
    assert first[0] > whole[0][0]
    assert first[2] == first[1] - first[0] + 1  # every row of its window
    drag(book, 1, 0.2, 0.25)
    unchanged, second = book.page.evaluate(ROWS)
    assert unchanged == first
    assert second[1] < first[0]
    assert second[2] == second[1] - second[0] + 1


def test_cursor_and_selection_are_those_of_both_views(notebook: Callable[..., Any]) -> None:
    book = notebook(SET_UP, "view", "view", "view.selection = 'encoder'")
    for number in range(3):
        book.run(number)
    book.page.wait_for_function(
        "() => document.querySelectorAll('.memexplore-drawn .memexplore-layers:not(:empty)').length === 2"
    )
    book.settle()
    book.run(3)
    book.page.wait_for_function(
        """() => [...document.querySelectorAll('.memexplore-timeline')].filter(graph =>
            graph.figure.data.some(trace => trace.stackgroup === 'layer')).length === 2"""
    )
