"""Knobs as a diff: without the removed lines it is the changed script."""

from __future__ import annotations

import pytest

from memexplore.codegen.diff import diff
from memexplore.codegen.lines import lines
from memexplore.knobs.knobs import Knobs
from tests.codegen.test_lines import CHECKPOINTS, LOOP
from tests.small_nets import flat, step_of

SETTINGS = [*LOOP, *(Knobs(checkpoint=text) for text in CHECKPOINTS), Knobs(batch=2, precision="fp16")]


@pytest.mark.parametrize("knobs", SETTINGS, ids=str)
def test_kept_and_added_lines_are_the_lines_of_the_knobs(knobs: Knobs) -> None:
    after = [line[2:] for line in diff(step_of(flat), knobs).split("\n") if line[:1] != "-"]
    assert after == lines(step_of(flat), knobs).strip("\n").split("\n")


def test_a_changed_loop_removes_what_it_replaces() -> None:
    removed = [line[2:].strip() for line in diff(None, Knobs(precision="fp16")).split("\n") if line[:1] == "-"]
    # fp16 scales the loss: the plain backward pass and update are replaced.
    assert removed == ["loss = loss_function(model(inputs), targets)", "loss.backward()", "optimizer.step()"]


def test_a_new_batch_replaces_the_batch_of_the_step() -> None:
    step = step_of(flat)
    assert f"- batches = torch.utils.data.DataLoader(dataset, batch_size={step.batch_size})" in diff(
        step, Knobs(batch=1)
    )


def test_lines_beside_the_loop_are_only_added() -> None:
    assert all(line[:1] != "-" for line in diff(None, Knobs(settings="expandable_segments:True")).split("\n"))


def test_knobs_as_written_have_no_diff() -> None:
    assert diff(None, Knobs()) == ""
