"""Layers of a Tape: an icicle of the module tree, sized by the bytes that each module holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import plotly.graph_objects as go

from memexplore.analysis.tables import LAYER_CATEGORIES, layers
from memexplore.figures.palette import COLOURS, FONT, Theme, escaped, text_colour
from memexplore.tape import Category, Tape
from memexplore.units import size_text

if TYPE_CHECKING:
    import pandas

ROOT = "all layers"
EVERYTHING = "everything"
_SEPARATOR = " · "
"""Separator between layer and category in the id of a box."""
# The text on a box has its own colour (`text_colour`), legible in every theme.
_NEUTRAL = "#5f6b75"
_ROOT_COLOUR = "#48525b"


def _column(kind: Category) -> str:
    return kind.name.lower()


class _Box(NamedTuple):
    """One box of the icicle; the fields have plotly's names."""

    ids: str
    parents: str
    labels: str
    values: int
    text: str
    colors: str
    text_colours: str
    customdata: str


def _box(ids: str, parents: str, label: str, size: int, colour: str, details: str) -> _Box:
    return _Box(ids, parents, escaped(label), size, size_text(size), colour, text_colour(colour), details)


def _boxes(table: pandas.DataFrame, kinds: tuple[Category, ...], details: dict[str, str]) -> dict[str, list[Any]]:
    """Return the columns of an icicle of some categories: grey boxes for modules, coloured ones for their own bytes."""
    own = {kind: dict(zip(table.index, table[_column(kind)].tolist(), strict=True)) for kind in kinds}
    totals = table[[f"{_column(kind)}_total" for kind in kinds]].sum(axis=1)
    size_of = dict(zip(table.index, totals.tolist(), strict=True))
    parent_of = dict(zip(table.index, table["parent"], strict=True))
    # A module whose bytes are all in one child gets no box of its own: `0.block` instead of `0` around `block`.
    wrapped = {parent for name, parent in parent_of.items() if parent and size_of[name] == size_of[parent] > 0}
    wrapped -= {name for name, parent in parent_of.items() if not parent}
    with_children = {parent for name, parent in parent_of.items() if size_of[name]}

    def box_above(name: str) -> str:
        parent = parent_of[name]
        while parent in wrapped:
            parent = parent_of[parent]
        return parent

    total = sum(size_of[name] for name, parent in parent_of.items() if not parent)
    boxes = [_box(ROOT, "", ROOT, total, _ROOT_COLOUR, details[ROOT])]
    for name, size in size_of.items():
        if not size or name in wrapped:
            continue
        above = box_above(name)
        held = [kind for kind in kinds if own[kind][name]]
        is_single_category = len(held) == 1 and name not in with_children
        colour = COLOURS[held[0]] if is_single_category else _NEUTRAL
        boxes.append(_box(name, above or ROOT, name.removeprefix(f"{above}."), size, colour, details[name]))
        boxes += [
            _box(name + _SEPARATOR + kind.text, name, kind.text, own[kind][name], COLOURS[kind], details[name])
            for kind in ([] if is_single_category else held)
        ]
    columns = dict(zip(_Box._fields, map(list, zip(*boxes, strict=True)), strict=True))
    columns["marker.colors"] = columns.pop("colors")
    columns["textfont.color"] = columns.pop("text_colours")
    return columns


def layer_of_box(box: str) -> str | None:
    """Return the layer of a box of the icicle by the id of the box, None for the root.

    >>> layer_of_box("down.0.conv · activation"), layer_of_box("down.0.conv"), layer_of_box("all layers")
    ('down.0.conv', 'down.0.conv', None)
    """
    return None if box == ROOT else box.partition(_SEPARATOR)[0]


def _details(table: pandas.DataFrame) -> dict[str, str]:
    """Return the hover text of each layer and of the root: name, bytes of each category, peak."""
    columns = [(kind.text, table[f"{_column(kind)}_total"].tolist()) for kind in LAYER_CATEGORIES]
    highest = table["peak_total"].tolist()
    by_layer = {name: _hover_text(name, columns, highest, row) for row, name in enumerate(table.index)}
    totals = [(kind.text, [int(table[_column(kind)].sum())]) for kind in LAYER_CATEGORIES]
    return {ROOT: _hover_text(ROOT, totals, [int(table["peak"].max())], 0), **by_layer}


def _hover_text(name: str, columns: list[tuple[str, list[int]]], highest: list[int], row: int) -> str:
    lines = [f"<b>{escaped(name)}</b>"]
    lines += [f"{size_text(sizes[row])} {text}" for text, sizes in columns if sizes[row]]
    if highest[row]:
        lines.append(f"peak {size_text(highest[row])} allocated while running")
    return "<br>".join(lines)


def layers_figure(tape: Tape, theme: Theme = Theme.ANY) -> go.Figure:
    """Return the layers of a tape as an icicle: one box per module, sized by its bytes and those of its submodules.

    Bytes are those of `tables.layers`. Modules are grey, and the bytes that a module holds itself have the colour of
    their category. A click on a box makes it the root of the chart. The buttons select all categories (activations,
    parameters, buffers, gradients and optimizer state) or one of them.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [40], "category": [Category.PARAMETER], "module": [0]},
    ...                          modules=["Linear"], meta=Meta(Source.MEASURED, "cpu"))
    >>> list(layers_figure(tape).data[0].labels)
    ['all layers', 'Linear']

    Raises ValueError for a tape that is not placed.
    """
    table = layers(tape)
    kinds = tuple(kind for kind in LAYER_CATEGORIES if table[_column(kind)].any())
    details = _details(table)
    first = _boxes(table, LAYER_CATEGORIES, details)
    colours, text_colours = first.pop("marker.colors"), first.pop("textfont.color")
    figure = go.Figure(
        go.Icicle(
            **first,
            branchvalues="total",
            marker={"colors": colours, "line": {"width": 1, "color": "rgba(128,128,128,0.6)"}},
            tiling={"orientation": "h"},
            pathbar={"visible": True},
            maxdepth=6,
            sort=False,
            textfont={"color": text_colours},
            pathbar_textfont={"color": "#888888"},
            texttemplate="%{label} · %{text}",
            hovertemplate="%{customdata}<extra></extra>",
            leaf={"opacity": 1},
        )
    )
    choices = [(EVERYTHING, LAYER_CATEGORIES), *((kind.text, (kind,)) for kind in kinds)]
    buttons = [
        {
            "label": label,
            "method": "restyle",
            "args": [{key: [value] for key, value in _boxes(table, chosen, details).items()}],
        }
        for label, chosen in choices
    ]
    figure.update_layout(
        height=520,
        margin={"l": 8, "r": 8, "t": 68, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 12, "color": theme.value},
        uniformtext={"minsize": 9, "mode": "hide"},
        hoverlabel={"bgcolor": "#222222", "font": {"color": "#ffffff", "size": 12, "family": FONT}, "align": "left"},
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "buttons": buttons,
                "x": 0,
                "xanchor": "left",
                "y": 1.01,
                "yanchor": "bottom",
                # Space below the buttons for the path bar.
                "pad": {"b": 24},
                # plotly draws the selected button nearly white in every theme.
                "bgcolor": "#c4c4c4",
                "bordercolor": "#8a8a8a",
                "font": {"size": 11, "color": "#222222"},
            }
        ],
    )
    return figure
