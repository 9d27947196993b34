"""The trade-off: what every setting that was tried costs in time and needs in memory, and the frontier."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from memexplore.analysis.tradeoffs import Point, frontier
from memexplore.figures.palette import CAPACITY, FITS, FONT, GRID, RESERVED, Theme, byte_ticks, escaped
from memexplore.tape import Source
from memexplore.units import size_text

HEIGHT = 460
_FAR = 2.5
"""A capacity more than this many times the highest point would squash the picture, so it is told in words; a setting
that much slower than half of them stands at the right edge with its number beside it."""
_HEADROOM = 1.15


class XAxis(enum.Enum):
    """What the horizontal axis shows; the value is its title."""

    TIME = "expected time of a sample, as written = 1"
    FLOPS = "FLOPs of a sample, as written = 1"

    def of(self, point: Point) -> float:
        """The point's place on the axis."""
        return point.slow_down if self is XAxis.TIME else 1 + point.extra_flops


def setting_hover_text(point: Point, capacity: int | None = None) -> str:
    """What the mouse is told of a setting.

    >>> setting_hover_text(Point("precision bf16", 0.5, 0.0, 1024, True), 2048)
    '<b>precision bf16</b><br>1.00 KiB reserved, 1.00 KiB to spare<br>0.50 times the time, +0 % FLOPs'
    """
    room = ""
    if capacity is not None:
        spare = capacity - point.peak_reserved
        room = f", {size_text(abs(spare))} {'to spare' if spare >= 0 else 'too much'}"
    return (
        f"<b>{escaped(point.setting)}</b><br>{size_text(point.peak_reserved)} reserved{room}<br>"
        f"{point.slow_down:.2f} times the time, {point.extra_flops * 100:+.0f} % FLOPs"
    )


def tradeoff(
    points: Sequence[Point],
    capacity: int | None = None,
    *,
    across: XAxis = XAxis.TIME,
    chosen: str | None = None,
    theme: Theme = Theme.ANY,
) -> go.Figure:
    """Settings as points, time to the right and peak reserved upwards; the frontier is a line, so is the capacity.

    Traces, by `name`: `frontier`, `fits` (circles), `does not fit` (crosses); `customdata` of a point is its number in
    `points`. `capacity` is in bytes, `chosen` the setting with a ring around it. Settings whose time is not known are
    left out; one far slower than the others stands at the right edge.

    >>> figure = tradeoff([Point("as written", 1.0, 0.0, 2048, False), Point("sqrt", 1.3, 0.3, 1024, True)], 1536)
    >>> [(trace.name, list(trace.y)) for trace in figure.data]
    [('frontier', [2048, 1024]), ('fits', [1024]), ('does not fit', [2048])]
    """
    best = frontier([(across.of(point), point.peak_reserved) for point in points])
    known = [number for number, point in enumerate(points) if across.of(point) == across.of(point)]
    edge = _edge([across.of(points[number]) for number in known])
    figure = go.Figure()
    figure.add_scatter(
        x=[min(across.of(points[number]), edge) for number in best],
        y=[points[number].peak_reserved for number in best],
        name="frontier",
        mode="lines",
        # Between two settings of the frontier there is none: what the slower one needs is had only from there on.
        line={"color": RESERVED, "width": 1.5, "dash": "dash", "shape": "hv"},
        hoverinfo="skip",
    )
    for name, wanted, colour, symbol in (("fits", True, FITS, "circle"), ("does not fit", False, CAPACITY, "x")):
        shown = [number for number in known if points[number].fits is wanted]
        figure.add_scatter(
            x=[min(across.of(points[number]), edge) for number in shown],
            y=[points[number].peak_reserved for number in shown],
            name=name,
            mode="markers",
            marker={
                "symbol": symbol,
                "color": colour,
                "opacity": 1,
                "size": [11 if number in best else 8 for number in shown],
                "line": {
                    "width": [3 if points[number].setting == chosen else 0 for number in shown],
                    "color": RESERVED,
                },
            },
            customdata=shown,
            text=[setting_hover_text(points[number], capacity) for number in shown],
            hovertemplate="%{text}<extra></extra>",
            cliponaxis=False,
        )
    highest = max((points[number].peak_reserved for number in known), default=1)
    shapes, annotations, top = _capacity(capacity, highest)
    annotations += [
        _note(
            escaped(points[number].setting),
            x=min(across.of(points[number]), edge),
            y=points[number].peak_reserved,
            # The two may lie at the same place.
            yshift=14 if points[number].setting == "as written" else -14,
        )
        for number in known
        if points[number].setting in ("as written", chosen)
    ]
    annotations += [
        _note(f"{across.of(points[number]):.1f} →", x=edge, y=points[number].peak_reserved, xanchor="left", xshift=8)
        for number in known
        if across.of(points[number]) > edge
    ]
    values, texts = byte_ticks(top)
    sources = sorted({str(point.source) for point in points}) or [str(Source.PREDICTED)]
    measured = str(Source.MEASURED) in sources
    figure.update_layout(
        height=HEIGHT,
        margin={"l": 76, "r": 24, "t": 32, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": theme.value},
        hovermode="closest",
        hoverlabel={"bgcolor": "#222222", "font": {"color": "#ffffff", "size": 12, "family": FONT}, "align": "left"},
        legend={"orientation": "h", "x": 0, "y": -0.16, "yanchor": "top"},
        shapes=shapes,
        annotations=annotations,
        xaxis={
            "title": {"text": across.value.replace("expected time", "time") if measured else across.value},
            "range": [0, edge * _HEADROOM],
            "gridcolor": GRID,
            "zerolinecolor": GRID,
        },
        yaxis={
            "title": {"text": f"peak reserved, {' or '.join(sources)}"},
            "range": [0, top],
            "tickvals": values,
            "ticktext": texts,
            "gridcolor": GRID,
            "zerolinecolor": GRID,
        },
    )
    return figure


def _edge(values: Sequence[float]) -> float:
    """The place furthest to the right: the largest value that is not far from half of them."""
    ordered = sorted(values)
    limit = _FAR * max(ordered[len(ordered) // 2], 1.0) if ordered else 1.0
    return max(1.0, *(value for value in [1.0, *ordered] if value <= limit))


def _capacity(capacity: int | None, highest: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float]:
    """The line of the capacity, its words, and the height of the picture."""
    if capacity is None:
        return [], [], highest * _HEADROOM
    words = f"capacity {size_text(capacity)}"
    if capacity > _FAR * highest:
        words += f", {capacity / highest:.1f} times the highest ↑"
        return [], [_label(words, y=1, yref="paper", yshift=-10)], highest * _HEADROOM
    line = {"color": CAPACITY, "width": 2, "dash": "solid"}
    shape = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": capacity, "y1": capacity, "line": line}
    return [shape], [_label(words, y=capacity, yshift=9)], max(highest, capacity) * _HEADROOM


def _label(text: str, **place: Any) -> dict[str, Any]:
    return _note(text, x=0.995, xref="paper", xanchor="right", font={"size": 11, "color": CAPACITY}, **place)


def _note(text: str, **place: Any) -> dict[str, Any]:
    return {"text": text, "showarrow": False, "font": {"size": 11}, **place}
