"""One layer in the timeline: what it and all below it hold, in full colour before the rest, which turns pale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import block_bytes, lifetimes
from memexplore.analysis.tables import NO_LAYER, module_parents
from memexplore.figures.palette import COLOURS
from memexplore.tape import Category, Tape

_PALE = 0.2


def layer_arrays(tape: Tape, layer: str, rows: NDArray[np.float64]) -> dict[Category, NDArray[np.float64]]:
    """Allocated bytes that a module and those below it have made, after each of some rising rows, by category.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512, 1024], "size": [1, 2, 3], "module": [0, 1, 2]},
    ...                          modules=["Net", "a.b", "a.c"], meta=Meta(Source.MEASURED, "cpu"))
    >>> layer_arrays(tape, "a", np.array([0, 1, 2]))[Category.UNKNOWN].tolist()
    [0.0, 2.0, 5.0]

    A category that the layer never holds is left out. Raises ValueError for a layer that is not on the tape.
    """
    tree = module_parents(tape.modules)
    if layer != NO_LAYER and layer not in tree:
        raise ValueError(f"there is no layer {layer!r} on this tape")
    below = {layer}
    # Children stand behind their parents, so one pass finds all that hang below.
    for name, parent in tree.items():
        if parent in below:
            below.add(name)
    # The last place is that of row number -1: no module.
    chosen = np.array([*(name in below for name in tape.modules), layer == NO_LAYER], dtype=bool)
    life = lifetimes(tape)
    made = chosen[tape.module[life.born]]
    born, gone = life.born[made], life.requested[made]
    sizes, category = block_bytes(tape)[born], tape.category[born]
    arrays = {}
    for kind in Category:
        mine = category == kind
        if np.any(sizes[mine] > 0):
            change = np.zeros(len(tape) + 1, dtype=np.int64)
            change[born[mine]] += sizes[mine]
            change[gone[mine]] -= sizes[mine]
            arrays[kind] = np.cumsum(change)[np.asarray(rows, dtype=np.int64)].astype(np.float64)
    return arrays


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{_PALE})"


def highlight(traces: list[dict[str, Any]], tape: Tape, layer: str) -> list[dict[str, Any]]:
    """The traces of the tape's timeline with one layer lit: what it holds is in full colour before the rest, now pale.

    Raises ValueError for a layer that is not on the tape.
    """
    rows = next(trace["x"] for trace in traces if trace["name"] == "allocated")
    lit = layer_arrays(tape, layer, rows)
    words = {kind.text: kind for kind in Category}
    behind = []
    for trace in traces:
        if trace.get("stackgroup") == "allocated":
            kind = words[trace["name"]]
            # plotly's opacity of a trace leaves its area as it is; the legend names each category once, at its place.
            trace = {**trace, "fillcolor": _pale(COLOURS[kind]), "showlegend": kind not in lit, "legendrank": int(kind)}
        behind.append(trace)
    before = [
        {
            "type": "scatter",
            "x": rows,
            "y": sizes,
            "name": kind.text,
            "stackgroup": "layer",
            "mode": "lines",
            "line": {"shape": "hv", "width": 0, "color": COLOURS[kind]},
            "fillcolor": COLOURS[kind],
            "hoverinfo": "skip",
            "legendrank": int(kind),
        }
        for kind, sizes in lit.items()
    ]
    return behind + before
