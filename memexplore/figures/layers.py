"""Write the layers of a Tape at a row as an HTML tree: one line a layer, with its bytes and a bar by category."""

from __future__ import annotations

import html
from typing import NamedTuple

from memexplore.analysis.curves import peak
from memexplore.analysis.layer_rows import LayerRow, held_layers
from memexplore.analysis.tables import NO_LAYER
from memexplore.figures.palette import COLOURS
from memexplore.tape import Category, Tape
from memexplore.text.units import range_text, size_text

NOT_IN_A_LAYER = "not in a layer"
"""Label of the bytes that belong to no layer."""
_OPEN_LEVELS, _OPEN_SHARE = 3, 0.4
"""A line is open at first if it is the root, or on the first levels and at least this share of the total."""
_STYLE = """<style>
.memexplore-tree summary,.memexplore-tree div.row{display:grid;grid-template-columns:minmax(14em,2fr) 6em 4fr 12em;
gap:0 0.8em;align-items:center;cursor:default;border-bottom:1px solid rgba(128,128,128,.25)}
.memexplore-tree summary{cursor:pointer}.memexplore-tree summary>b::before{content:'▸ '}
.memexplore-tree details[open]>summary>b::before{content:'▾ '}.memexplore-tree b{white-space:nowrap;overflow:hidden;
text-overflow:ellipsis}.memexplore-tree b i{font-weight:400;font-style:normal;opacity:.75}.memexplore-tree u{
text-decoration:none;text-align:right;font-variant-numeric:tabular-nums}.memexplore-tree span{display:flex;
height:.8em}.memexplore-tree small{opacity:.75}</style>"""


def each_text(row: LayerRow) -> str:
    """Return the bytes of each layer of a row of several layers as text, "" for a single layer.

    >>> each_text(LayerRow("h.0–1", "h", "Block", 2, (2048,), 1024, 1024))
    'each 1.00 KiB'
    >>> each_text(LayerRow("h.0–1", "h", "Block", 2, (3072,), 1024, 2048))
    'each 1.00–2.00 KiB'
    """
    return "" if row.layers == 1 else f"each {range_text(row.smallest, row.largest)}"


def layers_tree(tape: Tape, row: int | None = None) -> str:
    """Return the layers with what each of them holds after a row (default: the peak allocated) as HTML.

    Lines fold without JavaScript. They sum to the allocated bytes.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [512], "module": [0]}, modules=["Net"],
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> "512 B" in layers_tree(tape)
    True

    Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
    """
    rows = held_layers(tape, peak(tape)[1] if row is None else row)
    total = max(sum(row.total for row in rows), 1)
    return f'{_STYLE}<div class="memexplore-tree">{"".join(_line(row, 1, total) for row in rows)}</div>'


def _label(row: LayerRow) -> str:
    """Return the label of a row with the number of its layers."""
    return f"{NOT_IN_A_LAYER if row.name == NO_LAYER else row.label}{f' ×{row.layers}' if row.layers > 1 else ''}"


def _is_open(row: LayerRow, level: int, total: int) -> bool:
    return level == 1 or (level <= _OPEN_LEVELS and row.total >= _OPEN_SHARE * total)


def _line(row: LayerRow, level: int, total: int) -> str:
    kind = f" <i>{html.escape(row.kind)}</i>" if row.kind not in ("", row.label) else ""
    bar = "".join(
        f'<a style="width:{100 * size / total:.2f}%;background:{COLOURS[kind]}" '
        f'title="{size_text(size)} {kind.text}"></a>'
        for kind, size in zip(Category, row.sizes, strict=True)
        if size
    )
    cells = (
        f'<b style="padding-left:{level - 1}em" title="{html.escape(row.name)}">{html.escape(_label(row))}{kind}</b>'
        f"<u>{size_text(row.total)}</u><span>{bar}</span><small>{each_text(row)}</small>"
    )
    if not row.children:
        return f'<div class="row">{cells}</div>'
    is_open = _is_open(row, level, total)
    inner = "".join(_line(child, level + 1, total) for child in row.children)
    return f"<details{' open' if is_open else ''}><summary>{cells}</summary>{inner}</details>"


class OpenRow(NamedTuple):
    """A line of a tree as it is at first: its layers, its level from 1, and its label with the number of layers."""

    row: LayerRow
    level: int
    label: str


def open_rows(rows: tuple[LayerRow, ...]) -> list[OpenRow]:
    """Return the lines of a tree that are visible at first."""
    total = max(sum(row.total for row in rows), 1)
    visible: list[OpenRow] = []

    def visit(siblings: tuple[LayerRow, ...], level: int) -> None:
        for row in siblings:
            visible.append(OpenRow(row, level, _label(row)))
            if _is_open(row, level, total):
                visit(row.children, level + 1)

    visit(rows, 1)
    return visible


def largest_rows(rows: list[OpenRow], count: int) -> tuple[list[OpenRow], list[OpenRow]]:
    """Return the `count` largest lines of a tree, in order, and those left out; a line is left out with those below it.

    >>> rows = [OpenRow(LayerRow(name, name, "", 1, (size,), size, size), 1, name) for name, size in
    ...         (("a", 2), ("b", 1), ("c", 3), ("d", 2))]
    >>> [[row.label for row in part] for part in largest_rows(rows, 2)]
    [['a', 'c'], ['b', 'd']]
    """
    # A line is never smaller than those below it, and of equal lines the first stay.
    order = sorted(range(len(rows)), key=lambda number: -rows[number].row.total)
    kept = set(order[:count])
    return [rows[number] for number in sorted(kept)], [rows[number] for number in sorted(order[count:])]
