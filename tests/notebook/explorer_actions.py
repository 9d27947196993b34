"""A small step in an explorer, and the actions of a person on its controls."""

from __future__ import annotations

import html
import re
from typing import Any

import torch
from torch import nn

from memexplore.notebook.controls import Control
from memexplore.notebook.explorer import Explorer
from memexplore.steps.step import Step

BATCH = 64


def step(batch: int = BATCH) -> Step:
    """A step that runs in milliseconds."""
    block = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*(nn.Sequential(*block) for _ in range(2)), nn.Linear(64, 10))
    inputs = torch.zeros(batch, 64), torch.zeros(batch, dtype=torch.long)
    return Step(model, inputs, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD)


def control(explorer: Explorer, field: str, number: int = 0) -> Control:
    """One of the controls of a field of the knobs."""
    return [control for control in explorer._controls if control.field == field][number]


def turn(explorer: Explorer, field: str, value: Any, number: int = 0) -> None:
    """Set a control as the browser does."""
    widget = control(explorer, field, number).widget
    if hasattr(widget, "index"):
        values = [getattr(option, "value", option) for _, option in widget.options]
        widget.set_state({"index": values.index(value)})
    else:
        widget.set_state({"value": value})


def headline(explorer: Explorer) -> str:
    """The text of the headline."""
    return html.unescape(re.sub(r"<[^>]*>", " ", explorer._headline.value)).strip()
