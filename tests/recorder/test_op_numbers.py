"""Requests of the allocator that no output shows, attributed by the numbers of the ops in the stacks of the history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from memexplore.recorder.annotation import annotate
from memexplore.recorder.matching import Numbers
from memexplore.recorder.op_numbers import COUNT, OpNumbers, number_of
from memexplore.recorder.recorder import Recorder
from memexplore.tape import Action, Category, Meta, Phase, Source, Tape

ALLOC, FREE, DONE, MARK = Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.MARK
OPS = ("aten::add", "aten::convolution", "aten::index_put_", "aten::_cudnn_rnn")
OUT = {"op": 0, "address": 0, "size": 512}


def line_of(run: Any) -> int:
    """The line of the frame in which an op runs, in the module `op_numbers`."""
    lines = []

    def op() -> None:
        import sys

        frame = sys._getframe(1)
        lines.append(number_of(frame.f_code.co_filename, frame.f_lineno))

    run(op)((), None)
    return lines[0]


def test_the_frame_of_an_op_tells_its_number() -> None:
    numbers = OpNumbers(Recorder({}))
    add = torch.ops.aten.add.Tensor
    told = [line_of(lambda op: numbers.begin(op, add, ())) for _ in range(COUNT + 2)]
    assert told == [*range(COUNT), 0, 1]
    assert number_of(__file__, 1_000_001) == number_of("op_numbers.py", 12) == -1


def test_an_op_gets_its_arguments_and_gives_its_result() -> None:
    numbers = OpNumbers(Recorder({}))
    run = numbers.begin(lambda *args, **kwargs: (args, kwargs), torch.ops.aten.add.Tensor, ())
    assert run((1, 2), {"alpha": 3}) == ((1, 2), {"alpha": 3})
    assert run((1,), None) == ((1,), {})


class Run:
    """A history and the recorded rows of a run, written down op by op."""

    def __init__(self) -> None:
        self.recorder = Recorder({})
        self.numbers = OpNumbers(self.recorder)
        self._history: list[tuple[int, int, int, int]] = []
        self._noted: list[tuple[int, int, int, int, int, int]] = []
        self._next = 0

    def op(self, op: int, *requests: str, func: Any = torch.ops.aten.add.Tensor) -> Run:
        """An op with requests: `out` (an output), `scratch` (freed at once), `copy` (freed at its end) or `kept`."""
        self.numbers.begin(func, func, ())
        number = self.recorder.local.state.op_number % COUNT
        first = self._next
        self._requests(requests, number, op)
        for at, kind in enumerate(requests):
            if kind == "copy":
                self.free(first + 512 * at)
        return self

    def without_op(self, *requests: str) -> Run:
        """Requests that no op of PyTorch's dispatcher makes."""
        self._requests(requests, -1, -1)
        return self

    def mark(self, phase: Phase) -> Run:
        self._noted.append((MARK, -1, 0, -1, phase, 1))
        return self

    def free(self, address: int) -> Run:
        size = next(size for _, at, size, _ in self._history if at == address)
        self._history += [(FREE, address, size, -1), (DONE, address, size, -1)]
        return self

    def _requests(self, requests: tuple[str, ...], number: int, op: int) -> None:
        phase = next((row[4] for row in reversed(self._noted) if row[0] == MARK), Phase.OTHER)
        for kind in requests:
            address = self._next
            self._next += 512
            self._history.append((ALLOC, address, 512, number))
            if kind == "scratch":
                self.free(address)
            elif kind == "out":
                self.numbers.noting(self._noted.append)((ALLOC, address, 512, op, phase, 1))

    def annotated(self) -> Tape:
        history = np.array(self._history)
        noted = np.array(self._noted)
        meta = Meta(Source.MEASURED, "cuda:0")
        names = ("action", "address", "size", "op", "phase", "step")
        return annotate(
            Tape.from_columns({"action": history[:, 0], "address": history[:, 1], "size": history[:, 2]}, meta=meta),
            Tape.from_columns({name: noted[:, at] for at, name in enumerate(names)}, meta=meta, ops=OPS),
            Numbers(self.numbers, history[:, 3]),
        )

    def ops(self) -> list[str]:
        """The op of each request."""
        tape = self.annotated()
        return [OPS[op] if op >= 0 else "" for op in tape.op[tape.action == ALLOC].tolist()]

    def categories(self) -> list[Category]:
        """The category of each request."""
        tape = self.annotated()
        return [Category(kind) for kind in tape.category[tape.action == ALLOC].tolist()]


def test_what_an_op_requests_in_front_of_its_output_belongs_to_it() -> None:
    run = Run().op(0, "out").op(1, "scratch", "out", "scratch").op(0, "out")
    assert run.ops() == ["aten::add", *["aten::convolution"] * 3, "aten::add"]


def test_what_an_op_in_place_requests_belongs_to_it() -> None:
    in_place = torch.ops.aten.index_put_.default
    run = Run().op(0, "out")
    run.recorder.ops.update({name: number for number, name in enumerate(OPS)})
    assert run.op(2, "scratch", func=in_place).op(0, "out").ops() == ["aten::add", "aten::index_put_", "aten::add"]


def test_what_no_op_requests_belongs_to_none() -> None:
    assert Run().op(0, "out").without_op("kept").op(0, "out").ops() == ["aten::add", "", "aten::add"]


def test_an_output_is_not_the_temporary_at_its_place_that_the_same_op_freed() -> None:
    run = Run().op(0, "out").op(1, "scratch")
    run._next -= 512
    tape = run.op(1, "out").annotated()
    rows = np.flatnonzero(tape.action == ALLOC)
    assert [Category(kind) for kind in tape.category[rows[1:]].tolist()] == [Category.TEMPORARY, Category.UNKNOWN]


@pytest.mark.parametrize(
    ("op", "requests", "expected"),
    [
        # A copy of the weight stays until the convolution with its workspace has run.
        (1, ("out", "copy", "scratch"), [Category.UNKNOWN, Category.TEMPORARY, Category.WORKSPACE]),
        # A copy of the input, and cuDNN's workspace.
        (3, ("scratch", "out", "scratch"), [Category.TEMPORARY, Category.UNKNOWN, Category.WORKSPACE]),
        (0, ("scratch", "out", "scratch"), [Category.TEMPORARY, Category.UNKNOWN, Category.TEMPORARY]),
        # Such as the workspace that cuBLAS keeps.
        (0, ("out", "kept"), [Category.UNKNOWN, Category.WORKSPACE]),
    ],
)
def test_scratch_memory_of_a_library_is_a_workspace(
    op: int, requests: tuple[str, ...], expected: list[Category]
) -> None:
    assert Run().op(op, *requests).op(0).categories() == expected


def test_memory_of_no_op_has_the_category_of_its_lifetime() -> None:
    run = Run().mark(Phase.FORWARD).op(0, "out").without_op("kept", "scratch", "kept")
    run.mark(Phase.BACKWARD).op(0, "out").free(512)
    activation, temporary, unknown = run.categories()[1:4]
    assert (activation, temporary, unknown) == (Category.ACTIVATION, Category.TEMPORARY, Category.UNKNOWN)
