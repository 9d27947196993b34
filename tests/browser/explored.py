"""A small step in an explorer: its controls in the browser, and the expected figures in the browser."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from memexplore.knobs.knobs import Knobs
from memexplore.steps import sentences
from memexplore.steps.outcome import Outcome, run_outcome
from memexplore.steps.step import Step
from memexplore.steps.trial import Trial

SET_UP = """import memexplore as mx
from memexplore.notebook.explore import explore
from tests.browser.explored import small_step
explorer = explore(small_step())"""
HEAD = "document.querySelector('.memexplore-headline')"
GRAPH = "document.querySelector('.memexplore-timeline')"
DRAWN = f"""() => {{ const bytes = name => {GRAPH}.figure.data.find(trace => trace.name === name)?.y ?? [];
    const highest = name => Math.max(0, ...bytes(name));
    return {{ sentence: {HEAD}.textContent.trim(), peak: highest('peak'), before: highest('before') }} }}"""


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
def ran(knobs: Knobs) -> tuple[Trial, Outcome]:
    return run_outcome(small_step(), knobs)


def expected(knobs: Knobs, before: Knobs) -> dict[str, Any]:
    """Return the expected figures after one setting and then another, computed without a notebook."""
    (first, first_numbers), (second, second_numbers) = ran(before), ran(knobs)
    sentence = sentences.sentence(first, second, whole=(first_numbers, second_numbers))
    return {"sentence": sentence, "peak": second_numbers.peak_allocated, "before": first_numbers.peak_allocated}


def wait_for(book: Any, knobs: Knobs, before: Knobs | None = None) -> None:
    """Wait until the sentence, the figure and its outline are those of the setting."""
    from playwright.sync_api import TimeoutError as NotYet

    wanted = expected(knobs, before or Knobs())
    same = "Object.keys(wanted).every(key => drawn[key] === wanted[key])"
    try:
        book.page.wait_for_function(f"wanted => {{ const drawn = ({DRAWN})(); return {same} }}", arg=wanted)
    except NotYet:
        assert book.page.evaluate(DRAWN) == wanted


def reset(book: Any) -> None:
    """Reset the explorer to the step as written."""
    book.run(2)
    book.page.wait_for_function(f"peak => ({DRAWN})().peak === peak", arg=ran(Knobs())[1].peak_allocated)
    book.settle()


def knob(book: Any, label: str, part: str) -> Any:
    """Return a part of the control with a label."""
    widget = book.page.locator(".memexplore-group .widget-inline-hbox")
    own = book.page.locator(f"xpath=./label[normalize-space(.)='{label}']")
    return widget.filter(has=own).locator(part)
