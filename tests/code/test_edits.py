"""Changes of a source text: what is not changed stays as it is written."""

from __future__ import annotations

import ast

import pytest

from memexplore.run.code.edits import Edits

SOURCE = '''\
größe = 1  # Größe
for x in y:
    a = call(
        x,  # one
        2,
    )   # kept
    b = """two
lines"""
    c = 3
'''


def parts(source: str = SOURCE) -> tuple[Edits, list[ast.stmt], list[ast.stmt]]:
    tree = ast.parse(source)
    loop = tree.body[1]
    assert isinstance(loop, ast.For)
    return Edits(source), tree.body, loop.body


def test_without_changes_the_source_is_the_same() -> None:
    assert parts()[0].applied() == SOURCE


def test_columns_are_those_of_letters_not_of_bytes() -> None:
    edits, (first, _), _ = parts()
    assert isinstance(first, ast.Assign)
    edits.replace(first.value, "20")
    assert edits.applied() == SOURCE.replace("größe = 1", "größe = 20")


def test_expression_of_several_lines_is_replaced_with_its_lines() -> None:
    edits, _, (first, *_) = parts()
    edits.replace(first, "a = 1\nd = 2")
    assert "    a = 1\n    d = 2   # kept\n" in edits.applied()
    assert "# one" not in edits.applied()


def test_lines_come_before_a_statement_inside_what_it_was_put_under() -> None:
    edits, (first, loop), (call, *_) = parts()
    edits.put_under(call, call, "with outer:")
    edits.put_under(call, call, "with inner:")
    edits.insert_before(call, ["before()"])
    edits.insert_before(first, ["second()"])
    edits.insert_first(first, ["first()"])
    text = edits.applied()
    assert text.startswith("first()\nsecond()\ngröße")
    assert (
        "    with outer:\n        with inner:\n            before()\n            a = call(\n                x," in text
    )
    assert isinstance(loop, ast.For)
    ast.parse(text)


def test_text_of_several_lines_is_not_indented() -> None:
    edits, _, (_, text, last) = parts()
    edits.put_under(last, last, "if x:")
    with pytest.raises(ValueError, match="text of several lines"):
        edits.put_under(text, last, "if x:")
    assert "    if x:\n        c = 3" in edits.applied()


def test_statement_behind_another_does_not_start_its_line() -> None:
    source = "a = 1; b = 2"
    assert [Edits(source).starts_its_line(one) for one in ast.parse(source).body] == [True, False]
