"""Group the memory of a Tape after a row by line, layer and category."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import Rows, block_bytes, live_rows
from memexplore.analysis.tables import NO_LAYER, user_line
from memexplore.tape import Category, Tape

if TYPE_CHECKING:
    import pandas

KEYS = ["layer", "line", "category"]
UNKNOWN_LINE = "(no stack)"


def layer_names(tape: Tape) -> NDArray[np.object_]:
    """Return the name of each module, and as the last one, for index -1, that of no layer."""
    return np.array([*(name or NO_LAYER for name in tape.modules), NO_LAYER], dtype=object)


def line_names(tape: Tape, stacks: NDArray[np.int32]) -> NDArray[np.object_]:
    """Return the user's line of some stacks, given by their numbers."""
    # Each of these stacks once: a tape can have many more.
    stacks, numbers = np.unique(stacks, return_inverse=True)
    names = [(user_line(tape.stacks[stack]) if stack >= 0 else "") or UNKNOWN_LINE for stack in stacks.tolist()]
    return np.array(names, dtype=object)[numbers]


def category_names(tape: Tape, rows: Rows) -> NDArray[np.object_]:
    """Return the category of some rows as text."""
    return np.array([kind.text for kind in Category], dtype=object)[tape.category[rows]]


def keys(tape: Tape, rows: Rows) -> pandas.DataFrame:
    """Return layer, line and category of some rows as text."""
    import pandas

    return pandas.DataFrame(
        {
            "layer": layer_names(tape)[tape.module[rows]],
            "line": line_names(tape, tape.stack[rows]),
            "category": category_names(tape, rows),
        }
    )


def by_line(tape: Tape, row: int | None = None) -> pandas.DataFrame:
    """Return allocated bytes after a row (default: the peak allocated) by line of the user's code, largest first.

    Columns `size` (allocated bytes), `count` (blocks), `category` (the category with most bytes), `line`; `size` sums
    to the allocated bytes after the row.

    >>> from memexplore.tape import Frame, Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20], "stack": [0, 0]},
    ...                          stacks=[(Frame("train.py", 7, "step"),)], meta=Meta(Source.MEASURED, "cpu"))
    >>> by_line(tape)[["size", "count", "line"]].to_numpy().tolist()
    [[30, 2, 'train.py:7']]

    Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
    """
    rows = live_rows(tape, row)
    table = keys(tape, rows)
    table["size"] = block_bytes(tape)[rows]
    table = table[table["size"] > 0]
    kinds = table.groupby(["line", "category"])["size"].sum().sort_values(ascending=False, kind="stable").reset_index()
    largest = kinds.drop_duplicates("line").set_index("line")["category"]
    result = table.groupby("line").agg(size=("size", "sum"), count=("size", "size"))
    result["category"] = largest
    result = result.reset_index().sort_values("size", ascending=False, kind="stable", ignore_index=True)
    return result[["size", "count", "category", "line"]]
