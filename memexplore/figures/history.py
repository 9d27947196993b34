"""Draw the history of a watched run: peak, reserved and remaining bytes of its steps.

The widget draws the same figure while the run goes on: it fills the traces by name (`frontend/history.js`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from memexplore.figures.palette import CAPACITY, COLOURS, FONT, GRID, RESERVED, Theme, byte_ticks, escaped
from memexplore.tape import Category

HEIGHT = 176
HEADROOM = 1.2
"""Top of the vertical axis relative to the highest value."""
_MAX_DRAWN_CAPACITY = 2.5
"""A capacity above this multiple of the highest peak would flatten the curves, so it is not drawn."""
_FEW = 12
"""Number of steps up to which each has its number, so that plotly writes none twice."""
_PEAK, _AFTER = COLOURS[Category.ACTIVATION], COLOURS[Category.PARAMETER]
CURVES = {
    "reserved": ("peak_reserved", RESERVED, "dot"),
    "peak": ("peak", _PEAK, "solid"),
    "after the step": ("after", _AFTER, "solid"),
}
"""Name of a curve -> its column, its colour and the dashes of its line, from the highest one to the lowest."""
SYMBOLS = {
    "rise": ("diamond", CAPACITY, "peak rose"),
    "evaluation": ("square-open", RESERVED, "validation"),
    "skipped": ("x-thin-open", RESERVED, "step skipped"),
    "failed": ("x", CAPACITY, "failed"),
    "knobs": ("triangle-up", COLOURS[Category.GRADIENT], "setting changed"),
}
"""Kind of a mark -> its symbol, its colour and its name in the legend."""

Columns = Mapping[str, np.ndarray[Any, Any]]


def history_figure(
    columns: Columns, marks: Sequence[Mapping[str, Any]] = (), capacity: int | None = None, theme: Theme = Theme.ANY
) -> go.Figure:
    """Return minimum, median and maximum of each curve over the steps, with the marked steps.

    `columns` has ``first`` and ``last`` (numbers of steps) and for each curve its median under its name, with ``_low``
    and ``_high`` its minimum and maximum, in bytes. `marks` have a step, a kind (`SYMBOLS`) and a text. A curve has two
    traces, `NAME range` (a band from minimum to maximum) and `NAME` (the medians).

    >>> ones = np.ones(2)
    >>> columns = {"first": ones, "last": ones} | {
    ...     name + suffix: ones for name in ("peak", "peak_reserved", "after") for suffix in ("", "_low", "_high")}
    >>> [trace.name for trace in history_figure(columns).data][:4]
    ['reserved range', 'reserved', 'peak range', 'peak']
    """
    figure = go.Figure()
    steps = (np.asarray(columns["first"]) + np.asarray(columns["last"])) / 2
    for name, (column, colour, dash) in CURVES.items():
        low, high = columns[f"{column}_low"], columns[f"{column}_high"]
        band = {"x": np.concatenate([steps, steps[::-1]]), "y": np.concatenate([high, low[::-1]])}
        hidden: dict[str, Any] = {"hoverinfo": "skip", "showlegend": False, "line": {"width": 0}, "fill": "toself"}
        figure.add_scatter(name=f"{name} range", **band, fillcolor=_pale(colour), mode="lines", **hidden)
        line = {"color": colour, "width": 1.6, "dash": dash, "shape": "linear"}
        figure.add_scatter(name=name, x=steps, y=columns[column], mode="lines", line=line, hovertemplate="%{y}")
    heights = dict(zip(steps.tolist(), np.asarray(columns["peak_high"]).tolist(), strict=True))
    for kind, (symbol, colour, title) in SYMBOLS.items():
        of_kind = [mark for mark in marks if mark["kind"] == kind]
        figure.add_scatter(
            name=title,
            x=[mark["step"] for mark in of_kind],
            y=[heights.get(float(mark["step"]), 0.0) for mark in of_kind],
            text=[escaped(f"step {mark['step']:,}: {mark['text']}") for mark in of_kind],
            mode="markers",
            marker={"symbol": symbol, "color": colour, "size": 8, "line": {"width": 1.5, "color": colour}},
            hovertemplate="%{text}<extra></extra>",
            showlegend=bool(of_kind),
            cliponaxis=False,  # a mark of the first step is on the border
        )
    figure.update_layout(_layout(columns, capacity, theme))
    return figure


def _layout(columns: Columns, capacity: int | None, theme: Theme) -> dict[str, Any]:
    highest = max(
        (
            float(np.nanmax(values))
            for name, (column, *_) in CURVES.items()
            if _some(values := columns[f"{column}_high"])
        ),
        default=1.0,
    )
    shapes = []
    if capacity is not None and capacity <= _MAX_DRAWN_CAPACITY * highest:
        line = {"color": CAPACITY, "width": 2}
        shapes.append({"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": capacity, "y1": capacity, "line": line})
        highest = max(highest, capacity)
    ticks, texts = byte_ticks(highest, most=4)
    return {
        "height": HEIGHT,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": theme.value},
        "margin": {"l": 76, "r": 24, "t": 6, "b": 30},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "#222222", "bordercolor": "#888888", "font": {"color": "#ffffff", "size": 12}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        "dragmode": "select",
        "selectdirection": "h",
        "shapes": shapes,
        "xaxis": {
            "showgrid": False,
            "zeroline": False,
            "tickformat": ",d",
            "dtick": 1 if len(columns["last"]) and columns["last"][-1] <= _FEW else None,
            "title": {"text": ""},
            "fixedrange": True,
        },
        "yaxis": {
            "gridcolor": GRID,
            "zerolinecolor": GRID,
            "fixedrange": True,
            "range": [0, highest * HEADROOM],
            "tickvals": ticks,
            "ticktext": texts,
            "ticklabelstandoff": 6,  # beside a mark on the border
        },
    }


def _some(values: np.ndarray[Any, Any]) -> bool:
    return bool(len(values)) and not bool(np.isnan(values).all())


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.28)"
