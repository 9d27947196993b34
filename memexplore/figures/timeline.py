"""The timeline: allocated memory stacked by category, event by event, with what the device reserves and has."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from memexplore.analysis.curves import by_category, curve, peak
from memexplore.figures import bands
from memexplore.figures.alignment import matching_rows, matching_window
from memexplore.figures.hover import hover_texts
from memexplore.figures.palette import CAPACITY, COLOURS, FONT, GRID, RESERVED, Theme, byte_ticks
from memexplore.figures.scale import scale
from memexplore.tape import Action, Category, Phase, Tape
from memexplore.units import size_text

Window = tuple[float, float] | None
"""First and last row shown, None for all; numbers between rows are taken outwards."""

HEIGHT = 460
BEFORE = "before"
"""The name of the outline of an earlier tape."""
OUTLINE = "rgba(128,128,128,0.7)"
DEFAULT_WIDTH = 640
"""Pixels of a timeline in a notebook on a page of 900: what labels must fit where the width is not told."""
_MARGINS = {"l": 76, "r": 24, "t": 64, "b": 56}
_STRIP_PIXELS = 16
_SWATCH, _LEGEND_LINE = 46, 20
"""Pixels of an entry of the legend beside its text, and of a line of entries."""
_HEADROOM = 1.2
_PHASE_SHADES = {
    Phase.FORWARD: "rgba(128,128,128,0.12)",
    Phase.BACKWARD: "rgba(128,128,128,0.24)",
    Phase.OPTIMIZER: "rgba(128,128,128,0.38)",
}


def window_rows(tape: Tape, window: Window) -> tuple[int, int]:
    """First and last row of a window, cut to the tape."""
    last = max(len(tape) - 1, 0)
    if window is None:
        return 0, last
    low, high = sorted(window)
    first = int(min(max(np.floor(low), 0), last))
    return first, int(min(max(np.ceil(high), first), last))


def timeline_arrays(tape: Tape, window: Window = None, points: int = 2000) -> dict[str, NDArray[np.float64]]:
    """What the timeline draws in a window of rows: float arrays of one length, at most `points` long.

    `row`, then bytes after each of these rows: every category under its text (`Category.text`), `allocated` (their
    sum) and `reserved`. A window with more rows than points is cut into even stretches and each keeps its first
    row, its highest and lowest allocated and its highest reserved; the highest of each category in the window is kept
    too, so no maximum is lost.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512], "size": [10, 20]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> timeline_arrays(tape)["allocated"].tolist()
    [10.0, 30.0]

    Raises ValueError for fewer than 32 points, and where the tape is not placed.
    """
    if points < 32:
        raise ValueError(f"{points} points are too few to draw a timeline: ask for 32 or more")
    first, last = window_rows(tape, window)
    part = slice(first, last + 1)
    by_kind, reserved = by_category(tape, window=part), curve(tape, "reserved")[part]
    allocated = by_kind.sum(axis=0)
    kept = _kept(allocated, reserved, by_kind, points)
    arrays = {"row": (kept + first).astype(np.float64)}
    arrays |= {kind.text: by_kind[kind, kept].astype(np.float64) for kind in Category}
    arrays["allocated"], arrays["reserved"] = allocated[kept].astype(np.float64), reserved[kept].astype(np.float64)
    return arrays


def _kept(
    allocated: NDArray[np.int64], reserved: NDArray[np.int64], by_kind: NDArray[np.int64], points: int
) -> NDArray[np.int64]:
    count = len(allocated)
    if count <= points:
        return np.arange(count)
    extra = [0, count - 1, *np.argmax(by_kind, axis=1).tolist()]
    stretches = (points - len(extra)) // 4
    length = -(-count // stretches)
    full = -(-count // length)
    begins = np.arange(full) * length
    # The last stretch is filled up with its own last value, which changes neither its highest nor its lowest.
    filled = np.pad(np.stack([allocated, -allocated, reserved]), ((0, 0), (0, full * length - count)), mode="edge")
    extremes = np.argmax(filled.reshape(3, full, length), axis=2) + begins
    return np.unique(np.minimum(np.concatenate([begins, extremes.ravel(), extra]), count - 1))


def window_layout(
    tape: Tape, window: Window = None, width: int = DEFAULT_WIDTH, before: Tape | None = None
) -> dict[str, Any]:
    """The parts of the layout that depend on the window: `xaxis`, `yaxis`, `shapes` and `annotations`.

    The height of the y axis is that of the whole tape, so that zooming does not change what a height means. Labels are
    those that have room on a figure of `width` pixels.
    """
    first, last = window_rows(tape, window)
    shown = (first, last)
    heights = scale(tape, 0 if before is None else peak(before)[0])
    # Labels stand above all lines, so none is crossed.
    top = heights.ceiling * _HEADROOM
    values, texts = byte_ticks(heights.ceiling)
    shapes: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    _add_bands(tape, shown, shapes, annotations, width - _MARGINS["l"] - _MARGINS["r"])
    peak_right = heights.row - first > (last - first) / 2
    side: dict[str, Any]
    if heights.capacity_text:
        # The capacity is told on the side where the peak is not.
        side = {"x": 0.005, "xanchor": "left"} if peak_right else {"x": 0.995, "xanchor": "right"}
        side |= {"y": 1, "yref": "paper", "yshift": -10}
        if heights.capacity is not None:
            y = (heights.capacity, heights.capacity)
            shapes.append(_line(x=(0, 1), y=y, xref="paper", colour=CAPACITY, width=2, dash="solid"))
            side |= {"y": heights.capacity, "yref": "y", "yshift": 9}
        annotations.append(_note(heights.capacity_text, xref="paper", colour=CAPACITY, **side))
    if first <= heights.row <= last:
        # A line of out of memory may stand right beside the peak.
        shift = -8 if np.any(tape.action == Action.OOM) else 10
        side = {"xanchor": "right", "xshift": shift} if peak_right else {"xanchor": "left", "xshift": -shift}
        text = f"<b>peak {size_text(heights.allocated)}</b>"
        annotations.append(_note(text, x=heights.row, y=heights.label, yshift=11, size=12, **side))
    oom = np.flatnonzero(tape.action == Action.OOM)
    for row in oom[(oom >= first) & (oom <= last)][-1:].tolist():
        right = row - first > (last - first) / 2
        side = {"xanchor": "right", "xshift": -5} if right else {"xanchor": "left", "xshift": 5}
        shapes.append(_line(x=(row, row), y=(0, 1), yref="paper", colour=CAPACITY, width=2, dash="dot"))
        text = f"<b>out of memory: {size_text(int(tape.size[row]))} asked for</b>"
        annotations.append(_note(text, x=row, y=1, yref="paper", yshift=-10, colour=CAPACITY, size=12, **side))
    return {
        # Left alone, plotly would mark half events.
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


def _note(text: str, *, colour: str | None = None, size: int = 11, **place: Any) -> dict[str, Any]:
    font = {"size": size, **({"color": colour} if colour else {})}
    return {"text": text, "showarrow": False, "font": font, "xanchor": "center", "yanchor": "middle", **place}


def _add_bands(
    tape: Tape, shown: tuple[int, int], shapes: list[dict[str, Any]], annotations: list[dict[str, Any]], pixels: int
) -> None:
    """A line at each step, a strip of phases above the plot, and the labels that have room."""
    step_bands, phase_bands = bands.steps(tape, shown), bands.phases(tape, shown)
    pixels_a_row = pixels / max(shown[1] - shown[0], 1)
    # Borders closer than this are a grey wall, not information.
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
            if band.phase is not None and (band.last - band.first) * pixels_a_row >= 0.5
        ]
        annotations += [
            _note(band.text, x=(band.first + band.last) / 2, y=1, yref="paper", yshift=_STRIP_PIXELS / 2, size=10)
            for band in bands.with_visible_label(phase_bands, shown, pixels, letter=6)
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
    """What `timeline` draws as plain `data` and `layout`: a plotly figure checks every value, which takes its time."""
    traces = timeline_traces(tape, window, points)
    allocated = trace_by_name(traces, "allocated")
    allocated |= hover_fields(tape, allocated["x"])
    if before is not None:
        traces.insert(-1, outline_trace(before, tape, window, points // 2))
    return {"data": traces, "layout": timeline_layout(tape, window, theme, width, before)}


def timeline_traces(tape: Tape, window: Window = None, points: int = 2000) -> list[dict[str, Any]]:
    """The traces of a timeline, from the bottom up; the last is the peak, before which an outline goes.

    None tells the mouse anything: the texts take longer to make than all the rest (`hover_fields`).
    """
    arrays = timeline_arrays(tape, window, points)
    rows = arrays["row"]
    steps_like = {"shape": "hv"}
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "x": rows,
            "y": arrays[kind.text],
            "name": kind.text,
            "stackgroup": "allocated",
            "mode": "lines",
            "line": {**steps_like, "width": 0, "color": COLOURS[kind]},
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
            "line": {**steps_like, "width": 0.5, "color": RESERVED},
            # The mouse is heard, and told nothing.
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
            "line": {**steps_like, "width": 1.5, "color": RESERVED, "dash": "dash"},
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
    """What the `allocated` trace of these rows needs to tell the mouse of each."""
    return {"text": hover_texts(tape, rows), "hoverinfo": "text", "hovertemplate": "%{text}<extra></extra>"}


def trace_by_name(traces: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The trace of a name."""
    return next(trace for trace in traces if trace["name"] == name)


def timeline_layout(
    tape: Tape,
    window: Window = None,
    theme: Theme = Theme.ANY,
    width: int = DEFAULT_WIDTH,
    before: Tape | None = None,
) -> dict[str, Any]:
    """The layout of a timeline, with room for the outline of another tape."""
    changing = window_layout(tape, window, width, before)
    names = [kind.text for kind in _occurring(tape)] + ["reserved"] + [BEFORE] * (before is not None)
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
        "shapes": changing["shapes"],
        "annotations": changing["annotations"],
        "xaxis": {
            "title": {"text": "event"},
            "showgrid": False,
            "zeroline": False,
            "tickformat": ",d",
            "showspikes": True,
            "spikemode": "across",
            # plotly edges a spike with two pixels more; with -2 the edge is gone and the line one pixel wide.
            "spikethickness": -2,
            "spikedash": "solid",
            "spikecolor": RESERVED,
            **changing["xaxis"],
        },
        "yaxis": {
            "title": {"text": f"allocated, {tape.meta.source}"},
            "gridcolor": GRID,
            "zerolinecolor": GRID,
            "fixedrange": True,
            **changing["yaxis"],
        },
    }


def _occurring(tape: Tape) -> list[Category]:
    born = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING))
    there = set(np.unique(tape.category[born & (tape.size > 0)]).tolist())
    return [kind for kind in Category if kind in there]


def _legend_below(names: list[str], width: int) -> dict[str, Any]:
    """The legend below the title of the axis, and margins that leave it the lines which it needs at a width."""
    room, widths = width - _MARGINS["l"] - _MARGINS["r"], [_SWATCH + 6.5 * len(name) for name in names]
    # plotly gives all entries the width of the longest as soon as one line is too short for them.
    lines = 1 if sum(widths) <= room else -(-len(names) // max(int(room // max(widths)), 1))
    bottom = _MARGINS["b"] + _LEGEND_LINE * lines
    y = -(_MARGINS["b"] - 2) / (HEIGHT - _MARGINS["t"] - bottom)
    legend = {"orientation": "h", "x": 0, "y": y, "yanchor": "top", "traceorder": "normal"}
    return {"legend": legend, "margin": {**_MARGINS, "b": bottom}}


def outline_trace(before: Tape, tape: Tape, window: Window = None, points: int = 1000) -> dict[str, Any]:
    """The allocated curve of another tape, each of its moments where the tape has the same moment."""
    arrays = timeline_arrays(before, matching_window(window, tape, before), max(points, 32))
    return {
        "type": "scatter",
        "x": matching_rows(arrays["row"], before, tape),
        "y": arrays["allocated"],
        "name": BEFORE,
        "mode": "lines",
        "line": {"shape": "hv", "width": 2, "color": OUTLINE},
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
    """The timeline of a tape: allocated bytes by category over the events, which stand evenly, with or without a clock.

    Traces, by `name`: the categories that occur (stacked), `allocated` (their sum, which carries the hover texts),
    `reserved` and `peak`; capacity, steps and phases are shapes with annotations. `window` is the first and last
    row shown, `points` the most points of a trace (`timeline_arrays`), `width` the pixels that labels must fit. The
    allocated curve of the tape `before` is a pale outline, stretched so that equal phases lie on each other.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> [trace.name for trace in timeline(tape).data]
    ['unknown', 'allocated', 'reserved', 'peak']

    Raises ValueError as `timeline_arrays` does.
    """
    return go.Figure(timeline_dict(tape, window, points, theme, width, before))
