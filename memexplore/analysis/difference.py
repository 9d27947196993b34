"""Compare two tapes: a DataFrame of differences that shows itself as a sentence and bars."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas
from numpy.typing import NDArray

from memexplore.analysis.curves import block_bytes, live_rows
from memexplore.analysis.groups import KEYS, keys
from memexplore.tape import Tape
from memexplore.tape.methods import method
from memexplore.text.units import difference_text, size_text

_PRINTED = 20
"""Rows that `print` shows."""


class Difference(pandas.DataFrame):
    """The table of `diff`. What is selected from it is a plain DataFrame."""

    @property
    def _constructor(self) -> Callable[..., pandas.DataFrame]:
        return pandas.DataFrame

    @property
    def text(self) -> str:
        """The two peaks allocated, and the difference with its sign and in per cent."""
        before, after = int(self["before"].sum()), int(self["after"].sum())
        change = difference_text(before, after).replace(" (", ", ").rstrip(")")
        return f"Peak {size_text(before)} → {size_text(after)} allocated ({change})"

    def __repr__(self) -> str:
        changed = int((self["difference"] != 0).sum())
        return f"<Difference: {self.text} · {changed} of {len(self)} groups of layer, line and category differ>"

    def __str__(self) -> str:
        table = pandas.DataFrame(self).head(_PRINTED)
        for column in ("before", "after", "difference"):
            table[column] = [size_text(size) for size in table[column].tolist()]
        return f"{self.text}\n{table.to_string(index=False)}" if len(self) else self.text

    def _repr_html_(self) -> str:
        return str(method("difference_html")(self))


def diff(before: Tape, after: Tape) -> Difference:
    """Return the difference of two tapes at their peaks allocated by layer, line and category, largest change first.

    Columns `layer`, `line`, `category`, `before`, `after` (allocated bytes) and `difference`; `before` sums to the peak
    of the first tape and `after` to the peak of the second. The tapes may come from any two runs.

    >>> from memexplore.tape import Meta, Source
    >>> short = Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> long = Tape.from_columns({"address": [0, 512], "size": [10, 30]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> diff(short, long)[["before", "after", "difference"]].to_numpy().tolist()
    [[10, 40, 30]]
    >>> diff(short, long)
    <Difference: Peak 10 B → 40 B allocated (+30 B, +300 %) · 1 of 1 groups of layer, line and category differ>

    Raises ValueError for a tape that is not placed.
    """
    sides = []
    for name, tape in (("before", before), ("after", after)):
        rows = live_rows(tape)
        table = keys(tape, rows)
        table[name] = block_bytes(tape)[rows]
        sides.append(table.groupby(KEYS)[name].sum())
    result = pandas.concat(sides, axis=1).fillna(0).astype(np.int64)
    result["difference"] = result["after"] - result["before"]
    result = result[(result["before"] > 0) | (result["after"] > 0)].reset_index()
    order: NDArray[np.int64] = np.argsort(-result["difference"].abs().to_numpy(), kind="stable")
    return Difference(result.iloc[order].reset_index(drop=True))
