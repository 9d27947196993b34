"""A small step in an explorer: its controls in the browser, and the expected figures in the browser."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from memexplore.analysis.curves import curve
from memexplore.analysis.verdict_content import verdict_content
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.mode import Mode
from memexplore.run.programs.step import Step
from memexplore.run.run import Run, run

SET_UP = """import memexplore as mx
from memexplore.jupyter.explore import explore
from tests.browser.explored import small_step
explorer = explore(small_step())"""
AS_WRITTEN = Knobs()
HEAD = "document.querySelector('.memexplore-headline')"
GRAPH = "document.querySelector('.memexplore-timeline')"
DRAWN = f"""() => {{ const bytes = name => {GRAPH}.figure.data.find(trace => trace.name === name)?.y ?? [];
    const highest = name => Math.max(0, ...bytes(name));
    return {{ headline: {HEAD}.textContent.trim(), peak: highest('peak'), before: highest('before') }} }}"""


def small_step() -> Step:
    """A step of milliseconds, with images, so that every knob has an effect."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)) for _ in range(4)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    batch = torch.zeros(64, 3, 32, 32), torch.zeros(64, dtype=torch.long)
    return Step(model, batch, loss=nn.functional.cross_entropy, optimizer=torch.optim.AdamW)


@functools.cache
def ran(knobs: Knobs) -> Run:
    return run(small_step(), knobs)


def expected(knobs: Knobs, baseline: Knobs = AS_WRITTEN) -> dict[str, Any]:
    """Return the expected figures of a setting, with those of the baseline as outline, computed without a notebook."""
    result = ran(knobs)
    before = 0 if knobs == baseline else ran(baseline).outcome.peak_allocated
    if knobs.mode is Mode.INFERENCE:
        # The last step of inference has no place for the backward pass of the baseline, which has its peak there.
        tape = ran(baseline).tape
        before = int(curve(tape)[tape.step == 1].max())
    headline = verdict_content(result.tape).headline
    return {"headline": headline, "peak": result.outcome.peak_allocated, "before": before}


def wait_for(book: Any, knobs: Knobs, baseline: Knobs = AS_WRITTEN) -> None:
    """Wait until the headline, the figure and its outline are those of the setting."""
    from playwright.sync_api import TimeoutError as NotYet

    wanted = expected(knobs, baseline)
    same = "Object.keys(wanted).every(key => drawn[key] === wanted[key])"
    try:
        book.page.wait_for_function(f"wanted => {{ const drawn = ({DRAWN})(); return {same} }}", arg=wanted)
    except NotYet:
        assert book.page.evaluate(DRAWN) == wanted


def reset(book: Any) -> None:
    """Reset the explorer to the step as written."""
    book.run(2)
    wait_for(book, Knobs())
    book.settle()


def knob(book: Any, label: str) -> Any:
    """Return the control with a label; the other knobs are opened if it is among them."""
    control = book.page.get_by_label(label, exact=True)
    more = book.page.locator(".memexplore-more")
    if more.is_visible() and more.get_attribute("aria-expanded") == "false" and not control.is_visible():
        more.click()
    return control


def choose(book: Any, label: str, option: str) -> None:
    """Choose the option that begins with a text."""
    control = knob(book, label)
    texts = control.evaluate("select => [...select.options].map(option => option.text)")
    control.select_option(label=next(text for text in texts if text.startswith(option)))


def hold(book: Any, key: str, times: int) -> None:
    """Hold a key down: the browser sees repeated presses of one key."""
    for _ in range(times):
        book.page.keyboard.down(key)
    book.page.keyboard.up(key)
