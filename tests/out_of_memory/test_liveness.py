"""Variables that code reads again, by its bytecode."""

from __future__ import annotations

import dis
from collections.abc import Callable
from types import CodeType

import pytest

from memexplore.out_of_memory.liveness import read_again


def _at_call(code: CodeType, number: int = 0) -> int:
    """Return the offset of a call in code."""
    return [each.offset for each in dis.get_instructions(code) if each.opname.startswith("CALL")][number]


def _read_again_at(source: str, call: str) -> set[str]:
    """Return the names that a cell reads again after the call of a function without arguments."""
    code = compile(source, "<cell>", "exec")
    lines = [number for number, line in enumerate(source.splitlines(), 1) if f"{call}()" in line]
    offset = next(
        each.offset
        for each in dis.get_instructions(code)
        if each.opname.startswith("CALL") and each.positions is not None and each.positions.lineno in lines
    )
    return set(read_again(code, offset))


@pytest.mark.parametrize(
    ("source", "again", "dead"),
    [
        ("a = 1\nfail()\nprint(a)", {"a"}, set()),
        ("a = 1\nfail()\na = 2\nprint(a)", set(), {"a"}),
        ("for _ in x:\n    b = fail()\n    total = total + b", {"total", "x"}, {"b"}),
        ("if x:\n    fail()\nelse:\n    print(a)\nprint(c)", {"c"}, {"a"}),
        ("while x:\n    fail()\n    if y:\n        print(a)\n    a = 1", {"a", "x", "y"}, set()),
        ("fail()\ndef later():\n    return a", {"a"}, set()),
        ("a += fail()\nprint(1)", set(), {"b"}),
        ("fail()\ndel a", set(), {"a"}),
    ],
)
def test_names_read_after_a_call(source: str, again: set[str], dead: set[str]) -> None:
    found = _read_again_at(source, "fail")
    assert again <= found
    assert not dead & found


def test_local_variables_of_a_function() -> None:
    def train(batches: list[int], model: Callable[[int], object], outputs: list[object]) -> None:
        for batch in batches:
            output = model(batch)
            outputs.append(output)

    found = read_again(train.__code__, _at_call(train.__code__))
    assert {"model", "outputs"} <= found
    assert not {"output", "batch"} & found
