"""Detection of `while` loops that cannot end on a virtual GPU, because their end depends on a tensor's value.

In: one call of `count_read` for each value that user code reads. Out: NotSimulated, raised as early as the source of
the loop allows.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from types import FrameType
from typing import NamedTuple

import torch

import memexplore

LIMIT = 100_000
"""Reads of a value by one line from which an enclosing `while` loop counts as endless."""
_EXAMINED = frozenset({1, 3, 10, 100, 1_000, 10_000})
"""Counts of reads at which the enclosing loops are examined."""
_INHERITED = 1_000
"""Reads from which loops of calling functions are examined too."""


class NotSimulated(RuntimeError):
    """Code that a virtual GPU cannot run; the message names the line of the user's code and what to do instead."""


class _Loop(NamedTuple):
    """A `while` loop: its lines, the lines of its test, and for each exit from its body the tests that lead to it."""

    first: int
    last: int
    test: range
    test_may_end: bool
    """Whether the test can end the loop though a part of it depends on a value, as in `step < 10 and loss > 1`."""
    constant: bool
    """Whether the test is a constant, as in `while True`."""
    exits: tuple[tuple[range, ...], ...]


_counts: dict[tuple[str, int], int] = {}
"""File and line -> reads of a value."""


def reset() -> None:
    """Forget all counts, when a virtual GPU is turned on."""
    _counts.clear()


@functools.cache
def _own_folders() -> tuple[str, ...]:
    return tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (torch, memexplore))


def user_frame() -> FrameType | None:
    """Return the innermost running frame outside torch and memexplore."""
    frame: FrameType | None = sys._getframe(1)
    folders = _own_folders()
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        frame = frame.f_back
    return frame


def file_and_line(frame: FrameType | None) -> str:
    """Return `file:line` of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "<unknown>"


def count_read(decides: bool = True) -> None:
    """Count that user code reads a value; `decides` if a test depends on it.

    Raises NotSimulated where that makes an endless loop.
    """
    frame = user_frame()
    if frame is None:
        return
    line = (frame.f_code.co_filename, frame.f_lineno)
    count = _counts[line] = _counts.get(line, 0) + 1
    if (count in _EXAMINED and decides) or count % LIMIT == 0:
        _examine(frame, count)


def _examine(frame: FrameType, count: int) -> None:
    """Raise NotSimulated if a loop around the running line cannot end."""
    innermost = True
    current: FrameType | None = frame
    while current is not None and (innermost or count >= _INHERITED):
        filename, line = current.f_code.co_filename, current.f_lineno
        if not filename.startswith(_own_folders()):
            source = "".join(linecache.getlines(filename, current.f_globals))
            endless = not source and count >= LIMIT
            for loop in _loops(filename, source):
                if loop.first <= line <= loop.last and (count >= LIMIT or not _may_end(loop, filename, line)):
                    endless = True
            if endless:
                raise NotSimulated(
                    f"{filename}:{line}: this loop depends on a tensor's value, and a virtual GPU has no values; "
                    "give the loop a fixed number of rounds (for _ in range(n)) or profile it on a real GPU"
                )
        innermost, current = False, current.f_back


def _may_end(loop: _Loop, filename: str, line: int) -> bool:
    """Return whether a test or exit of a loop is independent of values, as far as their reads were counted."""

    def depends_on_value(lines: range) -> bool:
        return line in lines or any((filename, number) in _counts for number in lines)

    if not loop.constant and (loop.test_may_end or not depends_on_value(loop.test)):
        return True
    return any(not any(depends_on_value(lines) for lines in deciding) for deciding in loop.exits)


@functools.lru_cache(maxsize=64)
def _loops(filename: str, source: str) -> tuple[_Loop, ...]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ()
    return tuple(_loop(node) for node in ast.walk(tree) if isinstance(node, ast.While))


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _loop(node: ast.While) -> _Loop:
    exits: list[tuple[range, ...]] = []
    for statement in node.body:
        _find_exits(statement, (), exits, True)
    test = node.test
    inner = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    junction = ast.And if inner is test else ast.Or
    may_end = isinstance(inner, ast.BoolOp) and isinstance(inner.op, junction)
    lines = _lines(node)
    return _Loop(lines[0], lines[-1], _lines(test), may_end, isinstance(test, ast.Constant), tuple(exits))


def _find_exits(node: ast.AST, deciding: tuple[range, ...], exits: list[tuple[range, ...]], own: bool) -> None:
    """Collect the exits from a loop below `node`; `own` while a `break` there belongs to that loop."""
    if isinstance(node, ast.Return | ast.Raise) or (own and isinstance(node, ast.Break)):
        exits.append(deciding)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
        return
    else:
        if isinstance(node, ast.If | ast.While):
            deciding = (*deciding, _lines(node.test))
        inside = own and not isinstance(node, ast.For | ast.While | ast.AsyncFor)
        for child in ast.iter_child_nodes(node):
            _find_exits(child, deciding, exits, inside)
