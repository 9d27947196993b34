"""Pictures drawn before their run, in a real JupyterLab: the page says that they are no results yet."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from memexplore.run.knobs.knobs import Knobs
from tests.browser.explored import SET_UP, knob, wait_for
from tests.browser.waiting import expect

pytestmark = pytest.mark.browser


def waiting_run(released: pathlib.Path) -> str:
    """A cell after which a run of the explorer ends when a file exists, and begins with a knob only."""
    return f"""import os, time
type(explorer)._prefetch = lambda *_: None
explorer.knobs = mx.Knobs(batch=128)
run = explorer._run_step
def waiting(knobs):
    while not os.path.exists({str(released)!r}):
        time.sleep(0.05)
    return run(knobs)
explorer._run_step = waiting"""


def test_an_expected_picture_is_pale_until_its_run_has_ended(
    notebook: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    released = tmp_path / "released"
    book = notebook(SET_UP, "explorer", waiting_run(released))
    book.run_all()
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    # of the step as written, 64, and of 128
    wait_for(book, Knobs(batch=128))
    book.settle()
    page = book.page
    verdict, running = page.locator(".memexplore-verdict-text"), page.locator(".memexplore-running")
    against = page.locator(".memexplore-against")
    expect(against).to_be_visible()
    knob(book, "Batch").press("ArrowRight")
    wait_for(book, Knobs(batch=256))
    expect(verdict).to_have_css("opacity", "0.55")
    # it is that of the setting before
    expect(against).to_be_hidden()
    expect(running).to_be_visible()
    expect(running).to_have_text("Expected. Running Batch 64 → 256…")
    page.screenshot(path=tmp_path / "expected.png")
    released.touch()
    book.settle()
    wait_for(book, Knobs(batch=256))
    expect(verdict).to_have_css("opacity", "1")
    expect(against).to_be_visible()
    expect(running).to_be_hidden()
