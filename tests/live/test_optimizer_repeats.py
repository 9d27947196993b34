"""Optimizer steps on the CPU that are not recorded op by op have the rows that recording gives them."""

from __future__ import annotations

import collections
import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.live import optimizer_repeats
from memexplore.live.recording import Recording
from memexplore.recorder.real_device import RealMode
from memexplore.tape import Action, Phase, Tape

STEPS = 7
"""In the first step the state is made, the second and third are compared, the next ones repeat."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[int]:
    """The number of ops of optimizers that the dispatch mode has seen, by step of the recorded run."""
    counts: collections.Counter[int] = collections.Counter()
    dispatch = RealMode.__torch_dispatch__

    def counting(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.local.state.phase == Phase.OPTIMIZER:
            counts[self.number] += 1
        return dispatch(self, func, types, args, kwargs)

    begin = Recording.begin

    def numbered(self: Any) -> None:
        self.mode.number = self.step
        begin(self)

    monkeypatch.setattr(RealMode, "__torch_dispatch__", counting)
    monkeypatch.setattr(Recording, "begin", numbered)
    return counts


class Loop:
    """A network of two layers, which trains with an optimizer."""

    def __init__(self, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.optimizer = make(self.model)

    def step(self) -> None:
        self.model(torch.ones(8, 64)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tapes(self, before: Callable[[int], object] = lambda number: None, steps: int = STEPS) -> list[Tape]:
        """Watch some steps, and return their tapes; `before` is called with the number of each before it."""
        with mx.watch(self.model, first=steps) as live:
            for number in range(1, steps + 1):
                before(number)
                self.step()
        return [live.tape(number) for number in range(1, steps + 1)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "Adam": adam,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True),
    "AdamW foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=0.1, nesterov=True),
    "two groups": lambda model: torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "weight_decay": 0.0}]  # type: ignore[index]
    ),
}


def everything_but_times(tape: Tape) -> list[tuple[object, ...]]:
    """The rows of a tape, each with the row of its block in place of the address."""
    rows: list[tuple[object, ...]] = []
    open_blocks: dict[int, int] = {}
    for row in range(len(tape)):
        address = int(tape.address[row])
        if tape.action[row] in (Action.ALLOC, Action.PREEXISTING):
            open_blocks[address] = row
        block = open_blocks.get(address, -1)
        texts = (
            tape.ops[tape.op[row]] if tape.op[row] >= 0 else "",
            tape.modules[tape.module[row]] if tape.module[row] >= 0 else "",
            tape.stacks[tape.stack[row]] if tape.stack[row] >= 0 else (),
            tape.tensor_texts[tape.tensor[row]] if tape.tensor[row] >= 0 else "",
        )
        numbers = (tape.action, tape.size, tape.category, tape.phase, tape.step, tape.stream)
        rows.append((block, *texts, *(int(column[row]) for column in numbers)))
    return rows


@pytest.mark.parametrize("name", MAKERS)
def test_the_tape_of_a_repeated_step_is_that_of_a_recorded_one(
    name: str, seen: collections.Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[list[Tape]] = []
    ops: list[list[int]] = []
    for most in (20, 0):  # in one line, so that both have the same stacks
        monkeypatch.setattr(optimizer_repeats, "_MOST_REPEATS", most)
        seen.clear()
        runs.append(Loop(MAKERS[name]).tapes())
        ops.append([number for number in range(1, STEPS + 1) if seen[number]])
    assert ops == [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7]]
    for ours, theirs in zip(*runs, strict=True):
        assert everything_but_times(ours) == everything_but_times(theirs)


def test_times_of_a_repeated_step_do_not_fall() -> None:
    for tape in Loop(adam).tapes():
        assert np.all(np.diff(tape.time) >= 0)


def test_ops_after_a_repeated_step_are_recorded() -> None:
    loop = Loop(adam)
    held: list[torch.Tensor] = []
    loop.optimizer.zero_grad = lambda: held.append(torch.ones(1000))  # type: ignore[method-assign, assignment]
    tape = loop.tapes()[-1]
    ours = (tape.action == Action.ALLOC) & (tape.size == 4000)
    assert tape.phase[ours].tolist() == [Phase.OTHER]


def test_a_learning_rate_may_change(seen: collections.Counter[int]) -> None:
    loop = Loop(adam)
    loop.tapes(lambda number: loop.optimizer.param_groups[0].update(lr=0.1 / number))
    assert max(seen) == 3


CHANGES: dict[str, Callable[[Loop], object]] = {
    "option": lambda loop: loop.optimizer.param_groups[0].update(weight_decay=0.1),
    "no gradient": lambda loop: loop.model[0].requires_grad_(False),
    "new state": lambda loop: loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict())),
    "more parameters": lambda loop: loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "hook": lambda loop: loop.optimizer.register_step_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_after_a_change_is_recorded(change: str, seen: collections.Counter[int]) -> None:
    loop = Loop(adam)
    loop.tapes(lambda number: CHANGES[change](loop) if number == 5 else None, steps=5)
    assert [number for number in range(1, 6) if seen[number]] == [1, 2, 3, 5]


def test_a_closure_runs_recorded(seen: collections.Counter[int]) -> None:
    loop = Loop(adam)
    plain = loop.optimizer.step
    loop.optimizer.step = lambda: plain(lambda: 0.0)  # type: ignore[method-assign, assignment]
    loop.tapes()
    assert all(seen[number] for number in range(1, STEPS + 1))


def test_an_option_that_is_a_tensor_is_not_kept_alive(seen: collections.Counter[int]) -> None:
    loop = Loop(adam)
    betas = torch.tensor(0.9), torch.tensor(0.999)
    loop.optimizer.param_groups[0].update(betas=betas, foreach=False)
    with mx.watch(loop.model, first=STEPS):
        for _ in range(STEPS):
            loop.step()
        before = weakref.ref(betas[0])
        del betas
        loop.optimizer.param_groups[0].update(betas=(0.9, 0.999))
        assert before() is None
    assert all(seen[number] for number in range(1, STEPS + 1))


def test_optimizers_whose_ops_depend_on_values_are_recorded(seen: collections.Counter[int]) -> None:
    Loop(lambda model: torch.optim.RAdam(model.parameters())).tapes()
    assert all(seen[number] for number in range(1, STEPS + 1))


def test_a_repeated_step_is_recorded_again_after_some(
    seen: collections.Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_repeats, "_MOST_REPEATS", 2)
    Loop(adam).tapes(steps=9)
    # 4 and 5 repeat, 6 is recorded, 7 and 8 repeat
    assert [number for number in range(1, 10) if seen[number]] == [1, 2, 3, 6, 9]


def test_an_optimizer_whose_equal_steps_differ_is_never_repeated(
    seen: collections.Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(adam)
    module = sys.modules["torch.optim.adam"]
    adam_step = module.adam
    held: list[int] = []

    def sometimes_more(*args: Any, **kwargs: Any) -> None:
        held.append(0)
        torch.ones(10 if len(held) == 3 else 20)
        adam_step(*args, **kwargs)

    monkeypatch.setattr(module, "adam", sometimes_more)
    loop.tapes()
    assert all(seen[number] for number in range(1, STEPS + 1))


def test_a_step_that_raises_leaves_the_next_ones_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(adam)
    module = sys.modules["torch.optim.adam"]
    adam_step = module.adam
    fails: list[bool] = []

    def failing(*args: Any, **kwargs: Any) -> None:
        if fails:
            raise ValueError("no step")
        adam_step(*args, **kwargs)

    monkeypatch.setattr(module, "adam", failing)
    with mx.watch(loop.model, first=20) as live:
        for _ in range(4):
            loop.step()
        fails.append(True)
        with pytest.raises(ValueError, match="no step"):
            loop.step()
        fails.clear()
        loop.optimizer.zero_grad()
        loop.step()
    tape = live.tape(5)
    forward = (tape.action == Action.ALLOC) & (tape.phase == Phase.FORWARD)
    assert forward.any()
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []


def test_blocks_of_a_repeated_step_overlap_no_other() -> None:
    for tape in Loop(adam).tapes():
        alive: dict[int, int] = {}
        for action, address, size in zip(tape.action, tape.address.tolist(), tape.size.tolist(), strict=True):
            if action in (Action.ALLOC, Action.PREEXISTING):
                assert all(address + size <= other or other + alive[other] <= address for other in alive)
                alive[address] = size
            elif action == Action.FREE_COMPLETED:
                del alive[address]
