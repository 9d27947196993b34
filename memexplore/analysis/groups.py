"""Memory of a Tape grouped by line, layer and category: after a row, from step to step, and in two tapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import Rows, block_bytes, curve, lifetimes, live_rows, peak
from memexplore.analysis.tables import NO_LAYER, user_line
from memexplore.analysis.verdict import Verdict, caught_text, failed_request, verdict
from memexplore.tape import Action, Category, Ending, Tape
from memexplore.units import difference_text, size_text

if TYPE_CHECKING:
    import pandas

_COMPARED_STEPS = 100
_KEYS = ["layer", "line", "category"]
UNKNOWN_LINE = "(no stack)"


def _keys(tape: Tape, rows: Rows) -> pandas.DataFrame:
    """Return layer, line and category of some rows as text."""
    import pandas

    lines = np.array([*(user_line(stack) or UNKNOWN_LINE for stack in tape.stacks), UNKNOWN_LINE], dtype=object)
    layers = np.array([*(name or NO_LAYER for name in tape.modules), NO_LAYER], dtype=object)
    kinds = np.array([kind.text for kind in Category], dtype=object)
    return pandas.DataFrame(
        {"layer": layers[tape.module[rows]], "line": lines[tape.stack[rows]], "category": kinds[tape.category[rows]]}
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
    table = _keys(tape, rows)
    table["size"] = block_bytes(tape)[rows]
    table = table[table["size"] > 0]
    kinds = table.groupby(["line", "category"])["size"].sum().sort_values(ascending=False, kind="stable").reset_index()
    largest = kinds.drop_duplicates("line").set_index("line")["category"]
    result = table.groupby("line").agg(size=("size", "sum"), count=("size", "size"))
    result["category"] = largest
    result = result.reset_index().sort_values("size", ascending=False, kind="stable", ignore_index=True)
    return result[["size", "count", "category", "line"]]


def growth(tape: Tape) -> pandas.DataFrame:
    """Return the groups whose memory grows from step to step, as in a leak, most growth first.

    Columns `layer`, `line`, `category`, one column per step (its number) with the allocated bytes at the end of that
    step, and `grew`, last minus first. Only groups that never shrink and that grow at least twice are included (once if
    two steps are compared): what a program allocates once and keeps, such as the state of a second optimizer, is no
    leak. The first step is warm-up, because it allocates gradients and optimizer state, and an unfinished last step is
    ignored, so the table is empty for fewer than three steps. Of more than 100 steps 100 are compared, evenly spread.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"address": [0, 512, 1024], "size": [10, 10, 10], "step": [1, 2, 3]}
    >>> growth(Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cpu")))["grew"].tolist()
    [10]

    Raises ValueError for a tape that is not placed.
    """
    import pandas

    ends = _step_ends(tape)[1:]
    if len(ends) > _COMPARED_STEPS:
        ends = [ends[at] for at in np.linspace(0, len(ends) - 1, _COMPARED_STEPS).round().astype(int).tolist()]
    numbers = [int(tape.step[row]) for row in ends]
    life = lifetimes(tape)
    sizes = block_bytes(tape)[life.born]
    held = {
        number: np.where((life.born <= row) & (life.requested > row), sizes, 0)
        for number, row in zip(numbers, ends, strict=True)
    }
    keys = _keys(tape, life.born)
    table = keys.join(pandas.DataFrame(held, index=keys.index))
    grown = table.groupby(_KEYS, as_index=False)[numbers].sum() if len(numbers) else table.iloc[:0]
    values = grown[numbers].to_numpy(np.int64).reshape(len(grown), len(numbers))
    grown = grown.assign(grew=values[:, -1] - values[:, 0] if len(numbers) else [])
    changes = np.diff(values, axis=1)
    grows = np.count_nonzero(changes > 0, axis=1) >= min(2, max(changes.shape[1], 1))
    grown = grown[np.all(changes >= 0, axis=1) & grows]
    return grown.sort_values("grew", ascending=False, kind="stable", ignore_index=True)


def _step_ends(tape: Tape) -> list[int]:
    """Return the last row of each finished training step."""
    inside = np.flatnonzero(tape.step > 0)
    if not len(inside):
        return []
    # The rows of a step need not be one behind the other: a thread has the step of its own.
    _, from_end = np.unique(tape.step[inside][::-1], return_index=True)
    ends = np.sort(inside[len(inside) - 1 - from_end]).tolist()
    if len(ends) > 1:
        phases = [set(np.unique(tape.phase[tape.step == tape.step[row]]).tolist()) for row in ends[-2:]]
        if phases[0] - phases[1] or np.any(tape.action[ends[-2] :] == Action.OOM):
            ends.pop()
    return ends


def shown_steps(table: pandas.DataFrame) -> list[int]:
    """Return the steps that a narrow table of `growth` shows: the first, the second last and the last.

    >>> import pandas
    >>> shown_steps(pandas.DataFrame(columns=["layer", "line", "category", 2, 3, 4, 5, "grew"]))
    [2, 4, 5]
    """
    steps = [column for column in table.columns if isinstance(column, int)]
    return sorted({*steps[:1], *steps[-2:]})


def growth_text(tape: Tape) -> str:
    """Return the growth as one sentence, empty if nothing grew."""
    table = growth(tape)
    if not len(table):
        return ""
    first, last = (int(table[column].sum()) for column in (table.columns[3], table.columns[-2]))
    steps = [column for column in table.columns if isinstance(column, int)]
    return (
        f"{size_text(first)} at the end of step {steps[0]} grew to {size_text(last)} at the end of step "
        f"{steps[-1]}, {difference_text(first, last)}: look for a leak, such as a list that keeps tensors."
    )


def oom_text(tape: Tape) -> str:
    """Return the request that ended the run, the free memory and its largest holders as text; empty without one.

    Raises ValueError for a tape that is not placed.
    """
    row = failed_request(tape)
    if row < 0:
        return ""
    request, reserved, allocated = int(tape.size[row]), int(curve(tape, "reserved")[row]), int(curve(tape)[row])
    text = f"A request for {size_text(request)} failed"
    if tape.stack[row] >= 0:
        text += f" at {user_line(tape.stacks[tape.stack[row]])}"
    free = reserved - int(curve(tape, "active")[row])
    left = f"{size_text(free)} free inside the segments in gaps too small for it" if free else "nothing free in them"
    if tape.meta.capacity is not None:
        left = f"{size_text(max(tape.meta.capacity - reserved, 0))} of the device left and {left}"
    text += f": {size_text(reserved)} reserved, {left}."
    if tape.meta.ending is Ending.COMPLETED:
        text += " The program caught the error and allocated nothing afterwards."
    held = by_line(tape, row).head(3)
    if len(held):
        owners = [
            f"{line} ({size_text(size)}, {category})"
            for size, category, line in zip(held["size"].tolist(), held["category"], held["line"], strict=True)
        ]
        text += f" The largest holders of the {size_text(allocated)} allocated: {', '.join(owners)}."
    return text


def ending_text(tape: Tape) -> str:
    """Return what explains the end of a run: the failed request, caught errors, assumptions before an error; or "".

    Raises ValueError for a tape that is not placed.
    """
    texts = [oom_text(tape), caught_text(tape)]
    assumed = [note.removeprefix("assumed: ") for note in tape.meta.notes if note.startswith("assumed: ")]
    if assumed and verdict(tape) is Verdict.ERROR:
        texts.append(f"Assumed before the error: {'; '.join(assumed)}.")
    return " ".join(filter(None, texts))


def diff(before: Tape, after: Tape) -> pandas.DataFrame:
    """Return the difference of two tapes at their peaks allocated by layer, line and category, largest change first.

    Columns `layer`, `line`, `category`, `before`, `after` (allocated bytes) and `difference`; `before` sums to the peak
    of the first tape and `after` to the peak of the second. The tapes may come from any two runs.

    >>> from memexplore.tape import Meta, Source
    >>> short = Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> long = Tape.from_columns({"address": [0, 512], "size": [10, 30]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> diff(short, long)[["before", "after", "difference"]].to_numpy().tolist()
    [[10, 40, 30]]

    Raises ValueError for a tape that is not placed.
    """
    import pandas

    sides = []
    for name, tape in (("before", before), ("after", after)):
        rows = live_rows(tape)
        table = _keys(tape, rows)
        table[name] = block_bytes(tape)[rows]
        sides.append(table.groupby(_KEYS)[name].sum())
    result = pandas.concat(sides, axis=1).fillna(0).astype(np.int64)
    result["difference"] = result["after"] - result["before"]
    result = result[(result["before"] > 0) | (result["after"] > 0)].reset_index()
    order: NDArray[np.int64] = np.argsort(-result["difference"].abs().to_numpy(), kind="stable")
    return result.iloc[order].reset_index(drop=True)


def diff_text(before: Tape, after: Tape) -> str:
    """Return the two peaks allocated as text: ``before -> after (difference with sign and per cent)``.

    >>> from memexplore.tape import Meta, Source
    >>> short = Tape.from_columns({"address": [0], "size": [1024]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> long = Tape.from_columns({"address": [0], "size": [2048]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> diff_text(short, long)
    'Peak 1.00 KiB -> 2.00 KiB allocated (+1.00 KiB, +100 %)'

    Raises ValueError for a tape that is not placed.
    """
    first, second = peak(before)[0], peak(after)[0]
    change = difference_text(first, second).replace(" (", ", ").rstrip(")")
    return f"Peak {size_text(first)} -> {size_text(second)} allocated ({change})"
