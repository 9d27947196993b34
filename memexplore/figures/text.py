"""Write figures as plain text: a verdict, then a small table with bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from memexplore.analysis.curves import category_bytes, peak
from memexplore.analysis.picture import picture
from memexplore.analysis.streams import stream_text
from memexplore.analysis.tables import LAYER_CATEGORIES, layers, tensors
from memexplore.analysis.tradeoffs import Point, frontier
from memexplore.analysis.verdict_content import verdict_content
from memexplore.tape import Category, Tape
from memexplore.text.tensor_text import tensor_text
from memexplore.text.units import signed_percent, size_text

_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(share: float, width: int = 24) -> str:
    """Return a bar for a share between 0 and 1; `width` is the letters of a full bar, in steps of 1/8 letter.

    >>> bar(0.5, 4), bar(0.3, 4)
    ('██', '█▎')
    """
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def timeline_text(tape: Tape) -> str:
    """Return the timeline as text: the verdict, and the allocated bytes of each category at the peak.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [1024], "category": [Category.INPUT]},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> print(timeline_text(tape))
    Peak 1.00 KiB allocated
    On the CPU · 100 % inputs: try a smaller batch · measured
    <BLANKLINE>
    input  1.00 KiB  100 %  ████████████████████████

    Raises ValueError for a tape that is not placed.
    """
    drawn = picture(tape)
    allocated, row = peak(drawn)
    shares = category_bytes(drawn, row)
    rows = [
        (
            kind.text,
            size_text(int(shares[kind])),
            _percent(shares[kind] / allocated),
            bar(shares[kind] / allocated),
        )
        for kind in sorted(Category, key=lambda kind: -shares[kind])
        if shares[kind]
    ]
    return "\n\n".join([verdict_content(tape).text, *([_columns(rows)] if rows else [])])


def _percent(share: float) -> str:
    return "<1 %" if share < 0.005 else f"{share * 100:.0f} %"


def layers_text(tape: Tape, count: int = 12) -> str:
    """Return the layers as text: the modules with the most bytes of their own, and the largest category of each.

    Raises ValueError for a tape that is not placed.
    """
    table = layers(tape)
    names = [kind.name.lower() for kind in LAYER_CATEGORIES]
    held = table[names].sum(axis=1).sort_values(ascending=False, kind="stable").head(count)
    held = held[held > 0]
    rows = []
    for name, size in held.items():
        largest = LAYER_CATEGORIES[int(np.argmax(table.loc[name, names].to_numpy(np.int64)))]
        rows.append((str(name), size_text(int(size)), f"mostly {largest.text}", bar(int(size) / int(held.iloc[0]))))
    return "\n\n".join([verdict_content(tape).text, *([_columns(rows)] if rows else [])])


def tensors_text(tape: Tape, row: int | None = None, count: int = 12) -> str:
    """Return the largest tensors alive after a row (default: the peak allocated) as text.

    Raises IndexError for a row outside the tape, ValueError for a tape that is not placed.
    """
    table = tensors(tape, row, count)
    any_known = bool((table["dtype"] != "").any())
    rows = []
    for entry in table.to_dict("records"):
        text = tensor_text(entry["shape"], entry["dtype"]) if entry["dtype"] else "–"
        stream = [stream_text(entry["stream"])] if "stream" in entry else []
        origin = (entry["layer"] or "–", entry["op"] or "–", *stream, entry["line"] or "–")
        rows.append((size_text(int(entry["size"])), entry["category"], *([text] if any_known else []), *origin))
    return "\n\n".join([verdict_content(tape).text, *([_columns(rows)] if rows else [])])


def tradeoff_text(points: Sequence[Point], capacity: int | None = None) -> str:
    """Return settings as text, fastest first: outcome, need, time, FLOPs; a star marks the Pareto frontier.

    >>> print(tradeoff_text([Point("as written", 1.0, 0.0, 2048, False), Point("sqrt", 1.3, 0.3, 1024, True)], 1536))
    1 of 2 settings fit in 1.50 KiB
    <BLANKLINE>
    does not fit  2.00 KiB  1.00x   +0 %  ██████████████████  * as written
    fits          1.00 KiB  1.30x  +30 %  █████████           * sqrt
    """
    fitting = sum(point.fits for point in points)
    title = f"{fitting} of {len(points)} settings fit" + (f" in {size_text(capacity)}" if capacity is not None else "")
    best = frontier([(point.slow_down, point.needed) for point in points])
    highest = max((point.needed for point in points), default=1) or 1
    rows = [
        (
            "fits" if points[number].fits else "does not fit",
            size_text(points[number].needed),
            _text_or_dash(points[number].slow_down, "{:.2f}x".format),
            _text_or_dash(points[number].extra_flops, signed_percent),
            bar(points[number].needed / highest, 18),
            f"{'*' if number in best else ' '} {points[number].setting}",
        )
        for number in sorted(range(len(points)), key=lambda number: (points[number].slow_down, number))
    ]
    return "\n\n".join([title, *([_columns(rows)] if rows else [])])


def _text_or_dash(value: float, text: Callable[[float], str]) -> str:
    return "–" if math.isnan(value) else text(value)


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows as aligned columns; sizes and per cents are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if cell.endswith(("B", "%")) else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
