"""Losses that one backward pass sums: how many have graphs of their own, and what to change where that takes memory."""

from __future__ import annotations

import time

import torch

from memexplore.out_of_memory.held_types import WhyHeld
from memexplore.out_of_memory.joint_losses import separate_losses
from tests.out_of_memory.cells import post_mortem, run
from tests.out_of_memory.test_fifteen_ways import MLP

SUMMED = (
    MLP
    + """
model, total = mlp(), 0
for _ in range(3):
    loss = model(torch.randn(8192, 1024, device="cuda")).square().mean()
    total = total + loss  # kept
    del loss
total.backward()
"""
)
EACH = SUMMED.replace("total = total + loss  # kept", "loss.backward()").replace("total.backward()", "")
TEXT = "Call backward on each loss"


def count(root: torch.Tensor) -> int:
    return separate_losses(root, time.thread_time() + 10)


def loss(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 4)).square().sum()


def test_each_call_of_a_model_has_a_graph_of_its_own() -> None:
    model = torch.nn.Linear(4, 4)
    assert count(loss(model)) == 1
    assert count(loss(model) + loss(model) / 2 - loss(model)) == 3


def test_losses_of_one_output_are_one_graph() -> None:
    output = torch.nn.Linear(4, 4)(torch.ones(2, 4))
    assert count(output.sum() + output.square().sum()) == 1


def test_a_product_of_losses_is_one_graph() -> None:
    model = torch.nn.Linear(4, 4)
    assert count(loss(model) * loss(model)) == 1


def test_a_loss_that_joins_two_others_makes_them_one_graph() -> None:
    model = torch.nn.Linear(4, 4)
    first, second = model(torch.ones(2, 4)), model(torch.ones(2, 4))
    assert count(first.sum() + second.sum()) == 2
    assert count(first.sum() + second.sum() + (first - second).sum()) == 1


def test_a_failed_backward_pass_over_several_losses_is_split() -> None:
    found = post_mortem(SUMMED, "560MiB")
    assert found.request is not None
    assert found.request.phase == "backward"
    assert TEXT in found.suggestions[0].text
    assert run(EACH, "560MiB")[1] is None


def test_a_penalty_of_the_weights_is_no_loss_to_split() -> None:
    penalised = SUMMED.replace("range(3)", "range(1)").replace(
        "total.backward()", "(total + sum(weight.square().sum() for weight in model.parameters())).backward()"
    )
    found = post_mortem(penalised, "250MiB")
    assert found.request is not None
    assert found.request.phase == "backward", found.text
    assert all(TEXT not in each.text for each in found.suggestions)


ONE_STATEMENT = f"""{MLP}
model = nn.Sequential(mlp(), mlp())
first, second = (torch.randn(8192, 1024, device="cuda") for _ in range(2))
total = model(first).square().mean() + 2 * model(second).mean()
total.backward()
"""


def test_a_forward_pass_that_adds_to_the_loss_before_it_in_one_statement_is_split() -> None:
    found = post_mortem(ONE_STATEMENT, "570MiB")
    assert found.request is not None
    assert found.request.phase == "forward"
    assert TEXT in found.suggestions[0].text, found.text
    split = ONE_STATEMENT.replace("total = ", "").replace(" + 2", ".backward(); total = 2")
    assert run(split, "570MiB")[1] is None


def test_a_sum_that_no_backward_pass_follows_is_not_split() -> None:
    found = post_mortem(ONE_STATEMENT.replace("total.backward()", ""), "570MiB")
    assert all(TEXT not in each.text for each in found.suggestions), found.text


def test_the_first_term_of_a_sum_has_no_loss_before_it() -> None:
    found = post_mortem(ONE_STATEMENT, "300MiB")
    assert all(TEXT not in each.text for each in found.suggestions), found.text


TWO_TASKS = f"""{MLP}
model = nn.Sequential(mlp(), mlp())
for _ in range(2):
    one = model(torch.randn(8192, 1024, device="cuda")).square().mean()
    # after one
    two = model(torch.randn(8192, 1024, device="cuda")).square().mean()
    (one + 0.5 * two).backward()
"""


def test_a_loss_that_waits_for_others_is_to_go_backward_alone() -> None:
    found = post_mortem(TWO_TASKS, "570MiB")
    assert [(group.what, group.holder) for group in found.held][:1] == [(WhyHeld.JOINT_LOSS, "one")], found.text
    assert found.suggestions[0].fits
    assert run(TWO_TASKS.replace("# after one", found.suggestions[0].code), "570MiB")[1] is None
