"""What lowers a category of memory, from what the run does already."""

from __future__ import annotations

import pytest

from memexplore.analysis.levers import lever
from memexplore.tape import Action, Category, Meta, Phase, Source, Tape


def tape_of(dtype: str, phase: Phase = Phase.FORWARD, category: Category = Category.ACTIVATION) -> Tape:
    """Return a tape with 900 bytes of `dtype` and 100 of float32, both alive at the end, the latter of `phase`."""
    return Tape.from_columns(
        {
            "address": [0, 1024],
            "size": [900, 100],
            "category": [category] * 2,
            "phase": [Phase.FORWARD, phase],
            "tensor": [0, 1],
        },
        meta=Meta(Source.PREDICTED, "Tesla T4"),
        tensor_texts=[f"{dtype}[9]", "float32[25]"],
    )


@pytest.mark.parametrize(
    ("tape", "text"),
    [
        (tape_of("float32"), "checkpointing or mixed precision"),
        (tape_of("bfloat16"), "checkpointing"),
        # activations of the backward pass are those that a checkpoint recomputes
        (tape_of("float32", Phase.BACKWARD), "mixed precision"),
        (tape_of("float16", Phase.BACKWARD), "a smaller batch or micro-batches"),
    ],
)
def test_activations_are_lowered_by_what_is_not_in_use(tape: Tape, text: str) -> None:
    assert lever(tape, Category.ACTIVATION) == text


def test_activations_that_the_backward_pass_frees_are_not_recomputed() -> None:
    tape = Tape.from_columns(
        {
            "action": [Action.ALLOC, Action.ALLOC, Action.FREE_REQUESTED],
            "address": [0, 1024, 0],
            "size": [500, 500, 500],
            "category": [Category.ACTIVATION] * 3,
            "phase": [Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD],
        },
        meta=Meta(Source.PREDICTED, "Tesla T4"),
    )
    assert lever(tape, Category.ACTIVATION) == "checkpointing or mixed precision"


def test_weights_in_16_bits_have_no_lever() -> None:
    assert lever(tape_of("bfloat16", category=Category.PARAMETER), Category.PARAMETER) == ""
    assert lever(tape_of("float32", category=Category.PARAMETER), Category.PARAMETER) == "weights in 16 bits"
