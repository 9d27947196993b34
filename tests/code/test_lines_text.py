"""The text of the lines of plain PyTorch: names, comments and refusals."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import nn

from memexplore.run.code.lines import lines
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.step import Step
from tests.code.test_lines import CHECKPOINTS, LOOP, STEPS, executed
from tests.programs.test_training_loop import SGD, trained
from tests.small_nets import SHAPES, Deep, flat, images, step_of


def test_knobs_as_written_have_no_lines() -> None:
    assert lines(step_of(flat), Knobs()) == ""


@pytest.mark.parametrize(
    "knobs", [*LOOP, *(Knobs(checkpoint=text) for text in CHECKPOINTS), Knobs(lora="a.b"), Knobs(inplace="on")], ids=str
)
def test_the_lines_without_a_step_are_python(knobs: Knobs) -> None:
    ast.parse(lines(None, knobs))


def test_lines_outside_of_the_model_and_the_loop() -> None:
    knobs = Knobs(gpu="T4", settings="expandable_segments:True", variables={"width": 64}, input_size=32)
    assert lines(None, knobs).splitlines() == [
        "import os",
        "# On a Tesla T4.",
        'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # before the first use of the GPU',
        "width = 64",
        "# Where the data is loaded: images or sequences of size 32.",
    ]


def test_segments_of_blocks_that_the_model_calls() -> None:
    # √5 is about 2: blocks 0 to 2 and 3 to 4.
    text = lines(step_of(Deep), Knobs(checkpoint="sqrt"))
    assert text.splitlines()[-7:-4] == [
        "    ['blocks.0', 'blocks.1', 'blocks.2'],",
        "    ['blocks.3', 'blocks.4'],",
        "]",
    ]


def bags(batch: Any, samples: int) -> Any:
    """Return bags of three entries each, and the index at which each begins."""
    return torch.arange(3 * samples) % 9, torch.arange(0, 3 * samples, 3)


def bag_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch).square().mean()


def test_micro_batches_are_loaded_where_a_batch_cannot_be_cut() -> None:
    torch.manual_seed(0)
    step = Step(nn.EmbeddingBag(9, 2), bags(None, 8), compute_loss=bag_loss, optimizer=SGD, samples=8, resize=bags)
    text = lines(step, Knobs(accumulation=2))
    assert "for number, (inputs, targets) in enumerate(batches, 1):" in text
    start = {name: value.clone() for name, value in step.model.state_dict().items()}
    result = executed(text, step, [bags(None, 4)] * 2 * STEPS, SGD)
    step.model.load_state_dict(start)
    torch.testing.assert_close(result, trained(step, Knobs(accumulation=2), STEPS), rtol=1e-6, atol=1e-7)


def test_adapters_need_an_optimizer_made_after_them() -> None:
    text = lines(step_of(Deep, SGD), Knobs(lora="head", lora_rank=2))
    *_, put_on, optimizer = text.splitlines()
    assert "Adapted(" in put_on
    assert optimizer == "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"


def overwriting() -> nn.Module:
    """Return a network whose convolutions are followed by in-place activations."""
    return nn.Sequential(
        *(layer for inputs in (3, 4) for layer in (nn.Conv2d(inputs, 4, 3, padding=1), nn.ReLU(inplace=True))),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


SHAPES[overwriting] = SHAPES[images]


def test_kept_results_of_matrix_products_are_not_overwritten() -> None:
    step = step_of(overwriting, SGD)
    text = lines(step, Knobs(checkpoint="keep matmuls"))
    assert "for name in ['1', '3']:" in text
    result = executed(text, step, [step.batch] * STEPS, SGD)
    torch.testing.assert_close(result, trained(step_of(overwriting, SGD), Knobs(), STEPS), rtol=1e-10, atol=1e-12)


def test_knobs_that_contradict_each_other_have_no_lines() -> None:
    with pytest.raises(ValueError, match="in backward"):
        lines(None, Knobs(update="in backward", accumulation=2))


def test_an_unknown_layer_has_no_lines() -> None:
    with pytest.raises(ValueError, match="close: 'head'"):
        lines(step_of(Deep), Knobs(frozen="heads"))
