"""A small step in an explorer, the requests of a person at its page, and an event loop that a test drives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memexplore.jupyter.explorer import Explorer
from memexplore.run.programs.step import Step

BATCH = 64
_numbers = itertools.count(1)


def step(batch: int = BATCH) -> Step:
    """A step that runs in milliseconds."""
    block = [layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*(nn.Sequential(*block) for _ in range(2)), nn.Linear(64, 10))
    inputs = torch.zeros(batch, 64), torch.zeros(batch, dtype=torch.long)
    return Step(model, inputs, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD)


def row(explorer: Explorer, name: str) -> dict[str, Any]:
    """A knob as the page gets it."""
    (found,) = (row for row in explorer.message()["knobs"] if row["field"] == name)
    return found


def position(explorer: Explorer, name: str) -> str:
    """The label of a knob's position."""
    knob = row(explorer, name)
    return knob["options"][knob["index"]]


def send(explorer: Explorer, kind: str, **fields: Any) -> None:
    """Send a request as the page does."""
    explorer.view._handle_custom_msg({"type": kind, "number": next(_numbers), "view": "page", **fields}, [])


def turn(explorer: Explorer, name: str, label: str, drag: str = "") -> None:
    """Turn a knob to the position with a label; type a text."""
    knob = row(explorer, name)
    if knob["kind"] == "text":
        send(explorer, "knob", field=name, value=label, drag=drag)
    else:
        send(explorer, "knob", field=name, index=knob["options"].index(label), drag=drag)


def sentence(explorer: Explorer) -> str:
    """The sentence about the setting shown."""
    return explorer._sentence()


class Loop:
    """An event loop that runs its callbacks on request."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Any]] = []
        self.later: list[tuple[float, Callable[[], Any]]] = []

    def add_callback(self, action: Callable[[], Any]) -> None:
        self.waiting.append(action)

    def call_later(self, seconds: float, action: Callable[[], Any]) -> None:
        self.later.append((seconds, action))

    def run(self) -> None:
        while self.waiting:
            self.waiting.pop(0)()

    def pass_time(self, seconds: float) -> None:
        """Run the callbacks that are due some seconds after they were scheduled."""
        self.run()
        due = [action for after, action in self.later if after <= seconds]
        self.later = [(after, action) for after, action in self.later if after > seconds]
        for action in due:
            action()
        self.run()
