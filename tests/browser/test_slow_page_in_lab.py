"""A page so slow that anywidget gives up its wait for the model of a view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.test_view_in_lab import CURSOR, SET_UP, click_timeline

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("own_page")]

# anywidget 0.11 waits for 2 s. Its model gets no message from then on.
IMPATIENT = "() => { const { timeout } = AbortSignal; AbortSignal.timeout = () => timeout.call(AbortSignal, 0) }"


def test_a_view_whose_model_took_long_gets_its_messages(notebook: Callable[..., Any]) -> None:
    book = notebook(SET_UP, "view", "view.cursor = 1000")
    late: list[str] = []
    book.page.on("pageerror", lambda error: late.append(str(error)))
    book.page.evaluate(IMPATIENT)
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    assert "[anywidget] Failed to initialize model." in late
    book.run(2)
    book.page.wait_for_function(CURSOR, arg=1000)
    row = click_timeline(book, 3000)
    book.page.wait_for_function(CURSOR, arg=row)
