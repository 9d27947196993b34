"""Draw the heat map of a watched run: bytes of layers × steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from memexplore.figures.palette import FONT, Theme, byte_ticks, escaped
from memexplore.text.units import size_text

MOST_LAYERS = 40
"""Layers with a row of their own; the others share one."""
_COLOURS = "Cividis"
_REST = "other layers"


def layer_history(
    sizes: np.ndarray[Any, Any], layers: Sequence[str], steps: Sequence[int], theme: Theme = Theme.ANY
) -> go.Figure:
    """Return the bytes of activations of each layer as a heat map, layers from top to bottom as in the model.

    `sizes` has the shape (layers, steps). Of more than `MOST_LAYERS` layers, those with the largest maximum have
    rows of their own, and the last row is the sum of the others. `customdata` of a cell is its step.

    >>> figure = layer_history(np.array([[8, 8], [0, 1024]]), ["fc", "act"], [1, 5])
    >>> list(figure.data[0].y), figure.data[0].z.tolist()
    (['fc', 'act'], [[8, 8], [0, 1024]])
    """
    names = [escaped(name) for name in layers]
    if len(names) > MOST_LAYERS:
        largest = np.sort(np.argsort(sizes.max(axis=1))[::-1][: MOST_LAYERS - 1])
        rest = np.setdiff1d(np.arange(len(names)), largest)
        names = [*(names[number] for number in largest), f"{len(rest)} {_REST}"]
        sizes = np.vstack([sizes[largest], sizes[rest].sum(axis=0)])
    highest = int(sizes.max(initial=1))
    values, texts = byte_ticks(highest, most=4)
    # Columns of equal width: the kept steps of a long run are far apart.
    places = list(range(len(steps)))
    figure = go.Figure(
        go.Heatmap(
            z=sizes,
            x=places,
            y=names,
            customdata=np.broadcast_to(np.array(steps), sizes.shape),
            text=[[size_text(int(size)) for size in row] for row in sizes] if sizes.size <= 20_000 else None,
            hovertemplate="step %{customdata:,d}<br>%{y}<br>%{text}<extra></extra>",
            colorscale=_COLOURS,
            zmin=0,
            zmax=max(highest, 1),
            colorbar={"tickvals": values, "ticktext": texts, "thickness": 12, "outlinewidth": 0},
        )
    )
    every = max(len(steps) // 6, 1)
    ticks = places[::every]
    figure.update_layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 11, "color": theme.value},
        margin={"l": 8, "r": 8, "t": 6, "b": 34},
        xaxis={"tickvals": ticks, "ticktext": [f"{steps[place]:,}" for place in ticks], "title": {"text": "step"}},
        yaxis={"autorange": "reversed", "automargin": True, "type": "category"},
    )
    return figure
