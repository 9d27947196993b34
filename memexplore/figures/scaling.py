"""Draw the growth of memory with a size, such as the depth of a model: log-log lines with their exponents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from memexplore.figures.palette import FONT, GRID, SERIES, Theme, escaped
from memexplore.text.units import size_text

Points = Sequence[tuple[int, int]]
"""Pairs of a size and the bytes at that size."""

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def exponent(points: Points) -> float:
    """Return the exponent of a power law bytes ~ size^exponent: the least-squares slope of the logarithms.

    >>> round(exponent([(16, 400), (64, 800), (256, 1600)]), 3)  # four times the size, twice the bytes
    0.5

    Raises ValueError for fewer than two different sizes, or for values that are not positive.
    """
    if len({size for size, _ in points}) < 2 or any(size <= 0 or count <= 0 for size, count in points):
        raise ValueError("an exponent needs two different sizes and positive values: add a point or remove zeros")
    log_sizes = [math.log(size) for size, _ in points]
    log_bytes = [math.log(count) for _, count in points]
    mean_x, mean_y = sum(log_sizes) / len(log_sizes), sum(log_bytes) / len(log_bytes)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(log_sizes, log_bytes, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in log_sizes)


def scaling(
    series: Mapping[str, Points],
    *,
    size: str = "depth",
    bytes_of: str = "peak of activations",
    theme: Theme = Theme.ANY,
) -> go.Figure:
    """Return a log-log figure of bytes over a size, one line per name, with the exponents in the legend.

    `size` and `bytes_of` are the titles of the two axes.

    >>> figure = scaling({"plain": [(16, 1024), (64, 4096)], "sqrt": [(16, 1024), (64, 2048)]})
    >>> [line.name for line in figure.data]
    ['plain: depth^1.00', 'sqrt: depth^0.50']

    Raises ValueError for a line without an exponent (`exponent`).
    """
    figure = go.Figure()
    for number, (name, points) in enumerate(series.items()):
        ordered = sorted(points)
        figure.add_scatter(
            x=[value for value, _ in ordered],
            y=[count for _, count in ordered],
            name=f"{escaped(name)}: {escaped(size)}^{exponent(ordered):.2f}",
            mode="lines+markers",
            line={"color": SERIES[number % len(SERIES)], "dash": _DASHES[number % len(_DASHES)]},
            text=[size_text(count) for _, count in ordered],
            hovertemplate=f"{escaped(size)} %{{x}}: %{{text}}<extra></extra>",
        )
    figure.update_layout(
        font={"family": FONT, "color": theme.value},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"x": 0.02, "y": 0.98},
        margin={"l": 70, "r": 20, "t": 20, "b": 50},
    )
    sizes = sorted({value for points in series.values() for value, _ in points})
    ticks = _ticks([count for points in series.values() for _, count in points])
    figure.update_xaxes(type="log", title=size, tickvals=sizes, ticktext=list(map(str, sizes)), gridcolor=GRID)
    figure.update_yaxes(
        type="log", title=bytes_of, tickvals=ticks, ticktext=[size_text(tick) for tick in ticks], gridcolor=GRID
    )
    return figure


def _ticks(counts: Sequence[int], most: int = 8) -> list[int]:
    """Return powers of two that span some bytes, at most `most` + 1."""
    if not counts:
        return []
    low, high = math.floor(math.log2(min(counts))), math.ceil(math.log2(max(counts)))
    step = max(1, math.ceil((high - low) / most))
    return [2**power for power in range(low, high + 1, step)]
