"""Draw the timeline of a Tape: allocated bytes stacked by category, with reserved bytes, capacity and hover texts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from memexplore.analysis.curves import by_category, curve, lifetimes, peak
from memexplore.analysis.picture import refused
from memexplore.analysis.streams import has_streams, stream_text
from memexplore.figures import timeline_layout
from memexplore.figures.alignment import matching_rows, matching_window
from memexplore.figures.palette import CAPACITY, COLOURS, RESERVED, Theme, escaped
from memexplore.figures.positions import DEFAULT_X, Positions, XChoice, has_clock, positions
from memexplore.figures.timeline_layout import DEFAULT_WIDTH, Window, window_rows
from memexplore.tape import Action, Category, Phase, Tape
from memexplore.text.units import size_text

OVER_CAPACITY = "over capacity"
"""Trace name of the part of the allocated bytes above the capacity, which is hatched."""
REQUESTED = "requested"
"""Trace name of the request that ended the run, hatched on top of what was allocated."""
OUTLINE_NAME = "before"
"""Trace name of the allocated curve of an earlier tape."""
_OUTLINE_COLOUR = "rgba(128,128,128,0.7)"


def timeline_arrays(
    tape: Tape, window: Window = None, points: int = 2000, places: Positions | None = None
) -> dict[str, NDArray[np.float64]]:
    """Return the curves of the timeline in a window: float arrays of equal length, at most `points` long.

    Keys: `row`, and the bytes after these rows: each category by its text (`Category.text`), `allocated` (their sum)
    and `reserved`. A window with more rows than points is divided into equal intervals; kept are the first row of each
    interval, the rows of its highest and lowest allocated and of its highest reserved, and the row of the highest value
    of each category in the window. So no maximum is lost. Rows without a place of their own in `places` are left out.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> timeline_arrays(tape)["allocated"].tolist()
    [10.0, 30.0]

    Raises ValueError for fewer than 32 points or a tape that is not placed.
    """
    if points < 32:
        raise ValueError(f"{points} points are too few to draw a timeline: give 32 or more")
    first, last = window_rows(tape, window)
    part = slice(first, last + 1)
    by_kind, reserved = by_category(tape, window=part), curve(tape, "reserved")[part]
    shown = np.arange(first, last + 1)
    if places is not None and places.folds:
        shown = shown[places.is_shown(shown)]
        by_kind, reserved = by_kind[:, shown - first], reserved[shown - first]
    allocated = by_kind.sum(axis=0)
    kept = _kept_positions(allocated, reserved, by_kind, points)
    arrays = {"row": shown[kept].astype(np.float64)}
    arrays |= {kind.text: by_kind[kind, kept].astype(np.float64) for kind in Category}
    arrays["allocated"], arrays["reserved"] = allocated[kept].astype(np.float64), reserved[kept].astype(np.float64)
    return arrays


def _kept_positions(
    allocated: NDArray[np.int64], reserved: NDArray[np.int64], by_kind: NDArray[np.int64], points: int
) -> NDArray[np.int64]:
    """Return the positions that `timeline_arrays` keeps, ascending."""
    count = len(allocated)
    if count <= points:
        return np.arange(count)
    always = [0, count - 1, *np.argmax(by_kind, axis=1).tolist()]
    intervals = (points - len(always)) // 4
    length = -(-count // intervals)
    interval_count = -(-count // length)
    starts = np.arange(interval_count) * length
    # Padding the last interval with its last value changes neither its highest nor its lowest value.
    missing = interval_count * length - count
    padded = np.pad(np.stack([allocated, -allocated, reserved]), ((0, 0), (0, missing)), mode="edge")
    extremes = np.argmax(padded.reshape(3, interval_count, length), axis=2) + starts
    return np.unique(np.minimum(np.concatenate([starts, extremes.ravel(), always]), count - 1))


def timeline_dict(
    tape: Tape,
    window: Window = None,
    points: int = 2000,
    theme: Theme = Theme.ANY,
    width: int = DEFAULT_WIDTH,
    before: Tape | None = None,
    x: XChoice = DEFAULT_X,
) -> dict[str, Any]:
    """Return the figure of `timeline` as a dictionary, without the slow validation of plotly."""
    traces = timeline_traces(tape, window, points, x)
    allocated = trace_by_name(traces, "allocated")
    allocated |= hover_fields(tape, allocated["customdata"])
    if before is not None:
        traces.insert(-1, outline_trace(before, tape, window, points // 2, x))
    return {"data": traces, "layout": layout(tape, window, theme, width, before, x)}


def layout(
    tape: Tape,
    window: Window = None,
    theme: Theme = Theme.ANY,
    width: int = DEFAULT_WIDTH,
    before: Tape | None = None,
    x: XChoice = DEFAULT_X,
    surface: timeline_layout.Surface = timeline_layout.Surface.FIGURE,
) -> dict[str, Any]:
    """Return the layout of a timeline, with a legend entry for the outline of the tape `before`."""
    names = [kind.text for kind in _occurring(tape)] + ["reserved"] + [OUTLINE_NAME] * (before is not None)
    names += [OVER_CAPACITY] * _is_over(tape) + [REQUESTED] * (refused(tape) is not None)
    other_peak = 0 if before is None else peak(before)[0]
    return timeline_layout.timeline_layout(tape, names, window, theme, width, other_peak, x, surface)


def timeline_traces(
    tape: Tape, window: Window = None, points: int = 2000, x: XChoice = DEFAULT_X
) -> list[dict[str, Any]]:
    """Return the traces of a timeline in drawing order: categories, over capacity, allocated, reserved, peak.

    The traces have no hover texts, which take longer to compute than everything else (`hover_fields`). `customdata` of
    the trace `allocated` are the rows.
    """
    places = positions(tape, x)
    arrays = timeline_arrays(tape, window, points, places)
    rows = places.x(arrays["row"])
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "x": rows,
            "y": arrays[kind.text],
            "name": kind.text,
            "stackgroup": "allocated",
            "mode": "lines",
            "line": {"shape": "hv", "width": 0, "color": COLOURS[kind]},
            "fillcolor": COLOURS[kind],
            "hoverinfo": "skip",
        }
        for kind in _occurring(tape)
    ]
    if _is_over(tape):
        below = np.minimum(arrays["allocated"], tape.meta.capacity or 0)
        traces += _hatched(OVER_CAPACITY, rows, below, arrays["allocated"])
    if (end := refused(tape)) is not None and arrays["row"][-1] == len(tape) - 1:
        ends = np.array([float(rows[-1]), timeline_layout.end_of_request(places)])
        traces += _hatched(
            REQUESTED, ends, np.full(2, float(end.allocated)), np.full(2, float(end.allocated + end.requested))
        )
    traces.append(
        {
            "type": "scatter",
            "x": rows,
            "customdata": arrays["row"],
            "y": arrays["allocated"],
            "name": "allocated",
            "mode": "lines",
            "line": {"shape": "hv", "width": 0.5, "color": RESERVED},
            # plotly sends hover events and shows no label.
            "hoverinfo": "none",
            "showlegend": False,
        }
    )
    traces.append(
        {
            "type": "scatter",
            "x": rows,
            "y": arrays["reserved"],
            "name": "reserved",
            "mode": "lines",
            "line": {"shape": "hv", "width": 1.5, "color": RESERVED, "dash": "dash"},
            "hoverinfo": "skip",
        }
    )
    allocated, row = peak(tape)
    traces.append(
        {
            "type": "scatter",
            "x": places.x([row]).tolist() if row >= 0 else [],
            "y": [allocated] if row >= 0 else [],
            "customdata": [row] if row >= 0 else [],
            "name": "peak",
            "mode": "markers",
            "marker": {"symbol": "circle", "size": 9, "color": CAPACITY, "line": {"width": 1.5, "color": "white"}},
            "hoverinfo": "skip",
            "showlegend": False,
            "cliponaxis": False,
        }
    )
    return traces


def _is_over(tape: Tape) -> bool:
    """Return whether more was allocated than the capacity, as in the whole run of a tape that does not fit."""
    return tape.meta.capacity is not None and peak(tape)[0] > tape.meta.capacity


def _hatched(
    name: str, x: NDArray[np.float64], below: NDArray[np.float64], top: NDArray[np.float64]
) -> list[dict[str, Any]]:
    """Return an invisible area, and a hatched one from there to the top."""
    common = {"type": "scatter", "x": x, "stackgroup": name, "mode": "lines", "hoverinfo": "skip"}
    line = {"shape": "hv", "width": 0, "color": CAPACITY}
    return [
        {
            **common,
            "y": below,
            "name": f"below {name}",
            "line": line,
            "fillcolor": "rgba(0,0,0,0)",
            "showlegend": False,
        },
        {
            **common,
            "y": top - below,
            "name": name,
            "line": line,
            "fillcolor": "rgba(0,0,0,0)",
            "fillpattern": {"shape": "/", "fgcolor": CAPACITY, "size": 8, "solidity": 0.3},
        },
    ]


def hover_fields(tape: Tape, rows: NDArray[Any]) -> dict[str, Any]:
    """Return the fields of the `allocated` trace with one hover text per row."""
    return {"text": hover_texts(tape, rows), "hoverinfo": "text", "hovertemplate": "%{text}<extra></extra>"}


def trace_by_name(traces: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the trace with this name."""
    return next(trace for trace in traces if trace["name"] == name)


def _occurring(tape: Tape) -> list[Category]:
    """Return the categories with at least one byte."""
    is_alloc = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING))
    present = set(np.unique(tape.category[is_alloc & (tape.size > 0)]).tolist())
    return [kind for kind in Category if kind in present]


def outline_trace(
    before: Tape, tape: Tape, window: Window = None, points: int = 1000, x: XChoice = DEFAULT_X
) -> dict[str, Any]:
    """Return the allocated curve of another tape, drawn at the matching rows of the tape (`matching_rows`).

    Of the steps that match folded ones the last is drawn. Rows after the last row are left out.
    """
    arrays = timeline_arrays(before, matching_window(window, tape, before), max(points, 32))
    places, rows = positions(tape, x), matching_rows(arrays["row"], before, tape)
    shown = rows <= max(len(tape) - 1, 0)
    for fold in places.folds:
        rows, is_shown = fold.last_step(rows)
        shown &= is_shown
    return {
        "type": "scatter",
        "x": places.x(rows[shown]),
        "y": arrays["allocated"][shown],
        "name": OUTLINE_NAME,
        "mode": "lines",
        "line": {"shape": "hv", "width": 2, "color": _OUTLINE_COLOUR},
        "hoverinfo": "skip",
    }


def timeline(
    tape: Tape,
    window: Window = None,
    points: int = 2000,
    theme: Theme = Theme.ANY,
    width: int = DEFAULT_WIDTH,
    before: Tape | None = None,
    x: XChoice = DEFAULT_X,
) -> go.Figure:
    """Return the timeline of a tape: allocated bytes by category over events, time or layers (`positions`).

    Traces by `name`: the categories of the tape (stacked), `allocated` (their sum, with the hover texts), `reserved`
    and `peak`; capacity, steps and phases are shapes with annotations. `window` is the first and last row shown,
    `points` the maximum number of points per trace (`timeline_arrays`), `width` the pixels that labels must fit into.
    With the tape `before`, its allocated curve is an outline, aligned by steps and phases (`matching_rows`).

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> [trace.name for trace in timeline(tape).data]
    ['unknown', 'allocated', 'reserved', 'peak']

    Raises ValueError as `timeline_arrays` does.
    """
    return go.Figure(timeline_dict(tape, window, points, theme, width, before, x))


# --- hover texts ------------------------------------------------------------------------------------------------------

_BLOCKS = (Action.ALLOC, Action.PREEXISTING, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM)
"""Rows of blocks, which have a stream."""


def hover_texts(tape: Tape, rows: NDArray[Any]) -> list[str]:
    """Return a text for each of some ascending rows: the event, tensor, layer and op, and the bytes of each category.

    The text of a free has the tensor, layer and op that its block was allocated for. Only measured tapes with a clock
    have times.
    """
    rows = np.asarray(rows, dtype=np.int64)
    if not len(rows):
        return []
    span = slice(int(rows[0]), int(rows[-1]) + 1)
    by_kind = by_category(tape, window=span)[:, rows - span.start]
    is_timed = has_clock(tape)
    alloc_rows = _alloc_rows(tape)[rows].tolist()
    # Sizes such as those of the parameters repeat in most rows.
    cached_size_text, kinds = functools.cache(size_text), [(kind, kind.text) for kind in reversed(Category)]
    modules, ops, tensors = ([*map(escaped, names)] for names in (tape.modules, tape.ops, tape.tensor_texts))
    texts = []
    for row, alloc_row, sizes in zip(rows.tolist(), alloc_rows, by_kind.T.tolist(), strict=True):
        step, phase = int(tape.step[row]), Phase(int(tape.phase[row]))
        location = [f"step {step}" if step else "set-up", *([phase.text] if phase is not Phase.OTHER else [])]
        if is_timed:
            location.append(f"{tape.time[row] / 1e6:.1f} ms")
        lines = [", ".join(location), _event_text(tape, row, alloc_row)]
        if tape.tensor[alloc_row] >= 0:
            lines.append(tensors[tape.tensor[alloc_row]])
        for name, table, number in (("layer", modules, tape.module[alloc_row]), ("op", ops, tape.op[alloc_row])):
            if number >= 0 and table[number]:
                lines.append(f"{name}: {table[number]}")
        if has_streams(tape) and tape.action[alloc_row] in _BLOCKS:
            lines.append(stream_text(int(tape.stream[alloc_row])))
        lines.append(f"<b>{cached_size_text(sum(sizes))} allocated</b>")
        lines += [f"{cached_size_text(sizes[kind])} {text}" for kind, text in kinds if sizes[kind]]
        texts.append("<br>".join(lines))
    return texts


def _alloc_rows(tape: Tape) -> NDArray[np.int64]:
    """Return for each free the row that allocated its block, for each other row the row itself."""
    life = lifetimes(tape)
    alloc_rows = np.arange(len(tape) + 1)
    for freed in (life.completed, life.requested):
        is_free = np.isin(tape.action[np.minimum(freed, len(tape) - 1)], (Action.FREE_REQUESTED, Action.FREE_COMPLETED))
        alloc_rows[freed[is_free]] = life.born[is_free]
    return alloc_rows[:-1]


def _event_text(tape: Tape, row: int, alloc_row: int) -> str:
    action, size = Action(int(tape.action[row])), size_text(int(tape.size[alloc_row]))
    kind = Category(int(tape.category[alloc_row])).text
    texts = {
        Action.ALLOC: f"+{size} {kind}",
        Action.PREEXISTING: f"{size} {kind}, allocated before recording",
        Action.FREE_REQUESTED: f"−{size} {kind}",
        Action.FREE_COMPLETED: f"free of {size} {kind} completed",
        Action.OOM: f"out of memory: {size} requested",
        Action.MARK: "start of step or phase",
    }
    return texts.get(action, f"{action.name.lower().replace('_', ' ')} of {size}")
