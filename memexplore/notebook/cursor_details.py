"""Text and table rows for one row of a Tape: its position in the run, and the tensors and lines alive after it."""

from __future__ import annotations

from typing import Any, NamedTuple

from memexplore.analysis import curves, groups, growth, tables
from memexplore.analysis.places import place
from memexplore.figures.palette import COLOURS
from memexplore.tape import Category, Phase, Tape
from memexplore.units import size_text

_COLOUR_OF = {category.text: COLOURS[category] for category in Category}


class Line(NamedTuple):
    """A line of code: file and line number as text, and its source ("" if the file cannot be read)."""

    location: str
    code: str


def code_line(line: str) -> Line:
    """Return the line of code at ``file:line``; a cell of this notebook is named as in tracebacks.

    >>> code_line("train.py:7")
    Line(location='train.py, line 7', code='')
    >>> code_line("")
    Line(location='', code='')
    """
    found = place(line)
    return Line(found.text, found.code)


def cursor_text(tape: Tape, row: int) -> str:
    """Return the position of a row in the run, and the allocated bytes after it.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [2048], "step": [1], "phase": [Phase.FORWARD]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> cursor_text(tape, 0)
    'At the peak · event 0 · step 1, forward · 2.00 KiB allocated'
    """
    if row < 0:
        return "No memory was allocated."
    step, phase, module = int(tape.step[row]), Phase(int(tape.phase[row])), int(tape.module[row])
    position = f"step {step}" if step else "set-up"
    if phase is not Phase.OTHER:
        position += f", {phase.text}"
    if module >= 0:
        position += f" of {tape.modules[module]}"
    allocated = size_text(int(curves.curve(tape, "allocated")[row]))
    peak = "At the peak · " if row == curves.peak(tape)[1] else ""
    return f"{peak}event {row:,} · {position} · {allocated} allocated"


def live_tensors(tape: Tape, row: int, count: int = 50) -> list[dict[str, str]]:
    """Return the largest tensors alive after a row as text: size, category, colour, layer, op, location and code."""
    if row < 0:
        return []
    return [
        {
            "size": size_text(tensor.size),
            **_category(tensor.category),
            "layer": tensor.layer,
            "op": tensor.op,
            **code_line(tensor.line)._asdict(),
        }
        for tensor in tables.tensors(tape, row, count).itertuples()
    ]


def live_lines(tape: Tape, row: int, count: int = 50) -> list[dict[str, str]]:
    """Return the lines of code with the most memory alive after a row.

    All values are text: size, blocks, category, colour, location and code.
    """
    if row < 0:
        return []
    table = groups.by_line(tape, row).head(count)
    return [
        {"size": size_text(int(size)), "blocks": f"{blocks:,}", **_category(category), **code_line(line)._asdict()}
        for size, blocks, category, line in zip(*(table[name] for name in table.columns), strict=True)
    ]


def growth_table(tape: Tape, count: int = 50) -> dict[str, Any]:
    """Return the memory that grew from step to step: `text`, titles of at most three `steps`, and `rows` of text."""
    table = growth.growth(tape)
    steps = growth.shown_steps(table)
    rows = [
        {
            "grew": f"+{size_text(int(entry['grew']))}",
            **_category(entry["category"]),
            "layer": entry["layer"],
            "sizes": [size_text(int(entry[step])) for step in steps],
            **code_line(entry["line"])._asdict(),
        }
        for entry in table.head(count).to_dict("records")
    ]
    return {"text": growth.growth_text(tape), "steps": [f"Step {step}" for step in steps], "rows": rows}


def _category(category: str) -> dict[str, str]:
    return {"category": category, "colour": _COLOUR_OF[category]}
