"""A run whose block is in another thread than the one that trains."""

from __future__ import annotations

import threading

import pytest
import torch

import memexplore as mx
from memexplore.live.live import State
from memexplore.torch_internals.state import dispatch_mode_stack
from tests.live.training import Loop, on


def in_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_thread_that_trains_is_watched_from_another(device, recwarn):
    with on(device):
        loop = Loop(device)
        modes = list(dispatch_mode_stack())
        with mx.watch(loop.model, loop.optimizer, first=2) as live:
            in_thread(lambda: list(loop.steps(8, 8, 8)))
            torch.ones(1000)
        assert dispatch_mode_stack() == modes
    assert live.state is State.ENDED
    assert live.steps()["recorded"].tolist()[:2] == ["first steps", "first steps"]
    assert live.steps()["peak_allocated"].notna().all()
    # The layers kept as much as where the thread of the block trains.
    assert live.layers()[1].tolist() == [8 * 128 * 4, 8 * 10 * 4]
    assert not [each for each in recwarn if "memexplore" in str(each.message)]


def test_an_interrupt_leaves_the_steps_of_a_thread_that_trains():
    loop = Loop("cpu")
    in_step, left = threading.Event(), threading.Event()

    def train():
        list(loop.steps(8, 8))
        loss = loop.loss()
        in_step.set()
        left.wait()
        loss.backward()
        loop.optimizer.step()

    thread = threading.Thread(target=train)
    with pytest.raises(KeyboardInterrupt), mx.watch(loop.model, loop.optimizer) as live:
        thread.start()
        in_step.wait()
        raise KeyboardInterrupt
    left.set()
    thread.join()
    assert live.state is State.FAILED
    assert live.steps()["step"].tolist() == [1, 2, 3]
    assert dispatch_mode_stack() == []
    assert loop.model[0].weight.grad is not None
