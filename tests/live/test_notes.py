"""What a watched run says about steps and memory that it does not see."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

import memexplore as mx
from memexplore.live.notes import _MANY
from tests.live.training import Loop, network, on


def test_a_model_on_the_cpu_is_named_while_a_gpu_is_watched():
    with on("cuda"):
        loop = Loop("cpu")
        with mx.watch(loop.model, loop.optimizer) as live:
            assert live.notes == ()
            loop.step()
            assert live.notes == (
                "Nothing is allocated on the Tesla T4, because Sequential trains on the CPU: put it and its batches on "
                '"cuda", or watch the CPU (--gpu cpu).',
            )


def test_a_model_on_the_watched_device_needs_no_note():
    for device in ("cpu", "cuda"):
        with on(device):
            loop = Loop(device)
            with mx.watch(loop.model, loop.optimizer) as live:
                loop.step()
                assert live.notes == ()


def test_an_optimizer_that_is_not_watched_is_named_until_a_step_is():
    loop, other = Loop(), torch.optim.SGD(nn.Linear(2, 2).parameters())
    with mx.watch(loop.model, other) as live:
        for _ in range(_MANY):
            loop.step()
        assert live.notes == (
            f"An optimizer that is not watched (AdamW) has stepped {_MANY} times since the last watched step: watch it "
            "and the model that it updates.",
        )
        other.step()
        assert live.notes == ()


def test_a_loop_without_an_optimizer_says_what_ends_a_step():
    model = network()
    with mx.watch(model) as live:
        for _ in range(_MANY):
            assert live.notes == ()
            model(torch.ones(2, 64)).sum().backward()
        assert live.notes[0].startswith(
            f"The model was called {_MANY} times with gradients and no optimizer has stepped"
        )


def test_an_optimizer_in_place_of_the_named_one_ends_steps():
    loop = Loop()
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step()
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        gc.collect()  # an optimizer is part of a cycle
        loop.step()
        loop.step()
    assert live.steps()["step"].tolist() == [1, 2, 3]


def test_a_model_that_the_loop_replaces_is_not_kept_alive():
    loop = Loop()
    with mx.watch(loop.model, loop.optimizer):
        loop.step()
        model = weakref.ref(loop.model)
        loop = Loop()
        gc.collect()
        assert model() is None
        loop.step()
