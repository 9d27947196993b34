"""Find the periods of a run: what it does again and again, such as training steps or the calls of an evaluation.

The steps of optimizers are periods. A loop without them, such as an evaluation, a metric that is filled, or an update
by hand, shows in the lines that a tape has: in one frame of the stack, the line comes back to the same place.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memexplore.analysis.curves import Rows, cached_by_tape, curve
from memexplore.tape import Action, Frame, Phase, Tape

_LEAST_ROUNDS = 3
"""Times that a line comes first in a round before the rounds of a loop are periods: what repeats, does so twice."""
_MANY_ROUNDS = 8
"""Iterations from which an outer loop, such as one over epochs, is preferred to those in it."""
_MODULE_CALLS = ("torch/nn/modules/module.py", "torch\\nn\\modules\\module.py")
"""File of the frames below which the loops are those of a model."""
_TORCH = re.compile(r"[\\/](site|dist)-packages[\\/]torch[\\/]")
"""Files of torch, whose loops are no loops of the program, such as those of `LBFGS`."""


class Periods(NamedTuple):
    """Periods that have ended."""

    unit: str
    """What a period is: "step" of an optimizer, or "iteration" of a loop."""
    numbers: list[int]
    ends: list[int]
    """The last row of each."""
    line: str
    """``file:line`` with which the loop's iterations begin; empty for steps."""
    runs: bool
    """Whether the last request is one of the loop, or of a step."""


@cached_by_tape
def periods(tape: Tape) -> Periods:
    """Return the periods of a tape that have ended; cached per tape.

    These are the iterations of a loop around calls of a model, if no step of an optimizer has ended before, or if the
    loop begins after the last one, such as an evaluation; else the steps.

    Raises ValueError for a tape that is not placed.
    """
    steps = _step_ends(tape)
    loop = _loop(tape, steps if len(steps) > 1 else [])
    if loop is None:
        return Periods("step", tape.step[steps].tolist(), [_before_next_batch(tape, end) for end in steps], "", True)
    begins = loop.begins
    ends = (begins[1:] - 1).tolist()
    failed = np.any(tape.action[begins[-1] :] == Action.OOM)
    if not failed and not _frees_most(tape, ends[-1], len(tape) - 1):
        ends.append(len(tape) - 1)
    return Periods("iteration", list(range(1, len(ends) + 1)), ends, loop.line, loop.runs)


def _step_ends(tape: Tape) -> list[int]:
    """Return the last row of each finished training step."""
    inside = np.flatnonzero(tape.step > 0)
    if not len(inside):
        return []
    # The rows of a step need not be one behind the other: a thread has the step of its own.
    _, from_end = np.unique(tape.step[inside][::-1], return_index=True)
    ends: list[int] = np.sort(inside[len(inside) - 1 - from_end]).tolist()
    if len(ends) > 1:
        phases = [set(np.unique(tape.phase[tape.step == tape.step[row]]).tolist()) for row in ends[-2:]]
        if phases[0] - phases[1] or np.any(tape.action[ends[-2] :] == Action.OOM):
            ends.pop()
    elif np.any(tape.action == Action.OOM):
        return []
    if len(ends) > 1 and _frees_most(tape, ends[-2], ends[-1]):
        ends.pop()
    return ends


def _before_next_batch(tape: Tape, end: int) -> int:
    """Return the row of a step before the requests that follow its update: a step lasts until the next forward pass."""
    after = end
    while after > 0 and tape.phase[after] == Phase.OTHER and tape.step[after] == tape.step[end]:
        after -= 1
    if tape.phase[after] != Phase.OPTIMIZER:
        return end
    requests = np.flatnonzero(tape.action[after : end + 1] == Action.ALLOC)
    return after + int(requests[0]) - 1 if len(requests) else end


def _frees_most(tape: Tape, before: int, last: int) -> bool:
    """Whether the rows of the last period include the end of the program, which frees its variables."""
    held = curve(tape)
    return bool(held[last] < held[before] / 2)


# --- loops -----------------------------------------------------------------------------------------------------------


class _Loop(NamedTuple):
    """A loop that calls a model, or goes backward, in each of its iterations."""

    begins: Rows
    """The rows with which its iterations begin."""
    line: str
    runs: bool
    """Whether the last request is one of an iteration."""


def _loop(tape: Tape, steps: list[int]) -> _Loop | None:
    """Return the outermost loop with many iterations, else the one with the most; None without one."""
    best = None
    for loop in _loops(tape, steps):
        if len(loop.begins) >= _MANY_ROUNDS:
            return loop
        if best is None or len(loop.begins) > len(best.begins):
            best = loop
    return best


def _loops(tape: Tape, steps: list[int]) -> Iterator[_Loop]:
    """Yield loops, the outermost first.

    Only rows after the last step are looked at, and a loop whose line the steps have is none: it is theirs.
    """
    # Ops of a backward pass have the line of the forward pass.
    asks = np.isin(tape.action, (Action.ALLOC, Action.OOM)) & (tape.stack >= 0) & (tape.phase != Phase.BACKWARD)
    rows = np.flatnonzero(asks)
    # The next loop may begin in the rows of the last step, which last until the next forward pass.
    earlier, rows = rows[rows <= (steps[-2] if steps else -1)], rows[rows > (steps[-1] if steps else -1)]
    last = rows[-1:]
    depth = 0
    while len(rows):
        function, at = _frames(tape, rows, depth)
        # The call that fails, else the one in which the program spends most requests.
        is_last = np.any(tape.action[rows] == Action.OOM)
        entered = function[-1] if is_last else np.bincount(function).argmax()
        if not entered:
            return
        rows, at = rows[function == entered], at[function == entered]
        line = _line(tape, int(rows[-1]), depth)
        if line.rpartition(":")[0].endswith(_MODULE_CALLS):
            begins, line = _calls(tape, rows), _line(tape, int(rows[-1]), depth - 1)
            if _is_loop(tape, begins, earlier, depth - 1, line):
                yield _Loop(begins, line, bool(rows[-1] == last))
            return
        if _TORCH.search(line):
            return
        for begins in _rounds(rows, at):
            line = _line(tape, int(begins[0]), depth)
            if _is_loop(tape, begins, earlier, depth, line):
                # The last round may have come to the first line after the loop.
                of_rounds = at[(rows >= begins[0]) & (rows < begins[-1])]
                yield _Loop(begins, line, bool(rows[-1] == last and at[-1] in of_rounds))
        rows = rows[at == (at[-1] if is_last else np.bincount(at).argmax())]
        depth += 1


def _frames(tape: Tape, rows: Rows, depth: int) -> tuple[Rows, Rows]:
    """Return the number of the function, 0 for none, and the line of the frames of some rows at a depth."""
    stacks, numbers = np.unique(tape.stack[rows], return_inverse=True)
    frames = [_frame(tape.stacks[number], depth) for number in stacks.tolist()]
    functions: dict[tuple[str, str] | None, int] = {None: 0}
    names = [None if frame is None else (frame.filename, frame.function) for frame in frames]
    function = np.array([functions.setdefault(name, len(functions)) for name in names])
    return function[numbers], np.array([0 if frame is None else frame.line for frame in frames])[numbers]


def _is_loop(tape: Tape, begins: Rows, earlier: Rows, depth: int, line: str) -> bool:
    """Return whether rounds that begin at some rows are the iterations of a loop that earlier rows do not have."""
    return _repeats_work(tape, begins) and not _has_line(tape, earlier, depth, line)


def _line(tape: Tape, row: int, depth: int) -> str:
    """Return the file and line of a row's frame, counted from the outermost one."""
    frame = _frame(tape.stacks[tape.stack[row]], depth)
    return f"{frame.filename}:{frame.line}" if frame is not None else ""


def _calls(tape: Tape, rows: Rows) -> Rows:
    """Return the rows with which calls of a model begin, among some rows of one line."""
    marks = np.flatnonzero((tape.action == Action.MARK) & (tape.phase == Phase.FORWARD))
    # The last mark before the first request belongs to it.
    marks = marks[max(int(np.searchsorted(marks, rows[0])) - 1, 0) : int(np.searchsorted(marks, rows[-1]))]
    # A line may call several models, such as the criterion with the result of another: the first one begins.
    first = rows[np.searchsorted(rows, marks)]
    return marks[(tape.module[first] == tape.module[rows[0]]) & (tape.stack[first] == tape.stack[rows[0]])]


def _frame(stack: tuple[Frame, ...], depth: int) -> Frame | None:
    return stack[-1 - depth] if depth < len(stack) else None


def _rounds(rows: Rows, lines: Rows) -> Iterator[Rows]:
    """Give for each line to which the program came back the rows with which a round begins, the first line first.

    A call over several lines goes back too, within a round.
    """
    back = np.flatnonzero(np.diff(lines) < 0) + 1
    for line in np.unique(lines[back]).tolist():
        # The round before the first jump back began at the same line.
        first = np.flatnonzero(lines[: back[0]] == line)[:1] if len(back) else back
        begins = np.union1d(first, back[lines[back] == line])
        if len(begins) >= _LEAST_ROUNDS:
            yield rows[begins]


def _repeats_work(tape: Tape, begins: Rows) -> bool:
    """Return whether most rounds have a backward pass, or call a layer that the round before has called too."""
    if len(begins) < _LEAST_ROUNDS:
        return False
    backward = np.add.reduceat((tape.phase == Phase.BACKWARD).astype(np.int64), begins) > 0
    if np.count_nonzero(backward) >= _LEAST_ROUNDS:
        return True
    layers = [
        set(tape.module[first:end][tape.phase[first:end] == Phase.FORWARD].tolist()) - {-1}
        for first, end in itertools.pairwise([*begins.tolist(), len(tape)])
    ]
    again = sum(bool(before & now) for before, now in itertools.pairwise(layers))
    return again >= _LEAST_ROUNDS - 1 and 2 * again >= len(begins) - 1


def _has_line(tape: Tape, rows: Rows, depth: int, line: str) -> bool:
    """Return whether the frames of some rows at a depth have a line."""
    frames = (_frame(tape.stacks[number], depth) for number in np.unique(tape.stack[rows]).tolist())
    return any(frame is not None and f"{frame.filename}:{frame.line}" == line for frame in frames)


__all__ = ["Periods", "periods"]
