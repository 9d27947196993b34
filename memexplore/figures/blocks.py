"""Draw the address map of a Tape after one row: a bar per segment with its blocks and the free gaps between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from memexplore.analysis.addresses import AddressMap, address_map
from memexplore.analysis.curves import peak
from memexplore.analysis.streams import has_streams, stream_text
from memexplore.analysis.tables import user_line
from memexplore.figures.highlight import modules_of_layer
from memexplore.figures.palette import COLOURS, FONT, GRID, Theme, byte_ticks, escaped
from memexplore.tape import Category, Tape
from memexplore.text.units import size_text

MAX_LINES = 40
"""Up to this many segments have a line each; more share lines, side by side in address order."""
_BARS_PER_LINE = 1200
"""Neighbours of one category that are narrower than this part of a line are drawn as one bar."""
_MAX_BARS = 4000
"""Maximum number of bars per category."""
FREE = "free"
_FREE_COLOUR = "rgba(128,128,128,0.18)"
_PALE_OPACITY = 0.2
_BAR_HEIGHT = 0.84


def blocks_figure(tape: Tape, row: int | None = None, layer: str | None = None, theme: Theme = Theme.ANY) -> go.Figure:
    """Return the blocks after a row (default: the peak allocated) by address, in the colours of their categories.

    Each line is one segment, as wide as its bytes; more than `MAX_LINES` segments share lines. Free memory is grey.
    With a layer, its blocks and those of its submodules have full colour and the others are pale. Neighbours of one
    category that are too narrow to see are drawn as one bar. A tape without segments, such as a CPU's, gives an empty
    figure with a sentence.

    >>> from memexplore.allocator import replay
    >>> from memexplore.tape import Action, Meta, Source
    >>> tape = replay(Tape.from_columns({"action": [Action.ALLOC], "address": [1], "size": [700]},
    ...                                 meta=Meta(Source.MEASURED, "cuda:0")))
    >>> [trace.name for trace in blocks_figure(tape).data]
    ['free', 'unknown']

    Raises IndexError for a row outside the tape, ValueError for an unknown layer or a tape that is not placed.
    """
    in_full_colour = np.ones(len(tape.modules) + 1, dtype=bool) if layer is None else modules_of_layer(tape, layer)
    at = peak(tape)[1] if row is None else row
    figure = go.Figure()
    figure.update_layout(**_layout(theme))
    if at < 0:
        return _empty(figure, "No memory was allocated.")
    addresses = address_map(tape, at)
    if not len(addresses.start):
        return _empty(figure, "No segments: only a caching allocator, such as CUDA's, reserves memory.")
    line, offset, width = _lines(addresses)
    figure.add_bar(
        orientation="h",
        width=_BAR_HEIGHT,
        y=line,
        base=offset,
        x=addresses.length,
        name=FREE,
        marker={"color": _FREE_COLOUR, "line": {"width": 0.6, "color": "rgba(128,128,128,0.9)"}},
        customdata=np.full(len(line), -1),
        text=_segment_texts(addresses),
        hovertemplate="%{text}<extra></extra>",
        textposition="none",
    )
    for kind, bars in _bars(tape, addresses, line, offset, width).items():
        is_full = in_full_colour[tape.module[bars["row"]]]
        figure.add_bar(
            orientation="h",
            width=_BAR_HEIGHT,
            y=bars["line"],
            base=bars["base"],
            x=bars["size"],
            name=kind.text,
            marker={
                "color": COLOURS[kind],
                "opacity": np.where(is_full, 1.0, _PALE_OPACITY),
                "line": {"width": 0},
            },
            customdata=bars["row"],
            text=bars["text"],
            hovertemplate="%{text}<extra></extra>",
            textposition="none",
        )
    values, texts = byte_ticks(width)
    count = int(line.max()) + 1
    title = "one row per segment" if count == len(addresses.start) else "segments, by address"
    figure.update_layout(
        xaxis={"range": [0, width], "tickvals": values, "ticktext": texts},
        yaxis={"range": [count - 0.4, -0.6], "title": {"text": title, "font": {"size": 12}}},
    )
    return figure


def _layout(theme: Theme) -> dict[str, Any]:
    return {
        "height": 420,
        "barmode": "overlay",
        "bargap": 0.16,
        "margin": {"l": 40, "r": 24, "t": 30, "b": 40},  # plotly's buttons lie above the first segment
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


def _empty(figure: go.Figure, text: str) -> go.Figure:
    hidden = {"visible": False}
    note = {"text": text, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
    return figure.update_layout(xaxis=hidden, yaxis=hidden, annotations=[note])


def _lines(addresses: AddressMap) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the line of each segment, its offset on that line in bytes, and the width of a line in bytes."""
    length = addresses.length
    count = len(length)
    if count <= MAX_LINES:
        return np.arange(count), np.zeros(count, dtype=np.int64), int(length.max())
    # 5 % more than the mean, because the ends of lines stay empty.
    width = max(int(length.max()), int(length.sum() * 1.05) // MAX_LINES)
    line, offset = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    used = current = 0
    for number, size in enumerate(length.tolist()):
        if used + size > width:
            current, used = current + 1, 0
        line[number], offset[number] = current, used
        used += size
    return line, offset, width


def _segment_texts(addresses: AddressMap) -> list[str]:
    held = np.bincount(
        addresses.segment[addresses.segment >= 0], addresses.size[addresses.segment >= 0], len(addresses.start)
    )
    kinds = [
        ("small" if small else "large") + (", expandable" if expandable else "")
        for small, expandable in zip(addresses.small.tolist(), addresses.expandable.tolist(), strict=True)
    ]
    return [
        f"<b>segment of {size_text(length)}</b> ({kind} pool)<br>{size_text(length - int(used))} free<br>at {start:#x}"
        for start, length, kind, used in zip(
            addresses.start.tolist(), addresses.length.tolist(), kinds, held.tolist(), strict=True
        )
    ]


def _bars(
    tape: Tape, addresses: AddressMap, line: NDArray[np.int64], offset: NDArray[np.int64], width: int
) -> dict[Category, dict[str, Any]]:
    """Return the bars of each category: line, base, size, text, and the alloc row of the (first) block."""
    inside = np.flatnonzero(addresses.segment >= 0)
    segment = addresses.segment[inside]
    base = offset[segment] + addresses.address[inside] - addresses.start[segment]
    size, rows = addresses.size[inside], addresses.row[inside]
    category, module = tape.category[rows].astype(np.int64), tape.module[rows]
    lines = [escaped(user_line(stack)) for stack in tape.stacks]
    narrow = finest = width // _BARS_PER_LINE
    group = np.arange(len(inside))
    while len(inside):
        # Narrow neighbours without a gap between them become one bar.
        joins = (size[1:] < narrow) & (size[:-1] < narrow)
        joins &= (category[1:] == category[:-1]) & (segment[1:] == segment[:-1])
        joins &= (module[1:] == module[:-1]) | (narrow > finest)
        joins &= base[1:] - (base[:-1] + size[:-1]) <= (0 if narrow == finest else narrow)
        # Bars are joined only within slots of this width, so that none grows much wider.
        slot = base // max(narrow, 1)
        joins &= slot[1:] == slot[:-1]
        group = np.append(0, np.cumsum(~joins))
        if np.bincount(category[np.append(True, ~joins)]).max(initial=0) <= _MAX_BARS or narrow > width:
            break  # in the second case each segment has one bar
        narrow *= 2
    firsts = np.flatnonzero(np.append(True, np.diff(group) > 0)) if len(group) else group
    ends = np.maximum.reduceat(base + size, firsts) if len(firsts) else firsts
    counts = np.diff(np.append(firsts, len(inside)))
    result: dict[Category, dict[str, Any]] = {}
    for kind in Category:
        of_kind = np.flatnonzero(category[firsts] == kind)
        if not len(of_kind):
            continue
        first = firsts[of_kind]
        result[kind] = {
            "line": line[segment[first]],
            "base": base[first],
            "size": ends[of_kind] - base[first],
            "row": rows[first],
            "text": [
                _block_text(tape, addresses, int(inside[block]), lines)
                if count == 1
                else f"<b>{count} {kind.text} blocks</b><br>{size_text(total)} in total"
                for block, count, total in zip(
                    first.tolist(), counts[of_kind].tolist(), (ends[of_kind] - base[first]).tolist(), strict=True
                )
            ],
        }
    return result


def _block_text(tape: Tape, addresses: AddressMap, block: int, lines: list[str]) -> str:
    row = int(addresses.row[block])
    kind = Category(int(tape.category[row])).text
    parts = [f"<b>{size_text(int(addresses.size[block]))} {kind}</b>"]
    requested = int(addresses.requested[block])
    if requested != addresses.size[block]:
        parts.append(f"{size_text(requested)} requested")
    if tape.tensor[row] >= 0:
        parts.append(escaped(tape.tensor_texts[int(tape.tensor[row])]))
    if addresses.pending[block]:
        parts.append("freed, waiting for another stream")
    for name, table, number in (("layer", tape.modules, tape.module[row]), ("op", tape.ops, tape.op[row])):
        if number >= 0 and table[number]:
            parts.append(f"{name}: {escaped(table[number])}")
    if tape.stack[row] >= 0:
        parts.append(lines[int(tape.stack[row])])
    if has_streams(tape):
        parts.append(stream_text(int(tape.stream[row])))
    step = int(tape.step[row])
    parts.append(f"allocated in step {step}" if step else "allocated in set-up")
    return "<br>".join(parts)
