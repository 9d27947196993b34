"""The segments and blocks of a moment as an address map: one row a segment, the free gaps between blocks visible."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from memexplore.analysis.addresses import AddressMap, address_map
from memexplore.analysis.curves import peak
from memexplore.analysis.tables import NO_LAYER, module_parents, user_line
from memexplore.figures.palette import COLOURS, FONT, GRID, Theme, byte_ticks, escaped
from memexplore.tape import Category, Tape
from memexplore.units import size_text

ROWS = 40
"""Segments that get a row of their own; more share rows, side by side in the order of their addresses."""
_FINE = 1200
"""Parts of a row below which neighbours of one category are drawn as one."""
_MOST = 4000
FREE = "free"
_FREE_COLOUR = "rgba(128,128,128,0.18)"
_PALE = 0.2
_THICK = 0.84


def blocks_figure(tape: Tape, row: int | None = None, layer: str | None = None, theme: Theme = Theme.ANY) -> go.Figure:
    """The blocks of a placed tape after a row (the peak allocated by default), by address, in the colour of their kind.

    A row is a segment, as wide as its bytes; where there are more than `ROWS` segments several share a row. What is
    grey is free. With a layer, its blocks and those of the layers below it are in full colour and the rest is pale.
    Neighbours of one category that are too small to be seen are drawn as one. A tape without segments, such as a CPU's,
    gives an empty figure that says so.

    >>> from memexplore.allocator import replay
    >>> from memexplore.tape import Action, Meta, Source
    >>> tape = replay(Tape.from_columns({"action": [Action.ALLOC], "address": [1], "size": [700]},
    ...                                 meta=Meta(Source.MEASURED, "cuda:0")))
    >>> [trace.name for trace in blocks_figure(tape).data]
    ['free', 'unknown']

    Raises IndexError for a row or ValueError for a layer that is not on the tape, or where the tape is not placed.
    """
    if layer is not None and layer != NO_LAYER and layer not in module_parents(tape.modules):
        raise ValueError(f"there is no layer {layer!r} on this tape")
    moment = peak(tape)[1] if row is None else row
    figure = go.Figure()
    figure.update_layout(**_layout(theme))
    if moment < 0:
        return _empty(figure, "No memory was allocated.")
    shown = address_map(tape, moment)
    if not len(shown.start):
        return _empty(figure, "No segments at this moment: only a caching allocator, as CUDA has, reserves memory.")
    line, begin, width = _places(shown)
    lit = _lit(tape, layer)
    figure.add_bar(
        orientation="h",
        width=_THICK,
        y=line,
        base=begin,
        x=shown.length,
        name=FREE,
        marker={"color": _FREE_COLOUR, "line": {"width": 0.6, "color": "rgba(128,128,128,0.9)"}},
        customdata=np.full(len(line), -1),
        text=_segment_texts(shown),
        hovertemplate="%{text}<extra></extra>",
        textposition="none",
    )
    for kind, bars in _bars(tape, shown, line, begin, width).items():
        chosen = lit[tape.module[bars["row"]]]
        figure.add_bar(
            orientation="h",
            width=_THICK,
            y=bars["line"],
            base=bars["base"],
            x=bars["size"],
            name=kind.text,
            marker={
                "color": COLOURS[kind],
                "opacity": np.where(chosen, 1.0, _PALE),
                "line": {"width": 0},
            },
            customdata=bars["row"],
            text=bars["text"],
            hovertemplate="%{text}<extra></extra>",
            textposition="none",
        )
    values, texts = byte_ticks(width)
    lines = int(line.max()) + 1
    figure.update_layout(
        xaxis={"range": [0, width], "tickvals": values, "ticktext": texts},
        yaxis={"range": [lines - 0.4, -0.6], "title": {"text": _title(len(shown.start), lines)}},
    )
    return figure


def _layout(theme: Theme) -> dict[str, Any]:
    return {
        "height": 420,
        "barmode": "overlay",
        "bargap": 0.16,
        "margin": {"l": 40, "r": 24, "t": 8, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": theme.value},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "#222222", "font": {"color": "#ffffff", "size": 12, "family": FONT}, "align": "left"},
        "legend": {"orientation": "h", "x": 0, "y": -0.14, "yanchor": "top", "traceorder": "normal"},
        "dragmode": "zoom",
        "xaxis": {"showgrid": True, "gridcolor": GRID, "zeroline": False},
        "yaxis": {"showgrid": False, "zeroline": False, "showticklabels": False, "fixedrange": False},
    }


def _empty(figure: go.Figure, words: str) -> go.Figure:
    hidden = {"visible": False}
    note = {"text": words, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
    return figure.update_layout(xaxis=hidden, yaxis=hidden, annotations=[note])


def _title(count: int, lines: int) -> str:
    if count == lines:
        return "one row a segment"
    return f"{count:,} segments, by address"


def _places(shown: AddressMap) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """The line of each segment and where on it the segment begins; the width of a line in bytes."""
    length = shown.length
    count = len(length)
    if count <= ROWS:
        return np.arange(count), np.zeros(count, dtype=np.int64), int(length.max())
    # What is lost at the ends of lines is made up for by a little more width.
    width = max(int(length.max()), int(length.sum() * 1.05) // ROWS)
    line, begin = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    used = current = 0
    for number, size in enumerate(length.tolist()):
        if used + size > width:
            current, used = current + 1, 0
        line[number], begin[number] = current, used
        used += size
    return line, begin, width


def _lit(tape: Tape, layer: str | None) -> NDArray[np.bool_]:
    """Whether each module is lit; the last place is that of no module."""
    if layer is None:
        return np.ones(len(tape.modules) + 1, dtype=bool)
    below = {layer}
    # Children stand behind their parents, so one pass finds all that hang below.
    for name, parent in module_parents(tape.modules).items():
        if parent in below:
            below.add(name)
    return np.array([*(name in below for name in tape.modules), layer == NO_LAYER], dtype=bool)


def _segment_texts(shown: AddressMap) -> list[str]:
    held = np.bincount(shown.segment[shown.segment >= 0], shown.size[shown.segment >= 0], len(shown.start))
    kinds = [
        ("small" if small else "large") + (", expandable" if expandable else "")
        for small, expandable in zip(shown.small.tolist(), shown.expandable.tolist(), strict=True)
    ]
    return [
        f"<b>segment of {size_text(length)}</b> ({kind} pool)<br>{size_text(length - int(used))} free<br>at {start:#x}"
        for start, length, kind, used in zip(
            shown.start.tolist(), shown.length.tolist(), kinds, held.tolist(), strict=True
        )
    ]


def _bars(
    tape: Tape, shown: AddressMap, line: NDArray[np.int64], begin: NDArray[np.int64], width: int
) -> dict[Category, dict[str, Any]]:
    """The bars of each category: line, base, size and text of each, and the row of its (first) block."""
    inside = np.flatnonzero(shown.segment >= 0)
    segment = shown.segment[inside]
    base = begin[segment] + shown.address[inside] - shown.start[segment]
    size, rows = shown.size[inside], shown.row[inside]
    category, module = tape.category[rows].astype(np.int64), tape.module[rows]
    lines = [escaped(user_line(stack)) for stack in tape.stacks]
    fine = width // _FINE
    group = np.arange(len(inside))
    while len(inside):
        # Small neighbours without a gap between them become one bar.
        joins = (size[1:] < fine) & (size[:-1] < fine) & (category[1:] == category[:-1]) & (segment[1:] == segment[:-1])
        joins &= (module[1:] == module[:-1]) | (fine > width // _FINE)
        joins &= base[1:] - (base[:-1] + size[:-1]) <= (0 if fine == width // _FINE else fine)
        # A bar that has grown wide enough is not joined any further.
        slot = base // max(fine, 1)
        joins &= slot[1:] == slot[:-1]
        group = np.append(0, np.cumsum(~joins))
        if np.bincount(category[np.append(True, ~joins)]).max(initial=0) <= _MOST:
            break
        fine *= 2
    firsts = np.flatnonzero(np.append(True, np.diff(group) > 0)) if len(group) else group
    ends = np.maximum.reduceat(base + size, firsts) if len(firsts) else firsts
    counts = np.diff(np.append(firsts, len(inside)))
    result: dict[Category, dict[str, Any]] = {}
    for kind in Category:
        mine = np.flatnonzero(category[firsts] == kind)
        if not len(mine):
            continue
        first = firsts[mine]
        result[kind] = {
            "line": line[segment[first]],
            "base": base[first],
            "size": ends[mine] - base[first],
            "row": rows[first],
            "text": [
                _block_text(tape, shown, int(inside[block]), lines)
                if many == 1
                else f"<b>{many} {kind.text} blocks</b><br>{size_text(whole)} together"
                for block, many, whole in zip(
                    first.tolist(), counts[mine].tolist(), (ends[mine] - base[first]).tolist(), strict=True
                )
            ],
        }
    return result


def _block_text(tape: Tape, shown: AddressMap, block: int, lines: list[str]) -> str:
    row = int(shown.row[block])
    kind = Category(int(tape.category[row])).text
    told = [f"<b>{size_text(int(shown.size[block]))} {kind}</b>"]
    requested = int(shown.requested[block])
    if requested != shown.size[block]:
        told.append(f"{size_text(requested)} requested")
    if shown.pending[block]:
        told.append("given back, waits for another stream")
    for name, table, number in (("layer", tape.modules, tape.module[row]), ("op", tape.ops, tape.op[row])):
        if number >= 0 and table[number]:
            told.append(f"{name}: {escaped(table[number])}")
    if tape.stack[row] >= 0:
        told.append(lines[int(tape.stack[row])])
    step = int(tape.step[row])
    told.append(f"made in step {step}" if step else "made in set-up")
    return "<br>".join(told)
