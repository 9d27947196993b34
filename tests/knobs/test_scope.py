"""Reach of `apply`: other models, the loss, other threads and the backward pass of other models are unaffected."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint

from memexplore.run.knobs.applying import scope
from memexplore.run.knobs.applying.apply import apply
from memexplore.run.knobs.knobs import Knobs

AUTOCAST = torch.amp.autocast_mode.autocast


class Net(nn.Module):
    """Two layers in a checkpoint of its own, which counts its runs, under an autocast of its own."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.reentrant, self.runs = reentrant, 0
        self.dtypes: list[torch.dtype] = []

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.layers[0](x)
            # The recomputation ends early, as soon as it has the tensors that the second layer saves.
            self.dtypes.append(hidden.dtype)
            return self.layers[1](hidden).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def inputs() -> torch.Tensor:
    return torch.ones(2, 4, requires_grad=True)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("teacher_first", [False, True])
@pytest.mark.parametrize("setting", ["none", "every 1", "sqrt", "norms"])
def test_checkpoints_of_a_teacher_stay(setting: str, teacher_first: bool, reentrant: bool) -> None:
    student, teacher = Net(reentrant=reentrant), Net(reentrant=reentrant)
    with apply(Knobs(checkpoint=setting), student):
        first, second = (teacher, student) if teacher_first else (student, teacher)
        (first(inputs()) - second(inputs())).sum().backward()
    # The knob switched the student's checkpoint off; the teacher's ran in forward and again in backward.
    assert (student.runs, teacher.runs) == (1, 2)


@pytest.mark.parametrize("precision", ["off", "all bf16"])
def test_autocast_of_a_teacher_stays_in_its_backward_too(precision: str) -> None:
    student, teacher = Net(), Net()
    with apply(Knobs(precision=precision), student):
        (student(inputs()) - teacher(inputs())).sum().backward()
    plain = torch.float32 if precision == "off" else torch.bfloat16
    # Each ran in forward and again in the recomputation of its own checkpoint, which carries the scope.
    assert student.dtypes == [plain, plain]
    assert teacher.dtypes == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("reentrant", [False, True])
def test_autocast_is_off_in_the_recomputation_of_the_models_own_checkpoint(reentrant: bool) -> None:
    model = Net(reentrant=reentrant)
    with apply(Knobs(precision="off"), model):
        model(inputs()).sum().backward()
    assert model.dtypes == [torch.float32, torch.float32]


def test_autocast_of_the_caller_and_of_the_loss_is_kept() -> None:
    model, loss = nn.Linear(4, 4), nn.Linear(4, 4)
    with apply(Knobs(precision="off"), model), torch.autocast("cpu", dtype=torch.bfloat16):
        result = model(inputs())
        assert (result.dtype, loss(result).dtype) == (torch.float32, torch.bfloat16)


def test_two_models_of_a_gan_keep_their_own_settings() -> None:
    generator, critic = Net(), Net()
    with apply(Knobs(checkpoint="none"), generator), apply(Knobs(precision="off"), critic):
        critic(generator(inputs())).sum().backward()
    assert (generator.runs, critic.runs) == (1, 2)
    assert generator.dtypes == [torch.bfloat16]
    assert critic.dtypes == [torch.float32, torch.float32]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_models_may_be_left_in_any_order(order: tuple[int, int]) -> None:
    before = AUTOCAST.__enter__, dict(vars(torch.utils.checkpoint))
    models = [Net(), Net()]
    blocks = [apply(Knobs(precision="off", checkpoint="none"), model) for model in models]
    for block in blocks:
        block.__enter__()
    blocks[order[0]].__exit__(None, None, None)
    still, done = models[order[1]], models[order[0]]
    (still(inputs()) + done(inputs())).sum().backward()
    assert (still.runs, done.runs) == (1, 2)
    assert (still.dtypes[0], done.dtypes[0]) == (torch.float32, torch.bfloat16)
    blocks[order[1]].__exit__(None, None, None)
    assert (AUTOCAST.__enter__, dict(vars(torch.utils.checkpoint))) == before


def test_another_thread_is_unaffected_while_the_forward_runs() -> None:
    other = Net()

    class Waiting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=lambda: other(inputs()).sum().backward())
            thread.start()
            thread.join()
            return self.net(x)

    model = Waiting()
    with apply(Knobs(precision="off", checkpoint="none"), model):
        model(inputs()).sum().backward()
    assert (model.net.runs, model.net.dtypes) == (1, [torch.float32])
    assert (other.runs, other.dtypes) == (2, [torch.bfloat16, torch.bfloat16])


def test_a_shared_module_follows_the_model_that_calls_it() -> None:
    shared = Net()
    one, other = nn.Sequential(shared), nn.Sequential(shared)
    with apply(Knobs(precision="off"), one):
        one(inputs())
        other(inputs())
    assert shared.dtypes == [torch.float32, torch.bfloat16]


def test_saved_tensors_of_another_model_pass_no_hooks() -> None:
    model, other = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()), nn.Linear(4, 1)

    def loss(weight: Any) -> torch.Tensor:
        return torch.func.functional_call(other, {"weight": weight}, (torch.ones(2, 4),)).square().sum()

    with apply(Knobs(checkpoint="norms"), model):
        model(inputs())
        # Under saved-tensor hooks torch.func raises.
        assert torch.func.grad(loss)(other.weight.detach()).shape == (1, 4)


def test_a_scope_that_an_interrupt_left_open_ends_with_the_block() -> None:
    model, other = Net(), Net()
    with apply(Knobs(precision="off"), model):
        # As an interrupt between the lines of `inside` does: the thread stays in the scope.
        entered: list[Any] = []
        model.layers[0].register_forward_pre_hook(lambda *_: entered.append(scope.scopes()))
        model(inputs())
        scope._thread.scopes = entered[0]
    try:
        other(inputs())
    finally:
        scope._thread.scopes = ()
    assert other.dtypes == [torch.bfloat16]
