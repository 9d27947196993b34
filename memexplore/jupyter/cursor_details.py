"""Text and table rows for one row of a Tape: its position in the run, and the tensors and lines alive after it."""

from __future__ import annotations

from typing import Any, NamedTuple

from memexplore.analysis import curves, groups, growth, tables
from memexplore.analysis.layer_rows import LayerRow
from memexplore.analysis.periods import periods
from memexplore.analysis.picture import Moment, first_moment
from memexplore.analysis.places import place
from memexplore.analysis.streams import has_streams, stream_text
from memexplore.figures.bands import UNWINDING, unwinding
from memexplore.figures.layers import NOT_IN_A_LAYER, each_text
from memexplore.figures.palette import COLOURS
from memexplore.tape import Category, Phase, Tape
from memexplore.text.tensor_text import tensor_text
from memexplore.text.units import size_text

_COLOUR_OF = {category.text: COLOURS[category] for category in Category}


class Line(NamedTuple):
    """A line of code: file and line number as text, and its source ("" if the file cannot be read)."""

    location: str
    code: str
    path: str
    """``file:line``, by which the browser finds the line again."""


def code_line(line: str) -> Line:
    """Return the line of code at ``file:line``; a cell of this notebook is named as in tracebacks.

    >>> code_line("train.py:7")
    Line(location='train.py, line 7', code='', path='train.py:7')
    >>> code_line("")
    Line(location='', code='', path='')
    """
    place_of_line = place(line)
    return Line(*place_of_line)


def cursor_text(tape: Tape, row: int) -> str:
    """Return the position of a row in the run, and the allocated bytes after it.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [2048], "step": [1], "phase": [Phase.FORWARD]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> cursor_text(tape, 0)
    'At the peak · 2.00 KiB allocated · step 1, forward · event 0'
    """
    if row < 0:
        return "No memory was allocated."
    step, phase, module = int(tape.step[row]), Phase(int(tape.phase[row])), int(tape.module[row])
    position = f"step {step}" if step else "set-up"
    if row > unwinding(tape):
        position += f", {UNWINDING}"
    elif phase is not Phase.OTHER:
        position += f", {phase.text}"
    if module >= 0:
        position += f" of {tape.modules[module]}"
    allocated = size_text(int(curves.curve(tape, "allocated")[row]))
    moments = (first_moment(tape), Moment(curves.peak(tape)[1], "at the peak"))
    moment = next((f"{moment.text.capitalize()} · " for moment in moments if moment.row == row), "")
    return f"{moment}{allocated} allocated · {position} · event {row:,}"


def layer_tree(rows: tuple[LayerRow, ...]) -> dict[str, Any]:
    """Return rows of layers for the browser: their total, the colours of the categories, and the rows with texts."""
    return {
        "total": sum(row.total for row in rows),
        "categories": [{"name": kind.text, "colour": COLOURS[kind]} for kind in Category],
        "rows": [_layer(row) for row in rows],
    }


def _layer(row: LayerRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "label": NOT_IN_A_LAYER if row.name == tables.NO_LAYER else row.label,
        "kind": row.kind,
        "count": row.layers,
        "size": size_text(row.total),
        "each": each_text(row),
        "sizes": row.sizes,
        "children": [_layer(child) for child in row.children],
        "members": [_layer(member) for member in row.members],
    }


def live_tensors(tape: Tape, row: int, count: int = 300) -> list[dict[str, Any]]:
    """Return the tensors alive after a row in groups of equal ones, the largest groups first.

    `bytes` is the total of a group; all other values are text: size, each, tensor (shape and dtype), category, colour,
    layer, op, stream (empty where all blocks are on one), and a `Line`.
    """
    if row < 0:
        return []
    streams = has_streams(tape)
    return [
        {
            "bytes": group.total,
            "size": size_text(group.total),
            "each": f"{group.count:,} × {size_text(group.size)}" if group.count > 1 else "",
            "tensor": tensor_text(group.shape, group.dtype) if group.dtype else "",
            **_category(group.category),
            "layer": group.layer,
            "op": group.op,
            "stream": stream_text(group.stream) if streams else "",
            **code_line(group.line)._asdict(),
        }
        for group in tables.tensor_groups(tape, row, count).itertuples(name="Group")
    ]


def live_lines(tape: Tape, row: int, count: int = 300) -> list[dict[str, Any]]:
    """Return the lines of code with the most memory alive after a row.

    `bytes` is a number; all other values are text: size, blocks, category, colour, and a `Line`.
    """
    if row < 0:
        return []
    table = groups.by_line(tape, row).head(count)
    return [
        {
            "bytes": int(size),
            "size": size_text(int(size)),
            "blocks": f"{blocks:,}",
            **_category(category),
            **code_line(line)._asdict(),
        }
        for size, blocks, category, line in zip(*(table[name] for name in table.columns), strict=True)
    ]


def growth_table(tape: Tape, count: int = 50) -> dict[str, Any]:
    """Return the memory that grew from step to step: `text`, titles of at most three `steps`, and `rows` of text."""
    table = growth.growth(tape)
    steps, unit = growth.shown_steps(table), periods(tape).unit.capitalize()
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
    return {"text": growth.growth_text(tape), "steps": [f"{unit} {step}" for step in steps], "rows": rows}


def _category(category: str) -> dict[str, str]:
    return {"category": category, "colour": _COLOUR_OF[category]}
