"""Messages of a watched run to its page: rows and bins of steps become columns, a session becomes words and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from memexplore.analysis.places import name_cells
from memexplore.analysis.verdict_content import TIGHT, Level
from memexplore.live.leaks import Leak
from memexplore.live.live import State
from memexplore.live.thinning import Bin
from memexplore.ranks.rows import NUMBERS, StepRow, numbers
from memexplore.text.units import size_text

CURVES = {
    "peak": "peak_allocated",
    "peak_reserved": "peak_reserved",
    "after": "allocated_after",
    "reserved": "reserved_after",
    "outside": "outside",
    "seconds": "seconds",
}
"""Name of a column of the page -> the number of a step that it has."""
_HIGH = 0.03
"""Cost of watching from which pictures come more rarely, as at the begin of a run, whose first pictures cost most."""
_POSITIONS = {name: NUMBERS.index(number) for name, number in CURVES.items()}
_TITLES = {State.WATCHING: "Live", State.PAUSED: "Paused", State.ENDED: "Ended", State.FAILED: "Failed"}


class Following(NamedTuple):
    """Which steps a page shows."""

    step: int | None = None
    """The recorded step in the timeline, None before there is one."""
    newest: bool = True
    """Whether the timeline follows the newest recorded step."""
    pinned: int | None = None
    """The step drawn as an outline, None for the recorded step before the one shown."""
    before: int | None = None
    """The step drawn as an outline now."""
    is_leak_ignored: bool = False
    form: Literal["page", "line"] = "page"
    """Whether the page shows the run as a single line."""


def share_of_pictures(overhead: float) -> float:
    """Return the share of the time that tapes, and also tabs, take at most where watching costs the share `overhead`.

    >>> share_of_pictures(0.012), share_of_pictures(0.05)
    (0.01, 0.002)
    """
    return 0.01 if overhead < _HIGH else 0.002


def columns(bins: Sequence[Bin[StepRow]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return bins as columns of floats: ``first``, ``last``, and minimum, median and maximum of each curve.

    Numbers that no step of a bin has are NaN.

    >>> row = StepRow(3, 0.5, peak_allocated=8)
    >>> found = columns([Bin(3, 3, 1, numbers(row), numbers(row), numbers(row), row)])
    >>> found["first"].tolist(), found["peak_high"].tolist(), found["reserved"].tolist()
    ([3.0], [8.0], [nan])
    """
    made = {
        name: np.array([getattr(step_bin, name) for step_bin in bins], dtype=np.float64) for name in ("first", "last")
    }
    for name, position in _POSITIONS.items():
        for part, suffix in (("low", "_low"), ("middle", ""), ("high", "_high")):
            made[name + suffix] = np.array([getattr(step_bin, part)[position] for step_bin in bins], dtype=np.float64)
    return made


def single_bins(rows: Sequence[StepRow]) -> list[Bin[StepRow]]:
    """Return one bin for each step."""
    bins = []
    for row in rows:
        values = numbers(row)
        bins.append(Bin(row.step, row.step, 1, values, values, values, row))
    return bins


def marks(rows: Sequence[StepRow], before: StepRow | None = None) -> list[dict[str, Any]]:
    """Return what the history marks: steps whose peak rose, that failed, that were skipped, and validations.

    Of consecutive steps whose peaks rise for the same reason, as with a leak, the first one is marked. `before` is the
    step before `rows`.

    >>> marks([StepRow(1, 0.1, rose_because="first step"), StepRow(2, 0.1), StepRow(3, 0.1, skipped=True)])
    [{'step': 1, 'kind': 'rise', 'text': 'first step'}, {'step': 3, 'kind': 'skipped', 'text': 'step skipped'}]
    """
    marked = []
    kinds = ["" if before is None else _kind(before), *map(_kind, rows)]
    for row, kind, kind_before in zip(rows, kinds[1:], kinds, strict=False):
        if row.error:
            marked.append(_mark(row, "failed", name_cells(row.error)))
        elif kind and kind != kind_before:
            marked.append(_mark(row, "rise", row.rose_because))
        elif row.skipped:
            marked.append(_mark(row, "skipped", "step skipped"))
        elif row.evaluations:
            marked.append(_mark(row, "evaluation", f"{row.evaluations} calls without gradients"))
    return marked


def _kind(row: StepRow) -> str:
    """Return the reason of a rise without its particulars, empty without a rise."""
    return row.rose_because.partition(":")[0]


def _mark(row: StepRow, kind: str, text: str) -> dict[str, Any]:
    return {"step": row.step, "kind": kind, "text": text}


def words(
    state: State,
    rows: Sequence[StepRow],
    worst: StepRow | None,
    *,
    capacity: int | None,
    device: str,
    overhead: float,
    leak: Leak | None,
    held_by: Sequence[str],
    error: str,
    notes: Sequence[str],
    pending: str = "",
) -> dict[str, Any]:
    """Return the texts and numbers of the bar above the timeline.

    `rows` are recent steps, the newest last, `worst` is the step with the highest peak so far, and `pending` says which
    setting a later step gets.

    >>> row = StepRow(7, 0.5, peak_allocated=3072, reserved_after=4096, allocated_after=1024)
    >>> bar = words(State.WATCHING, [row], row, capacity=8192, device="T4", overhead=0.012, leak=None, held_by=(),
    ...     error="", notes=())
    >>> bar["headline"], bar["peak"], bar["worst"], bar["cost"]
    ('Step 7 · 500 ms a step', 'Peak 3.00 KiB of 8.00 KiB, 38 %', 'highest 3.00 KiB in step 7', 'watching costs 1.2 %')
    """
    newest = rows[-1] if rows else None
    highest = (worst.peak_allocated or 0) if worst is not None else 0
    needed = max(highest, (worst.peak_reserved or 0) if worst is not None else 0)
    return {
        "state": str(state),
        "title": _TITLES[state],
        "headline": _headline(state, rows) + (f" · {pending}" if pending else ""),
        "cost": f"watching costs {_percent(overhead)}",
        "peak": _peak_text(newest, capacity),
        "memory": _memory_text(newest),
        "worst": f"highest {size_text(highest)} in step {worst.step:,}" if worst is not None and highest else "",
        "level": _level(state, needed, capacity, leak),
        "device": device,
        "used": float((newest.peak_allocated or 0) if newest is not None else 0),
        "highest": float(highest),
        "capacity": None if capacity is None else float(capacity),
        "leak": None if leak is None else _leak(leak, held_by),
        "error": name_cells(error),
        "notes": list(notes),
    }


def _leak(leak: Leak, held_by: Sequence[str]) -> dict[str, Any]:
    return {"text": leak.text, "line": leak.line, "held_by": [name_cells(text) for text in held_by]}


def _headline(state: State, rows: Sequence[StepRow]) -> str:
    if not rows:
        return "No step" if state in (State.ENDED, State.FAILED) else "Waiting for the first step"
    light = sorted(row.seconds for row in rows[-20:] if not row.recorded) or sorted(row.seconds for row in rows[-20:])
    return f"Step {rows[-1].step:,} · {duration_text(light[len(light) // 2])} a step"


def duration_text(seconds: float) -> str:
    """Return seconds with three digits.

    >>> duration_text(0.41234), duration_text(2.5), duration_text(125)
    ('412 ms', '2.50 s', '125 s')
    """
    if seconds < 0.9995:
        milliseconds = seconds * 1000
        return f"{milliseconds:.{max(0, 2 - len(str(int(milliseconds))) + 1)}f} ms"
    return f"{seconds:.{max(0, 3 - len(str(int(seconds))))}f} s"


def _peak_text(row: StepRow | None, capacity: int | None) -> str:
    if row is None or row.peak_allocated is None:
        return ""
    if not capacity:
        return f"Peak {size_text(row.peak_allocated)}"
    return f"Peak {size_text(row.peak_allocated)} of {size_text(capacity)}, {_percent(row.peak_allocated / capacity)}"


def _memory_text(row: StepRow | None) -> str:
    if row is None:
        return ""
    parts = {
        "after the step": row.allocated_after,
        "reserved": row.reserved_after,
        "free in the cache": row.free_in_cache,
        "outside the allocator": row.outside,
        "other processes": row.other_processes or None,
    }
    return " · ".join(f"{name} {size_text(size)}" for name, size in parts.items() if size is not None)


def _level(state: State, needed: int, capacity: int | None, leak: Leak | None) -> str:
    if state is State.FAILED:
        return Level.ERROR
    if leak is not None:
        return Level.GROWING
    if capacity is None:
        return Level.NONE
    return Level.TIGHT if needed > (1 - TIGHT) * capacity else Level.FITS


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.0995 else f"{100 * share:.0f} %"


def rises(rows: Sequence[StepRow], shown: int | None) -> dict[str, Any]:
    """Return the table of steps at which the peak rose, and why; the step that is shown is marked."""
    cells = [[f"{row.step:,}", size_text(row.peak_allocated or 0), row.rose_because] for row in rows]
    marked = [{"cells": texts, "current": row.step == shown} for texts, row in zip(cells, rows, strict=True)]
    titles = ["Step", "Peak", "The peak rose because"]
    return {"kind": "table", "titles": titles, "align": ["right", "right", "left"], "rows": marked}


def steps_text(following: Following, names: Mapping[int, str]) -> str:
    """Return which steps the timeline shows; `names` are the reasons why steps were recorded.

    >>> steps_text(Following(step=8, before=3), {8: "every n-th step"})
    'Step 8 (every n-th step) · outline: step 3'
    """
    if following.step is None:
        return "No step recorded completely yet"
    why = names.get(following.step, "")
    shown = f"Step {following.step:,}" + (f" ({why})" if why else "")
    if following.before is None:
        return shown
    pinned = ", pinned" if following.before == following.pinned else ""
    return f"{shown} · outline: step {following.before:,}{pinned}"
