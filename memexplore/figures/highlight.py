"""Highlight one layer in the timeline: its bytes and those of its submodules in full colour, the rest pale."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import block_bytes, lifetimes
from memexplore.analysis.layer_rows import layers_in
from memexplore.analysis.tables import NO_LAYER, module_parents
from memexplore.figures.palette import COLOURS
from memexplore.tape import Category, Tape

_PALE_OPACITY = 0.2


def modules_of_layer(tape: Tape, layer: str) -> NDArray[np.bool_]:
    """Return for each index of `tape.modules` whether it is the layer or below it; the last value is for index -1.

    A `layer` such as `h.0–11.mlp` stands for several layers (`layer_rows.LayerRow.name`).

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"size": [1]}, modules=["Net", "a.b", "c"], meta=Meta(Source.MEASURED, "cpu"))
    >>> modules_of_layer(tape, "a").tolist()
    [False, True, False, False]

    Raises ValueError for a layer that is not on the tape.
    """
    tree = module_parents(tape.modules)
    below = set(layers_in(tree, layer))
    if layer != NO_LAYER and not below:
        raise ValueError(f"this tape has no layer {layer!r}: tables.layers(tape) lists the layers")
    # Children follow their parents in the tree, so one pass finds all descendants.
    for name, parent in tree.items():
        if parent in below:
            below.add(name)
    return np.array([*(name in below for name in tape.modules), layer == NO_LAYER], dtype=bool)


def layer_arrays(tape: Tape, layer: str, rows: NDArray[np.float64]) -> dict[Category, NDArray[np.float64]]:
    """Return the bytes allocated by a module and its submodules after each of some ascending rows, by category.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0, 512, 1024], "size": [1, 2, 3], "module": [0, 1, 2]},
    ...                          modules=["Net", "a.b", "a.c"], meta=Meta(Source.MEASURED, "cpu"))
    >>> layer_arrays(tape, "a", np.array([0, 1, 2]))[Category.UNKNOWN].tolist()
    [0.0, 2.0, 5.0]

    Categories without any bytes of the layer are omitted. Raises ValueError for a layer that is not on the tape.
    """
    in_layer = modules_of_layer(tape, layer)
    life = lifetimes(tape)
    selected = in_layer[tape.module[life.born]]
    born, freed = life.born[selected], life.requested[selected]
    sizes, category = block_bytes(tape)[born], tape.category[born]
    arrays = {}
    for kind in Category:
        of_kind = category == kind
        if np.any(sizes[of_kind] > 0):
            change = np.zeros(len(tape) + 1, dtype=np.int64)
            change[born[of_kind]] += sizes[of_kind]
            change[freed[of_kind]] -= sizes[of_kind]
            arrays[kind] = np.cumsum(change)[np.asarray(rows, dtype=np.int64)].astype(np.float64)
    return arrays


def _pale(colour: str) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},{_PALE_OPACITY})"


def highlight(traces: list[dict[str, Any]], tape: Tape, layer: str) -> list[dict[str, Any]]:
    """Return the traces of a timeline with one layer in full colour in front of the others, which become pale.

    Raises ValueError for a layer that is not on the tape.
    """
    x, rows = next((trace["x"], trace["customdata"]) for trace in traces if trace["name"] == "allocated")
    by_category = layer_arrays(tape, layer, rows)
    kinds = {kind.text: kind for kind in Category}
    pale = []
    for trace in traces:
        if trace.get("stackgroup") == "allocated":
            kind = kinds[trace["name"]]
            # The opacity of a plotly trace does not apply to its area. The legend has one entry per category, in order.
            trace = {
                **trace,
                "fillcolor": _pale(COLOURS[kind]),
                "showlegend": kind not in by_category,
                "legendrank": int(kind),
            }
        pale.append(trace)
    coloured = [
        {
            "type": "scatter",
            "x": x,
            "y": sizes,
            "name": kind.text,
            "stackgroup": "layer",
            "mode": "lines",
            "line": {"shape": "hv", "width": 0, "color": COLOURS[kind]},
            "fillcolor": COLOURS[kind],
            "hoverinfo": "skip",
            "legendrank": int(kind),
        }
        for kind, sizes in by_category.items()
    ]
    # The memory over the capacity is hatched, also where it is the layer's.
    hatched = next((number for number, trace in enumerate(pale) if "fillpattern" in trace), len(pale))
    return pale[:hatched] + coloured + pale[hatched:]
