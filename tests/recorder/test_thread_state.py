"""Recordings of several threads: rows have the module, phase and line of their own thread, steps those of training."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.tape import Action, Phase, Tape
from tests.threads import in_thread


def test_rows_of_a_thread_have_its_own_module_and_phase():
    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            in_thread(lambda: loaded.append(torch.ones(1000, device="cuda")))
            return x * 2

    loaded: list[torch.Tensor] = []
    with mx.virtual("T4"):
        model, x = nn.Sequential(Slow()), torch.ones(10, device="cuda")
        with mx.record() as recording:
            model(x)
    tape = recording.tape
    rows = [row for row in range(len(tape)) if tape.action[row] == Action.ALLOC and tape.size[row]]
    by_size = {int(tape.size[row]): row for row in rows}
    assert tape.modules[tape.module[by_size[40]]] == "0"
    assert tape.module[by_size[4000]] == -1
    assert Phase(int(tape.phase[by_size[40]])) is Phase.FORWARD
    assert Phase(int(tape.phase[by_size[4000]])) is Phase.OTHER
    # The frames of the thread end at its own code.
    assert "test_thread_state" in tape.stacks[tape.stack[by_size[4000]]][0].filename


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(4, 10, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _described(tape: Tape) -> list[str]:
    """Each row in words, with the function that made it: shows where a row is from that one of two tapes lacks."""
    innermost = [stack[0].function if stack else "" for stack in tape.stacks]
    return [
        f"{Action(int(action)).name} {size} {innermost[stack] if stack >= 0 else ''}"
        for action, size, stack in zip(tape.action, tape.size, tape.stack, strict=True)
    ]


def test_steps_are_counted_in_the_thread_that_trains():
    def run(call: Callable[[Callable[[], Any]], Any]) -> Any:
        with mx.virtual("T4", release="2.15"), mx.record() as recording:
            model = nn.Linear(10, 10).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                call(lambda: _train(model, optimizer, 2))
        return recording.tape

    here, elsewhere = run(lambda function: function()), run(in_thread)
    assert _described(here) == _described(elsewhere), threading.enumerate()
    for name in ("action", "size", "step", "phase", "category"):
        assert getattr(here, name).tolist() == getattr(elsewhere, name).tolist(), name
    assert int(elsewhere.step.max()) == 4


def test_a_prefetcher_begins_no_steps():
    batches: queue.Queue[torch.Tensor] = queue.Queue(2)

    def prefetch() -> None:
        normalise = nn.BatchNorm1d(10, affine=False).cuda()
        for _ in range(4):
            batches.put(normalise(torch.ones(4, 10).cuda()))

    with mx.virtual("T4"), mx.record() as recording:
        model = nn.Linear(10, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        thread = threading.Thread(target=prefetch)
        thread.start()
        for _ in range(4):
            model(batches.get()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        thread.join()
    assert int(recording.tape.step.max()) == 4


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(4, 10, device="cuda"))


@pytest.mark.parametrize(
    "then", [lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0), _evaluate, lambda model: None]
)
def test_what_follows_a_backward_pass_of_another_thread_is_no_backward_pass(then: Callable[[nn.Module], Any]):
    """On a real GPU the autograd engine has a thread of its own."""

    def run(call: Callable[[Callable[[], Any]], Any]) -> Tape:
        with mx.virtual("T4", release="2.15"), mx.record() as recording:
            model = nn.Linear(10, 10).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(2):
                loss = model(torch.ones(4, 10, device="cuda")).sum()
                call(functools.partial(loss.backward, torch.ones_like(loss)))
                then(model)
                optimizer.step()
                optimizer.zero_grad()
        return recording.tape

    one, other = run(lambda function: function()), run(in_thread)
    assert set(one.phase.tolist()) == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER}
    assert one.phase.tolist() == other.phase.tolist()
    assert one.step.tolist() == other.step.tolist()
