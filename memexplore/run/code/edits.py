"""Changes of a source text at statements and expressions of its syntax tree; all other lines stay as they are."""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize


class Edits:
    """Changes to collect, in any order, and to apply together."""

    def __init__(self, source: str) -> None:
        self._lines = [line.encode() for line in source.split("\n")]
        self._inside_texts = _inside_texts(source)
        self._parts: dict[int, list[tuple[int, int, int, str]]] = {}
        self._before: dict[int, list[str]] = {}
        self._deeper: dict[int, int] = {}

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Replace an expression or a statement; further lines of `text` get the indentation of the first."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        part = (node.col_offset, node.end_lineno, node.end_col_offset, text)
        self._parts.setdefault(node.lineno, []).append(part)

    def insert_before(self, node: ast.stmt, lines: list[str]) -> None:
        """Insert lines before a statement, inside of what it has been put under, with its indentation."""
        self._before.setdefault(_first_line(node), []).extend(self._indented(node, lines))

    def insert_first(self, node: ast.stmt, lines: list[str]) -> None:
        """Insert lines before a statement and before all that was inserted there."""
        self._before.setdefault(_first_line(node), [])[:0] = lines

    def put_under(self, first: ast.stmt, last: ast.stmt, header: str) -> None:
        """Put statements of one list under a header such as ``with …:``.

        Raises ValueError where a text of several lines would change.
        """
        assert last.end_lineno is not None
        start = _first_line(first)
        numbers = range(start, last.end_lineno + 1)
        if self._inside_texts & set(numbers):
            raise ValueError("a text of several lines is among the lines to indent")
        self._before.setdefault(start, []).extend(self._indented(first, [header]))
        for number in numbers:
            self._deeper[number] = self._deeper.get(number, 0) + 1

    def applied(self) -> str:
        """Return the changed source."""
        result: list[str] = []
        removed: set[int] = set()
        for number, line in enumerate(self._lines, 1):
            result += self._before.get(number, [])
            if number not in removed:
                text, taken = self._changed(number, line)
                removed.update(taken)
                deeper = "    " * self._deeper.get(number, 0)
                result += [deeper + part if part else part for part in text.split("\n")]
        return "\n".join(result)

    def _changed(self, number: int, line: bytes) -> tuple[str, range]:
        """Return a line with its parts replaced, and the further lines that went with them."""
        indentation = line[: len(line) - len(line.lstrip())].decode()
        last = number
        for start, end_line, end, text in sorted(self._parts.get(number, []), reverse=True):
            tail = line if end_line == number else self._lines[end_line - 1]
            last = max(last, end_line)
            line = line[:start] + text.replace("\n", "\n" + indentation).encode() + tail[end:]
        return line.decode(), range(number + 1, last + 1)

    def _indentation(self, node: ast.stmt) -> str:
        return self._lines[_first_line(node) - 1][: node.col_offset].decode()

    def _indented(self, node: ast.stmt, lines: list[str]) -> list[str]:
        indentation = self._indentation(node) + "    " * self._deeper.get(_first_line(node), 0)
        return [textwrap.indent(line, indentation) for piece in lines for line in piece.strip("\n").split("\n")]

    def starts_its_line(self, node: ast.stmt) -> bool:
        """Return whether nothing else is on the first line of a statement."""
        return not self._indentation(node).strip()


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _inside_texts(source: str) -> set[int]:
    """Return the numbers of the lines that begin inside a text of several lines."""
    inside: set[int] = set()
    starts: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if name == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
        elif name == "FSTRING_START":
            starts.append(token.start[0])
        elif name == "FSTRING_END":
            inside.update(range(starts.pop() + 1, token.end[0] + 1))
    return inside
