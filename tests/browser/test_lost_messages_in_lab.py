"""Requests of the page that never reach the kernel: they are sent again, and what is drawn is what was clicked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.test_view_in_lab import click_timeline, unfold

pytestmark = pytest.mark.browser

LOSSY = """import memexplore as mx
from memexplore.jupyter.view import View
from tests.sample_tapes import training_tape
answer, lost, received = View._answer, [], []
def lossy(view, widget, request, buffers):
    kind = request["type"]
    received.append(kind)
    if kind in ("everything", "drawn", "cursor", "timeline", "select") and kind not in lost:
        lost.append(kind)  # the first of each kind
    else:
        answer(view, widget, request, buffers)
View._answer = lossy
view = mx.view(training_tape(steps=16))"""
WHOLE = """import memexplore as mx
from memexplore.jupyter.view import View
from tests.sample_tapes import training_tape
answer, received = View._answer, []
def counting(view, widget, request, buffers):
    received.append(request["type"])
    answer(view, widget, request, buffers)
View._answer = counting
view = mx.view(training_tape(steps=16))"""


def test_lost_requests_are_sent_again(notebook: Callable[..., Any]) -> None:
    book = notebook(LOSSY, "view", "print(view.cursor, view.selection, sorted(lost))")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    unfold(book)  # a request for the timeline
    row = click_timeline(book, 1000)
    book.settle()
    assert book.page.locator(".memexplore-timeline").get_attribute("data-row") == str(row)
    layer = book.page.locator(".memexplore-layer").first
    layer.click()
    book.settle()
    book.run(2)
    cursor, selection, *lost = book.text(2).split(maxsplit=2)
    assert (int(cursor), selection != "None") == (row, True)
    assert lost == ["['cursor', 'drawn', 'everything', 'select', 'timeline']\n"]


def test_nothing_is_sent_twice_when_nothing_is_lost(notebook: Callable[..., Any]) -> None:
    book = notebook(WHOLE, "view", "print(received)")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    click_timeline(book, 300)
    book.settle()
    book.page.wait_for_timeout(2000)  # two clicks that the page handles within 600 ms are a double click
    click_timeline(book, 300)  # where the cursor is already
    book.settle()
    book.page.locator(".memexplore-layer").first.click()
    book.settle()
    book.page.wait_for_timeout(5000)  # three times as long as the page waits for a reply
    book.run(2)
    seen = book.text(2)
    assert [seen.count(f"'{kind}'") for kind in ("everything", "drawn", "cursor", "select")] == [1, 1, 2, 1]
