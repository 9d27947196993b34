"""Settings that were on the screen: drawn at once when they are chosen again, and replaced by what the kernel sends."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from memexplore.run.knobs.knobs import Knobs
from tests.browser.explored import DRAWN, SET_UP, choose, expected, wait_for

pytestmark = pytest.mark.browser

OTHER = "explorer._results[mx.Knobs(precision='bf16')] = explorer._results[mx.Knobs(precision='fp16')]"
HALF = Knobs(precision="bf16")


def seen(notebook: Callable[..., Any], *cells: str) -> Any:
    """An explorer whose bf16 setting was on the screen, and which shows the step in fp16."""
    book = notebook(SET_UP, "explorer", *cells)
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    for option, knobs in (("bf16", HALF), ("fp16", Knobs(precision="fp16"))):
        choose(book, "Precision", option)
        wait_for(book, knobs)
        book.settle()
    return book


def test_a_seen_setting_is_drawn_while_a_cell_runs(notebook: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    done = tmp_path / "done"
    book = seen(notebook, f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.05)")
    book.start(2)
    choose(book, "Precision", "bf16")
    wanted = expected(HALF)
    book.page.wait_for_function(f"wanted => ({DRAWN})().peak === wanted.peak", arg=wanted)
    assert book.state(2) == "running"
    assert book.page.locator(".memexplore").first.get_attribute("aria-busy") == "true"
    done.touch()
    book.wait(2)
    book.settle()
    assert book.page.evaluate(DRAWN) == wanted


def test_what_the_kernel_sends_replaces_a_seen_picture(notebook: Callable[..., Any]) -> None:
    book = seen(notebook, OTHER)
    book.run(2)
    choose(book, "Precision", "bf16")
    book.settle()
    assert book.page.evaluate(DRAWN)["peak"] == expected(Knobs(precision="fp16"))["peak"]


def test_only_the_last_of_several_seen_settings_stays(notebook: Callable[..., Any]) -> None:
    book = seen(notebook)
    for option in ("bf16", "fp16", "bf16"):
        choose(book, "Precision", option)
    wait_for(book, HALF)
    book.settle()
    assert book.page.evaluate(DRAWN) == expected(HALF)
