"""A view whose kernel has ended: the page says so, keeps its last picture, and zoom lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.test_view_in_lab import GRAPH, SET_UP, drag

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("own_page")]

GONE = "() => document.querySelector('p.memexplore-gone').textContent.includes('has ended or was restarted')"
RANGE = f"() => {{ {GRAPH} return graph._fullLayout.xaxis.range }}"


@pytest.fixture
def shown(notebook: Callable[..., Any]) -> Any:
    """A notebook with a view on the screen."""
    book = notebook(SET_UP, "view", "1 + 1")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn")
    book.settle()
    return book


def restart(book: Any) -> None:
    book.page.evaluate(f"() => {{ {book.CURRENT} return panel.sessionContext.session.kernel.restart() }}")


def test_restart_is_said_and_the_last_picture_stays(shown: Any) -> None:
    assert not shown.page.evaluate(GONE)
    restart(shown)
    shown.page.wait_for_function(GONE)
    low, high = shown.page.evaluate(RANGE)
    drag(shown, 0.25, 0.5)
    shown.settle()
    shown.page.wait_for_function(f"high => ({RANGE})()[1] < high", arg=high)
    assert shown.page.evaluate(RANGE)[0] > low
    assert shown.page.locator(".memexplore").get_attribute("aria-busy") == "false"


def test_after_a_restart_texts_keep_their_colour_and_empty_parts_say_why(shown: Any) -> None:
    page = shown.page
    colour = "() => getComputedStyle(document.querySelector('.memexplore-headline')).color"
    before = page.evaluate(colour)
    restart(shown)
    page.wait_for_function(GONE)
    assert page.evaluate(colour) == before  # red is for what does not fit
    page.get_by_role("tab", name="Blocks", exact=True).click()
    assert "Run the cell again" in page.locator(".memexplore-fragmentation").inner_text()
    page.get_by_role("tab", name="Layers", exact=True).click()
    assert page.get_by_role("button", name="Each layer's maximum").is_disabled()


def test_end_of_the_kernel_is_said(shown: Any) -> None:
    shown.page.evaluate(f"() => {{ {shown.CURRENT} return panel.sessionContext.shutdown() }}")
    shown.page.wait_for_function(GONE)


def test_a_busy_kernel_has_not_ended(notebook: Callable[..., Any]) -> None:
    book = notebook(SET_UP, "view", "import time\nfor _ in range(140): time.sleep(0.1)")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn")
    book.settle()
    book.start(2)
    # A request whose answer may come only after the cell.
    book.page.locator(".memexplore-timeline").press("ArrowRight")
    book.wait(2)
    book.settle()
    assert not book.page.evaluate(GONE)


def test_kernel_that_lost_the_widget_is_noticed_without_an_event(shown: Any) -> None:
    # The page gets no event: the kernel answers no message about this widget any more.
    shown.page.evaluate(
        f"""async () => {{ {shown.CURRENT} const kernel = panel.sessionContext.session.kernel;
            await kernel.requestExecute({{ code: "view.comm.on_msg(lambda message: None)" }}).done }}"""
    )
    shown.page.locator(".memexplore-timeline").press("ArrowRight")
    # 3 s until the ping, 8 s until the page gives up; both again where the kernel is busy at that moment.
    shown.page.wait_for_function(GONE, timeout=60_000)


def test_reloaded_after_a_restart_shows_the_still_picture(shown: Any) -> None:
    shown.save()
    restart(shown)
    shown.page.wait_for_function(GONE)
    shown.open()
    shown.page.wait_for_selector("img[class^=memexplore-picture]", state="visible")
    assert shown.page.get_by_text("Error displaying widget").filter(visible=True).count() == 0
