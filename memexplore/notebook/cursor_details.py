"""A moment of a Tape for a person: where it lies in the run, and which tensors were alive."""

from __future__ import annotations

import linecache
from typing import Any, NamedTuple

from IPython.core.getipython import get_ipython

from memexplore.analysis import curves, groups, tables
from memexplore.figures.palette import COLOURS
from memexplore.tape import Category, Phase, Tape
from memexplore.units import size_text

_COLOUR_OF = {category.text: COLOURS[category] for category in Category}


class Line(NamedTuple):
    """A line of code: where it stands, and its text ("" where the file is not here)."""

    place: str
    code: str


def code_line(line: str) -> Line:
    """The line of code for ``file:line``; a cell of this notebook is called as tracebacks call it.

    >>> code_line("train.py:7")
    Line(place='train.py, line 7', code='')
    >>> code_line("")
    Line(place='', code='')
    """
    if not line:
        return Line("", "")
    filename, _, number = line.rpartition(":")
    if not number.isdigit():  # the autograd engine has nodes in place of lines
        return Line(line, "")
    shell = get_ipython()
    # Newer shells tell how a cell's file is called in a traceback: ("Cell", "In[3]").
    name = getattr(shell.compile, "format_code_name", lambda _: None)(filename) if shell is not None else None
    place = name[1] if name else filename.replace("\\", "/").rsplit("/", 1)[-1]
    return Line(f"{place}, line {number}", linecache.getline(filename, int(number)).strip())


def moment_text(tape: Tape, row: int) -> str:
    """Where a row lies in the run, and what was allocated after it.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [2048], "step": [1], "phase": [Phase.FORWARD]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> moment_text(tape, 0)
    'At the peak · event 0 · step 1, forward · 2.00 KiB allocated'
    """
    if row < 0:
        return "No memory was allocated."
    step, phase, module = int(tape.step[row]), Phase(int(tape.phase[row])), int(tape.module[row])
    place = f"step {step}" if step else "set-up"
    if phase is not Phase.OTHER:
        place += f", {phase.text}"
    if module >= 0:
        place += f" of {tape.modules[module]}"
    allocated = size_text(int(curves.curve(tape, "allocated")[row]))
    peak = "At the peak · " if row == curves.peak(tape)[1] else ""
    return f"{peak}event {row:,} · {place} · {allocated} allocated"


def lines(tape: Tape, row: int, count: int = 50) -> list[dict[str, str]]:
    """Who was alive after a row, by line, in words: `size`, `blocks`, `category`, `colour`, `place` and `code`."""
    if row < 0:
        return []
    table = groups.by_line(tape, row).head(count)
    words = []
    for size, blocks, category, line in zip(*(table[name] for name in table.columns), strict=True):
        told = code_line(line)
        words.append(
            {
                "size": size_text(int(size)),
                "blocks": f"{blocks:,}",
                "category": category,
                "colour": _COLOUR_OF[category],
                "place": told.place,
                "code": told.code,
            }
        )
    return words


def growing(tape: Tape, count: int = 50) -> dict[str, Any]:
    """What grew from step to step: `text`, `steps` (at most three of them), and `rows` of words."""
    table = groups.growth(tape)
    steps = [column for column in table.columns if isinstance(column, int)]
    told = [*steps[:1], *steps[1:-1][-1:], *steps[-1:]] if len(steps) > 1 else steps
    rows = []
    for entry in table.head(count).to_dict("records"):
        line = code_line(entry["line"])
        rows.append(
            {
                "grew": f"+{size_text(int(entry['grew']))}",
                "category": entry["category"],
                "colour": _COLOUR_OF[entry["category"]],
                "layer": entry["layer"],
                "sizes": [size_text(int(entry[step])) for step in told],
                "place": line.place,
                "code": line.code,
            }
        )
    return {"text": groups.growth_text(tape), "steps": [f"Step {step}" for step in told], "rows": rows}


def alive(tape: Tape, row: int, count: int = 50) -> list[dict[str, str]]:
    """The largest tensors alive after a row, as words: `size`, `category`, `colour`, `layer`, `op`, `place`, `code`."""
    if row < 0:
        return []
    table = tables.tensors(tape, row, count)
    words = []
    for tensor in table.itertuples():
        line = code_line(tensor.line)
        words.append(
            {
                "size": size_text(tensor.size),
                "category": tensor.category,
                "colour": _COLOUR_OF[tensor.category],
                "layer": tensor.layer,
                "op": tensor.op,
                "place": line.place,
                "code": line.code,
            }
        )
    return words
