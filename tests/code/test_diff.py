"""Knobs as a diff: without the removed lines it is the changed script."""

from __future__ import annotations

import pytest
import torch

from memexplore.run.code.diff import code, diff
from memexplore.run.code.lines import lines
from memexplore.run.code.own_code import OwnCode
from memexplore.run.knobs.knobs import Knobs
from tests.code.test_lines import CHECKPOINTS, LOOP
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


OWN = """opt = torch.optim.SGD(net.parameters())
for epoch in range(9):
    print(epoch)
    print("another")
    for x, y in loader:
        opt.zero_grad()
        cost = criterion(net(x), y)
        cost.backward()
        opt.step()"""


def test_diff_of_own_code_has_its_lines_and_their_place() -> None:
    found = code(None, Knobs(update="fused", precision="bf16"), OwnCode(OWN, {"torch": torch}, "Cell In[3]"))
    assert found.diff.split("\n") == [
        "@ Cell In[3], line 1",
        "- opt = torch.optim.SGD(net.parameters())",
        "+ opt = torch.optim.SGD(net.parameters(), fused=True)",
        "  for epoch in range(9):",
        "      print(epoch)",
        '      print("another")',
        "      for x, y in loader:",
        "          opt.zero_grad()",
        "-         cost = criterion(net(x), y)",
        '+         with torch.autocast("cuda", dtype=torch.bfloat16):',
        "+             cost = criterion(net(x), y)",
        "          cost.backward()",
        "          opt.step()",
    ]
    assert [line[2:] for line in found.diff.split("\n") if line[0] not in "-@"] == found.text.split("\n")


def test_general_lines_say_why_they_are_general() -> None:
    knobs = Knobs(update="in backward")
    first, *others = code(None, knobs, OwnCode(OWN)).text.split("\n")
    assert first == (
        "# With general names, as it is not clear what to change in the code: an update in the backward pass replaces "
        "the optimizer's step."
    )
    assert others == lines(None, knobs).strip("\n").split("\n")
    assert code(None, Knobs(precision="bf16")).text.startswith(
        "# With general names, as no source with a training loop"
    )
