"""Timeline of a Tape: allocated bytes stacked by category over the events, with reserved bytes and capacity."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from memexplore.analysis.curves import by_category, curve, peak
from memexplore.analysis.verdict import failed_request
from memexplore.figures import bands
from memexplore.figures.alignment import matching_rows, matching_window
from memexplore.figures.hover import hover_texts
from memexplore.figures.palette import CAPACITY, COLOURS, FONT, GRID, RESERVED, Theme, byte_ticks
from memexplore.figures.scale import scale
from memexplore.tape import Action, Category, Phase, Tape
from memexplore.units import size_text

Window = tuple[float, float] | None
"""First and last row shown, None for all rows; the first is rounded down and the last up."""

HEIGHT = 460
OUTLINE_NAME = "before"
"""Trace name of the allocated curve of an earlier tape."""
_OUTLINE_COLOUR = "rgba(128,128,128,0.7)"
DEFAULT_WIDTH = 640
"""Pixels of a timeline in a notebook page of 900; assumed when the caller gives no width."""
_MARGINS = {"l": 76, "r": 24, "t": 64, "b": 56}
_STRIP_PIXELS = 16
_SWATCH_PIXELS, _LEGEND_LINE_PIXELS = 46, 20
"""Width of a legend entry without its text, and height of a line of entries."""
_HEADROOM = 1.2
"""Top of the y axis relative to the highest line, which leaves space for labels."""
_PHASE_SHADES = {
    Phase.FORWARD: "rgba(128,128,128,0.12)",
    Phase.BACKWARD: "rgba(128,128,128,0.24)",
    Phase.OPTIMIZER: "rgba(128,128,128,0.38)",
}


def window_rows(tape: Tape, window: Window) -> tuple[int, int]:
    """Return the first and last row of a window, cut to the tape."""
    last = max(len(tape) - 1, 0)
    if window is None:
        return 0, last
    low, high = sorted(window)
    first = int(min(max(np.floor(low), 0), last))
    return first, int(min(max(np.ceil(high), first), last))


def timeline_arrays(tape: Tape, window: Window = None, points: int = 2000) -> dict[str, NDArray[np.float64]]:
    """Return the curves of the timeline in a window: float arrays of equal length, at most `points` long.

    Keys: `row`, and the bytes after these rows: each category by its text (`Category.text`), `allocated` (their sum)
    and `reserved`. A window with more rows than points is divided into equal intervals; kept are the first row of each
    interval, the rows of its highest and lowest allocated and of its highest reserved, and the row of the highest value
    of each category in the window. So no maximum is lost.

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
    allocated = by_kind.sum(axis=0)
    kept = _kept_positions(allocated, reserved, by_kind, points)
    arrays = {"row": (kept + first).astype(np.float64)}
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


def window_layout(
    tape: Tape, window: Window = None, width: int = DEFAULT_WIDTH, before: Tape | None = None
) -> dict[str, Any]:
    """Return the parts of the layout that depend on the window: `xaxis`, `yaxis`, `shapes` and `annotations`.

    The y axis has the range of the whole tape, so zooming does not change the vertical scale. Only labels that fit into
    a figure of `width` pixels are included.
    """
    first, last = window_rows(tape, window)
    shown = (first, last)
    heights = scale(tape, 0 if before is None else peak(before)[0])
    # Labels are placed above all lines, so no line crosses them.
    top = heights.ceiling * _HEADROOM
    values, texts = byte_ticks(heights.ceiling)
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    _add_bands(tape, shown, shapes, annotations, width - _MARGINS["l"] - _MARGINS["r"])
    peak_in_right_half = heights.row - first > (last - first) / 2
    side: dict[str, Any]
    if heights.capacity_text:
        # The label of the capacity is on the side opposite the peak.
        side = {"x": 0.005, "xanchor": "left"} if peak_in_right_half else {"x": 0.995, "xanchor": "right"}
        side |= {"y": 1, "yref": "paper", "yshift": -10}
        if heights.capacity is not None:
            y = (heights.capacity, heights.capacity)
            shapes.append(_line(x=(0, 1), y=y, xref="paper", colour=CAPACITY, width=2, dash="solid"))
            side |= {"y": heights.capacity, "yref": "y", "yshift": 9}
        annotations.append(_note(heights.capacity_text, xref="paper", colour=CAPACITY, **side))
    if first <= heights.row <= last:
        # The line of an out-of-memory event may be right beside the peak.
        shift = -8 if np.any(tape.action == Action.OOM) else 10
        side = {"xanchor": "right", "xshift": shift} if peak_in_right_half else {"xanchor": "left", "xshift": -shift}
        text = f"<b>peak {size_text(heights.allocated)}</b>"
        annotations.append(_note(text, x=heights.row, y=heights.label, yshift=11, size=12, **side))
    oom = np.flatnonzero(tape.action == Action.OOM)
    for row in oom[(oom >= first) & (oom <= last)][-1:].tolist():
        in_right_half = row - first > (last - first) / 2
        side = {"xanchor": "right", "xshift": -5} if in_right_half else {"xanchor": "left", "xshift": 5}
        shapes.append(_line(x=(row, row), y=(0, 1), yref="paper", colour=CAPACITY, width=2, dash="dot"))
        caught = "" if row == failed_request(tape) else "caught "
        text = f"<b>{caught}out of memory: {size_text(int(tape.size[row]))} requested</b>"
        annotations.append(_note(text, x=row, y=1, yref="paper", yshift=-10, colour=CAPACITY, size=12, **side))
    return {
        # Without dtick plotly would put ticks between events.
        "xaxis": {"range": [first, max(last, first + 1)], "dtick": 1 if last - first < 8 else None},
        "yaxis": {"range": [0, top], "tickvals": values, "ticktext": texts},
        "shapes": shapes,
        "annotations": annotations,
    }


def _line(
    *, x: tuple[float, float], y: tuple[float, float], colour: str, width: float, dash: str, **more: Any
) -> dict[str, Any]:
    line = {"color": colour, "width": width, "dash": dash}
    return {"type": "line", "x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1], "line": line, **more}


def _note(text: str, *, colour: str | None = None, size: int = 11, **position: Any) -> dict[str, Any]:
    font = {"size": size, **({"color": colour} if colour else {})}
    return {"text": text, "showarrow": False, "font": font, "xanchor": "center", "yanchor": "middle", **position}


def _add_bands(
    tape: Tape, shown: tuple[int, int], shapes: list[dict[str, Any]], annotations: list[dict[str, Any]], pixels: int
) -> None:
    """Add a line at the start of each step, a strip of phases above the plot, and the labels that fit."""
    step_bands, phase_bands = bands.steps(tape, shown), bands.phases(tape, shown)
    pixels_per_row = pixels / max(shown[1] - shown[0], 1)
    # Lines closer than 8 pixels would merge into a grey area.
    if len(step_bands) * 8 <= pixels:
        shapes += [
            _line(x=(band.first, band.first), y=(0, 1), yref="paper", colour=GRID, width=1, dash="dot")
            for band in step_bands
            if band.first > shown[0]
        ]
    if len(phase_bands) * 4 <= pixels:
        shapes += [
            {
                "type": "rect",
                "x0": band.first,
                "x1": band.last,
                "y0": 0,
                "y1": _STRIP_PIXELS,
                "yref": "paper",
                "ysizemode": "pixel",
                "yanchor": 1,
                "fillcolor": _PHASE_SHADES[band.phase],
                "line": {"width": 0},
            }
            for band in phase_bands
            if band.phase is not None and (band.last - band.first) * pixels_per_row >= 0.5
        ]
        annotations += [
            _note(band.text, x=(band.first + band.last) / 2, y=1, yref="paper", yshift=_STRIP_PIXELS / 2, size=10)
            for band in bands.with_visible_label(phase_bands, shown, pixels, letter_pixels=6)
        ]
    annotations += [
        _note(band.text, x=(band.first + band.last) / 2, y=1, yref="paper", yshift=_STRIP_PIXELS + 10, size=11)
        for band in bands.with_visible_label(step_bands, shown, pixels)
    ]


def timeline_dict(
    tape: Tape,
    window: Window = None,
    points: int = 2000,
    theme: Theme = Theme.ANY,
    width: int = DEFAULT_WIDTH,
    before: Tape | None = None,
) -> dict[str, Any]:
    """Return the figure of `timeline` as a dictionary, without the slow validation of plotly."""
    traces = timeline_traces(tape, window, points)
    allocated = trace_by_name(traces, "allocated")
    allocated |= hover_fields(tape, allocated["x"])
    if before is not None:
        traces.insert(-1, outline_trace(before, tape, window, points // 2))
    return {"data": traces, "layout": timeline_layout(tape, window, theme, width, before)}


def timeline_traces(tape: Tape, window: Window = None, points: int = 2000) -> list[dict[str, Any]]:
    """Return the traces of a timeline in drawing order: categories, allocated, reserved, peak.

    The traces have no hover texts, which take longer to compute than everything else (`hover_fields`).
    """
    arrays = timeline_arrays(tape, window, points)
    rows = arrays["row"]
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
    traces.append(
        {
            "type": "scatter",
            "x": rows,
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
            "x": [row] if row >= 0 else [],
            "y": [allocated] if row >= 0 else [],
            "name": "peak",
            "mode": "markers",
            "marker": {"symbol": "circle", "size": 9, "color": CAPACITY, "line": {"width": 1.5, "color": "white"}},
            "hoverinfo": "skip",
            "showlegend": False,
            "cliponaxis": False,
        }
    )
    return traces


def hover_fields(tape: Tape, rows: NDArray[Any]) -> dict[str, Any]:
    """Return the fields of the `allocated` trace with one hover text per row."""
    return {"text": hover_texts(tape, rows), "hoverinfo": "text", "hovertemplate": "%{text}<extra></extra>"}


def trace_by_name(traces: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the trace with this name."""
    return next(trace for trace in traces if trace["name"] == name)


def timeline_layout(
    tape: Tape,
    window: Window = None,
    theme: Theme = Theme.ANY,
    width: int = DEFAULT_WIDTH,
    before: Tape | None = None,
) -> dict[str, Any]:
    """Return the layout of a timeline, with a legend entry for the outline of the tape `before`."""
    window_parts = window_layout(tape, window, width, before)
    names = [kind.text for kind in _occurring(tape)] + ["reserved"] + [OUTLINE_NAME] * (before is not None)
    return {
        "height": HEIGHT,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": theme.value},
        "hovermode": "x",
        "hoverlabel": {
            "bgcolor": "#222222",
            "bordercolor": "#888888",
            "font": {"color": "#ffffff", "size": 12, "family": FONT},
            "align": "left",
        },
        **_legend_below(names, width),
        "dragmode": "zoom",
        "shapes": window_parts["shapes"],
        "annotations": window_parts["annotations"],
        "xaxis": {
            "title": {"text": "event"},
            "showgrid": False,
            "zeroline": False,
            "tickformat": ",d",
            "showspikes": True,
            "spikemode": "across",
            # plotly draws a border of two more pixels around a spike; -2 removes it and leaves a line of one pixel.
            "spikethickness": -2,
            "spikedash": "solid",
            "spikecolor": RESERVED,
            **window_parts["xaxis"],
        },
        "yaxis": {
            "title": {"text": f"allocated, {tape.meta.source}"},
            "gridcolor": GRID,
            "zerolinecolor": GRID,
            "fixedrange": True,
            **window_parts["yaxis"],
        },
    }


def _occurring(tape: Tape) -> list[Category]:
    """Return the categories with at least one byte."""
    is_alloc = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING))
    present = set(np.unique(tape.category[is_alloc & (tape.size > 0)]).tolist())
    return [kind for kind in Category if kind in present]


def _legend_below(names: list[str], width: int) -> dict[str, Any]:
    """Return a legend below the axis title, and margins with space for its lines at a figure width in pixels."""
    available, widths = width - _MARGINS["l"] - _MARGINS["r"], [_SWATCH_PIXELS + 6.5 * len(name) for name in names]
    # plotly gives every entry the width of the longest one as soon as the entries need more than one line.
    lines = 1 if sum(widths) <= available else -(-len(names) // max(int(available // max(widths)), 1))
    bottom = _MARGINS["b"] + _LEGEND_LINE_PIXELS * lines
    y = -(_MARGINS["b"] - 2) / (HEIGHT - _MARGINS["t"] - bottom)
    legend = {"orientation": "h", "x": 0, "y": y, "yanchor": "top", "traceorder": "normal"}
    return {"legend": legend, "margin": {**_MARGINS, "b": bottom}}


def outline_trace(before: Tape, tape: Tape, window: Window = None, points: int = 1000) -> dict[str, Any]:
    """Return the allocated curve of another tape, drawn at the matching rows of the tape (`matching_rows`)."""
    arrays = timeline_arrays(before, matching_window(window, tape, before), max(points, 32))
    return {
        "type": "scatter",
        "x": matching_rows(arrays["row"], before, tape),
        "y": arrays["allocated"],
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
) -> go.Figure:
    """Return the timeline of a tape: allocated bytes by category over the events, which have equal distances.

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
    return go.Figure(timeline_dict(tape, window, points, theme, width, before))
