"""Optimizers of a user's class that are made again for other weights."""

from __future__ import annotations

import pytest
import torch

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.optimizers import make


class Decay:
    """Settings of the weight decay, as labml's optimizers take them."""

    def __init__(self, rate):
        self.rate = rate


class WithObject(torch.optim.Optimizer):
    """Its argument `weight_decay` is an object, and the setting of that name a number."""

    def __init__(self, parameters, lr=0.1, weight_decay=Decay(0.0)):  # noqa: B008
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay.rate})
        self.decay = weight_decay

    @torch.no_grad()
    def step(self, closure=None):
        """Subtract the gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["steps"] = self.state[weight].get("steps", 0) + 1
                weight.sub_(weight.grad, alpha=group["lr"])


class Sharpness(torch.optim.Optimizer):
    """A wrapper that makes its inner optimizer, as implementations of SAM do."""

    def __init__(self, parameters, base, rho=0.05, **settings):
        super().__init__(parameters, {"rho": rho, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        """Let the inner optimizer update."""
        self.base.step()


def weights(count):
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_an_optimizer_whose_constructor_does_not_take_its_settings_is_copied():
    before, after = weights(2), weights(2)
    written = WithObject([{"params": before[:1], "lr": 0.5}, {"params": before[1:]}], weight_decay=Decay(0.25))
    for weight in before:
        weight.grad = torch.ones(2)
    written.step()
    made = make(written, Knobs(), after, {id(old): new for old, new in zip(before, after, strict=True)})
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.1]
    assert [group["params"][0] is weight for group, weight in zip(made.param_groups, after, strict=True)] == [True] * 2
    assert (made.decay.rate, made.defaults["weight_decay"], len(made.state)) == (0.25, 0.25, 0)
    for weight in after:
        weight.grad = torch.ones(2)
    made.step()
    # The first optimizer has subtracted 0.5 from its own first weight: 1 - 0.5 in both.
    assert (after[0].tolist(), before[0].tolist(), len(written.state)) == ([0.5, 0.5], [0.5, 0.5], 2)


def test_a_wrapper_is_copied_with_the_optimizer_inside_it():
    before, after = weights(1), weights(1)
    written = Sharpness(before, torch.optim.SGD, lr=0.5, momentum=0.9)
    before[0].grad = torch.ones(2)
    written.step()
    made = make(written, Knobs(), after, {id(before[0]): after[0]})
    assert made.base is not written.base
    assert made.base.param_groups is made.param_groups
    after[0].grad = torch.ones(2)
    made.step()
    assert after[0].tolist() == [0.5, 0.5]
    assert list(made.base.state) == after
    assert list(written.base.state) == before


class WithFlag(torch.optim.SGD):
    """Keeps an argument as an attribute."""

    def __init__(self, parameters, lr=0.1, averages=False):
        super().__init__(parameters, lr=lr)
        self.averages = averages


def test_arguments_that_are_attributes_only_are_given_again():
    made = make(WithFlag(weights(1), averages=True), Knobs(), weights(1))
    assert made.averages is True


class Unique(Sharpness):
    """An optimizer that cannot be copied either."""

    def __deepcopy__(self, memo):
        raise NotImplementedError

    def __setstate__(self, state):
        raise NotImplementedError


def test_an_optimizer_that_can_be_neither_made_nor_copied_is_one_sentence():
    written = Unique(weights(1), torch.optim.SGD, lr=0.5)
    message = r"TypeError in the constructor of Unique: .*give optimizer= as a function, such as lambda parameters: "
    with pytest.raises(TypeError, match=message):
        make(written, Knobs(), weights(1))
