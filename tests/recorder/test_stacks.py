"""Interned stacks: equal stacks have one number, and a stack has the lines of the frames that run."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.recorder import stacks as module
from memexplore.recorder.stacks import Stacks, caller
from memexplore.tape import Action, Tape


def here() -> FrameType | None:
    return caller(1)


def test_stacks_of_one_line_have_one_number_and_others_another():
    stacks = Stacks()
    numbers = [stacks.number(here()) for _ in range(3)]
    other = stacks.number(here())
    assert len(set(numbers)) == 1
    assert other != numbers[0]
    lines = [stacks.resolve(number, ())[0].line for number in (numbers[0], other)]
    assert lines[1] == lines[0] + 1


def test_two_calls_on_one_line_have_one_number():
    # The interpreter specialises a call that runs often: it is then at another instruction of the same line.
    stacks = Stacks()
    one, other = stacks.number(here()), stacks.number(here())
    assert one == other


def test_a_function_that_two_cells_define_alike_has_the_cell_that_runs():
    stacks, files = Stacks(), []
    for cell in ("<cell 1>", "<cell 2>"):
        names = {"here": here}
        exec(compile("def step():\n    return here()\nframe = step()", cell, "exec"), names)
        files.append(stacks.resolve(stacks.number(names["frame"]), ())[0].filename)
    assert files == ["<cell 1>", "<cell 2>"]


def test_a_new_stack_needs_no_walk_through_the_lines_of_its_code(monkeypatch: pytest.MonkeyPatch):
    # That walk takes as long as several ops, and each recorded step begins with no stack.
    walks: list[int] = []
    line_of = module._line

    def noting(code: CodeType, instruction: int) -> int:
        walks.append(instruction)
        return line_of(code, instruction)

    monkeypatch.setattr(module, "_line", noting)
    stacks = Stacks()
    number = stacks.number(here())
    assert walks == []
    module._frame.cache_clear()
    assert stacks.resolve(number, ())[0].function == "test_a_new_stack_needs_no_walk_through_the_lines_of_its_code"
    assert walks != []


def test_code_that_was_made_twice_has_the_lines_of_each():
    stacks = Stacks()
    found = []
    for start in (1, 5):
        scope: dict[str, object] = {"here": here}
        exec(compile("\n" * start + "def run():\n    return here()", "cell", "exec"), scope)
        found.append(stacks.number(scope["run"]()))  # type: ignore[operator]
        # The next code may have the same address.
        del scope
    assert [stacks.resolve(number, ())[0].line for number in found] == [3, 7]


def test_a_stack_inside_of_a_call_goes_on_with_the_stack_of_the_call():
    stacks = Stacks()
    frame = sys._getframe()
    before = stacks.enter(frame)
    inner = stacks.number(here())
    stacks.leave(before)
    outer = stacks.number(here())
    names = [[each.function for each in stacks.resolve(number, ())] for number in (inner, outer)]
    assert names[0] == names[1]


def frames_in_threes(tape: Tape) -> list[int]:
    """The lines in this file that led to each request of three float32."""
    rows = [row for row in range(len(tape)) if tape.action[row] == Action.ALLOC and tape.size[row] == 12]
    stacks = [tape.stacks[tape.stack[row]] for row in rows]
    return [next(each.line for each in stack if each.function.endswith("train")) for stack in stacks]


class Failing(torch.optim.SGD):
    fails = True

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if self.fails:
            raise ValueError("not now")
        super().step()


def test_lines_after_an_optimizer_that_raised_are_those_of_the_next_call():
    def train() -> None:
        ((weight * 2).sum()).backward()
        optimizer.step()

    weight = nn.Parameter(torch.ones(3))
    optimizer = Failing([weight], lr=0.1)
    first = train.__code__.co_firstlineno + 1
    with mx.record() as recording:
        with pytest.raises(ValueError, match="not now"):
            train()
        optimizer.fails = False
        weight.grad = None
        train()
    lines = frames_in_threes(recording.tape)
    # `weight * 2` of both calls: the line of the optimizer is no line of its stack.
    assert lines.count(first) >= 2
    assert set(lines) == {first}
