"""Draw the trade-offs of settings: time against needed memory, and needed memory against the largest batch."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from memexplore.analysis.tradeoffs import Point, frontier
from memexplore.figures.name_labels import Line, name_labels
from memexplore.figures.palette import CAPACITY, FITS, FONT, GRID, RESERVED, Theme, byte_ticks, escaped
from memexplore.tape import Source
from memexplore.text.units import range_text, signed_percent, size_text

HEIGHT = 320
_FAR = 2.5
"""A capacity above this multiple of the highest point would flatten the points, so it is only a text; a setting slower
than this multiple of the median is drawn at the right edge with its value as text."""
_BEYOND = 2
"""A setting that needs more than this multiple of the capacity is drawn at the upper edge with its value as text."""
_LITTLE_BEYOND = 1.25
"""The memory axis is this much longer where all settings fit on it then."""
_LABEL_LENGTH = 30
_NEAR = 0.08
"""Settings beyond the upper edge that are closer to the next than this share of the axis have their values together."""
_SEPARATOR, _WRITTEN = ", ", "as written"
"""Text between the knobs of a setting, and the setting without knobs."""
_HEADROOM = 1.15
"""End of both axes relative to the largest value."""


class XAxis(enum.Enum):
    """Quantity of the horizontal axis; the value is its title."""

    TIME = "expected time per sample, as written = 1"
    FLOPS = "FLOPs per sample, as written = 1"

    def value_of(self, point: Point) -> float:
        """Return the value of a point on the axis."""
        return point.slow_down if self is XAxis.TIME else 1 + point.extra_flops


def setting_hover_text(point: Point, capacity: int | None = None) -> str:
    """Return the hover text of a setting.

    >>> setting_hover_text(Point("precision bf16", 0.5, 0.0, 1024, True), 2048)
    '<b>precision bf16</b><br>needs 1.00 KiB, 1.00 KiB to spare<br>0.50 times the time, +0 % FLOPs'
    """
    margin_text = ""
    if capacity is not None:
        margin = capacity - point.needed
        margin_text = f", {size_text(abs(margin))} {'to spare' if margin >= 0 else 'too much'}"
    return (
        f"<b>{escaped(point.setting)}</b><br>needs {size_text(point.needed)}{margin_text}<br>"
        f"{point.slow_down:.2f} times the time, {signed_percent(point.extra_flops)} FLOPs"
    )


def tradeoff(
    points: Sequence[Point],
    capacity: int | None = None,
    *,
    x_axis: XAxis = XAxis.TIME,
    chosen: str | None = None,
    height: int = HEIGHT,
    theme: Theme = Theme.ANY,
) -> go.Figure:
    """Return settings as points (x: time or FLOPs, y: needed memory) with lines for the frontier and the capacity.

    Traces by `name`: `frontier`, `fits` (circles), `does not fit` (crosses); `customdata` of a point is its index in
    `points`, `ids` its setting. `capacity` is in bytes, `chosen` the setting with a ring, `height` in pixels. Settings
    with a NaN time are omitted; a setting much slower than the others is drawn at the right edge, one far beyond the
    capacity at the upper edge, both with an arrow and their value; neighbours at the upper edge have one text. Settings
    of the frontier have their names, without what all settings have, where there is space.

    >>> figure = tradeoff([Point("as written", 1.0, 0.0, 2048, False), Point("sqrt", 1.3, 0.3, 1024, True)], 1536)
    >>> [(trace.name, list(trace.y)) for trace in figure.data]
    [('frontier', [2048, 1024]), ('fits', [1024]), ('does not fit', [2048])]
    """
    best = frontier([(x_axis.value_of(point), point.needed) for point in points])
    valid = [number for number, point in enumerate(points) if x_axis.value_of(point) == x_axis.value_of(point)]
    edge = _edge([x_axis.value_of(points[number]) for number in valid])
    ceiling = _ceiling([points[number].needed for number in valid], capacity)
    xs = [min(x_axis.value_of(point), edge) for point in points]
    ys = [min(point.needed, ceiling) for point in points]
    figure = go.Figure()
    figure.add_scatter(
        x=[xs[number] for number in best],
        y=[ys[number] for number in best],
        name="frontier",
        mode="lines",
        # No setting lies between two of the frontier: the lower memory is available only from the slower one on.
        line={"color": RESERVED, "width": 1.5, "dash": "dash", "shape": "hv"},
        hoverinfo="skip",
        showlegend=len(best) > 1,
    )
    for name, fits, colour, symbol in (("fits", True, FITS, "circle"), ("does not fit", False, CAPACITY, "x")):
        shown = [number for number in valid if points[number].fits is fits]
        figure.add_scatter(
            x=[xs[number] for number in shown],
            y=[ys[number] for number in shown],
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
            ids=[points[number].setting for number in shown],
            text=[setting_hover_text(points[number], capacity) for number in shown],
            hovertemplate="%{text}<extra></extra>",
            cliponaxis=False,
        )
    shapes, annotations, line, top = _capacity(capacity, max((ys[number] for number in valid), default=1))
    marked = [number for number in valid if points[number].setting in (_WRITTEN, chosen)]
    texts_of = _clipped_texts({number: points[number] for number in valid}, x_axis, edge, ceiling)
    clipped = [number for number in valid if texts_of[number]]
    # The ends of the frontier are the fastest and the smallest setting.
    named = list(dict.fromkeys((*marked, *best[:1], *best[-1:], *best)))
    for number in named:
        if points[number].needed <= ceiling:
            texts_of[number] = f"{_own_name(points, number)} {texts_of[number]}".strip()
    # The value of a clipped setting comes first: without it, its place would be taken for its value.
    order = [number for number in dict.fromkeys((*clipped, *named)) if texts_of[number]]
    labelled = [(xs[number], ys[number], texts_of[number]) for number in order]
    drawn = [(xs[number], ys[number]) for number in valid]
    annotations += name_labels(labelled, drawn, line, edge * _HEADROOM, top, height)
    values, texts = byte_ticks(top)
    sources = sorted({str(point.source) for point in points}) or [str(Source.PREDICTED)]
    measured = str(Source.MEASURED) in sources
    figure.update_layout(
        shapes=shapes,
        annotations=annotations,
        xaxis={
            "title": {"text": x_axis.value.replace("expected time", "time") if measured else x_axis.value},
            "range": [0, edge * _HEADROOM],
        },
        yaxis={
            "title": {"text": f"needed memory, {' or '.join(sources)}"},
            "range": [0, top],
            "tickvals": values,
            "ticktext": texts,
        },
    )
    return _styled(figure, height, theme)


def largest_batches(
    points: Sequence[Point],
    batches: Sequence[int],
    capacity: int | None = None,
    *,
    chosen: str | None = None,
    height: int = HEIGHT,
    theme: Theme = Theme.ANY,
) -> go.Figure:
    """Return settings as points: x is the largest batch that fits with a setting, y the bytes that it needs.

    `batches` has the largest batch of each point, 0 where it is unknown: such a point is omitted. `customdata` of a
    point is its index in `points`, `ids` its setting, `chosen` the setting with a ring, `height` in pixels.

    >>> figure = largest_batches([Point("fp16", 0.5, 0.0, 1024, True), Point("sqrt", 1.3, 0.3, 512, True)], [8, 0])
    >>> list(figure.data[0].x), list(figure.data[0].y)
    ([8], [1024])
    """
    shown = [number for number, batch in enumerate(batches) if batch]
    best = frontier([(-batches[number], points[number].needed) for number in shown])
    ceiling = _ceiling([points[number].needed for number in shown], capacity)
    figure = go.Figure()
    figure.add_scatter(
        x=[batches[number] for number in shown],
        y=[min(points[number].needed, ceiling) for number in shown],
        name="largest batch that fits",
        mode="markers",
        marker={
            "color": [FITS if points[number].fits else CAPACITY for number in shown],
            "size": 9,
            "line": {"width": [3 if points[number].setting == chosen else 0 for number in shown], "color": RESERVED},
        },
        customdata=shown,
        ids=[points[number].setting for number in shown],
        text=[f"{setting_hover_text(points[n], capacity)}<br>largest batch {batches[n]}" for n in shown],
        hovertemplate="%{text}<extra></extra>",
        cliponaxis=False,
    )
    shapes, annotations, line, top = _capacity(
        capacity, max((min(points[n].needed, ceiling) for n in shown), default=1)
    )
    end = max((batches[number] for number in shown), default=1) * _HEADROOM
    drawn = [(batches[number], min(points[number].needed, ceiling)) for number in shown]
    names_of = [(*drawn[index], _own_name(points, shown[index])) for index in best]
    annotations += name_labels(names_of, drawn, line, end, top, height)
    values, texts = byte_ticks(top)
    figure.update_layout(
        shapes=shapes,
        annotations=annotations,
        xaxis={"title": {"text": "largest batch that fits"}, "range": [0, end]},
        yaxis={
            "title": {"text": "needed memory at the present batch"},
            "range": [0, top],
            "tickvals": values,
            "ticktext": texts,
        },
        showlegend=False,
    )
    return _styled(figure, height, theme)


def _styled(figure: go.Figure, height: int, theme: Theme) -> go.Figure:
    figure.update_layout(
        height=height,
        margin={"l": 70, "r": 24, "t": 24, "b": 40},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": theme.value},
        hovermode="closest",
        hoverlabel={"bgcolor": "#222222", "font": {"color": "#ffffff", "size": 12, "family": FONT}, "align": "left"},
        legend={"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"},
    )
    for axis in (figure.layout.xaxis, figure.layout.yaxis):
        axis.update(gridcolor=GRID, zerolinecolor=GRID)
    return figure


def _ceiling(sizes: Sequence[int], capacity: int | None) -> int:
    """Return the size at which the memory axis ends: not far beyond the capacity, unless all settings are."""
    highest = max(sizes, default=1)
    if capacity is None:
        return highest
    ceiling = max(_BEYOND * capacity, min(sizes, default=0))
    return highest if highest <= _LITTLE_BEYOND * ceiling else ceiling


def _clipped_text(point: Point, x_axis: XAxis, edge: float, ceiling: int) -> str:
    """Return the values of a setting that lies beyond an axis, empty for any other."""
    beyond = [f"↑ {size_text(point.needed)}"] if point.needed > ceiling else []
    value = x_axis.value_of(point)
    return " ".join(beyond + ([f"{value:.1f} →"] if value > edge else []))


def _clipped_texts(points: Mapping[int, Point], x_axis: XAxis, edge: float, ceiling: int) -> dict[int, str]:
    """Return the text of each point: its values beyond the axes, for neighbours at the upper edge those of all."""
    texts = {number: _clipped_text(point, x_axis, edge, ceiling) for number, point in points.items()}
    above = [(x_axis.value_of(point), number) for number, point in points.items() if point.needed > ceiling]
    groups: list[list[int]] = []
    last = -math.inf
    for value, number in sorted(pair for pair in above if pair[0] <= edge):
        if value - last > _NEAR * edge:
            groups.append([])
        groups[-1].append(number)
        last = value
    for group in groups:
        sizes = [points[number].needed for number in group]
        text = f"↑ {range_text(min(sizes), max(sizes))}"
        texts |= {number: text if number == group[len(group) // 2] else "" for number in group}
    return texts


def _own_name(points: Sequence[Point], number: int) -> str:
    """Return the name of a setting without the parts that all settings have, except the step as written."""
    parts = points[number].setting.split(_SEPARATOR)
    others = [set(point.setting.split(_SEPARATOR)) for point in points if point.setting != _WRITTEN]
    common = set.intersection(*others) if len(others) > 1 else set()
    name = _SEPARATOR.join(part for part in parts if part not in common) or points[number].setting
    return escaped(name if len(name) <= _LABEL_LENGTH else name[: _LABEL_LENGTH - 1] + "…")


def _edge(values: Sequence[float]) -> float:
    """Return the right end of the axis: the largest value below `_FAR` times the median."""
    ordered = sorted(values)
    limit = _FAR * max(ordered[len(ordered) // 2], 1.0) if ordered else 1.0
    return max(1.0, *(value for value in [1.0, *ordered] if value <= limit))


def _capacity(
    capacity: int | None, highest: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Line | None, float]:
    """Return the shapes and annotations of the capacity, its line if it has one, and the top of the y axis."""
    if capacity is None:
        return [], [], None, highest * _HEADROOM
    text = f"capacity {size_text(capacity)}"
    if capacity > _FAR * highest:
        text += f", {capacity / highest:.1f} times the highest ↑"
        place = {"x": 0.005, "xref": "paper", "xanchor": "left", "y": 1, "yref": "paper", "yshift": 10}
        note = {"text": text, "showarrow": False, "font": {"size": 11, "color": CAPACITY}, **place}
        return [], [note], None, highest * _HEADROOM
    style = {"color": CAPACITY, "width": 2, "dash": "solid"}
    shape = {"type": "line", "x0": 0, "x1": 1, "xref": "paper", "y0": capacity, "y1": capacity, "line": style}
    return [shape], [], Line(capacity, text, CAPACITY), max(highest, capacity) * _HEADROOM
