"""What can be set for a selected row of layers."""

from __future__ import annotations

import torch
from torch import nn

from memexplore.jupyter.explorer_message import toggled
from memexplore.jupyter.layers import Layers
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.run.programs.step import Step
from memexplore.tape import Tape
from tests.sample_tapes import CPU

MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(11)))
STEP = Step(MODEL, torch.zeros(2, 4), loss=torch.mean)
LAYERS = Layers.of(STEP, Tape.from_columns({}, meta=CPU), {})


def test_row_of_several_layers_stands_for_each_of_them() -> None:
    state = LAYERS.state("9–10.0")
    assert state.layers == ("9.0", "10.0")
    assert not any(state.reasons.values())


def test_row_without_weights_cannot_be_frozen() -> None:
    assert LAYERS.state("0–10.1").reasons["frozen"] == "This layer has no weights"


def test_action_adds_what_is_missing_and_then_removes_all() -> None:
    layers = LAYERS.state("0–2").layers
    (frozen,) = KNOBS["frozen"].controls(Explored())
    text = toggled(frozen, Knobs(frozen=["1"]), layers)
    assert text == "1 0 2"
    assert toggled(frozen, Knobs(frozen=text.split()), layers) == ""


def test_memory_in_no_layer_has_no_actions() -> None:
    assert LAYERS.state("(no layer)").name is None
