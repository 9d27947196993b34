"""Write plain Python values as HTML: a sentence, a sparkline, and a table in one unit, legible on light and on dark.

Pages that show the HTML may remove style sheets and scripts, so every style is in its element. Text has the colour of
the page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memexplore.analysis.curves import category_bytes, curve, peak
from memexplore.analysis.picture import picture
from memexplore.analysis.places import place
from memexplore.analysis.verdict_content import verdict_content
from memexplore.figures.palette import CAPACITY, COLOURS, FITS
from memexplore.tape import Category, Tape
from memexplore.text.units import in_unit, size_text, unit_of

if TYPE_CHECKING:
    from memexplore.analysis.comparison import Comparison
    from memexplore.analysis.difference import Difference

LESS = "#009E73"
"""Colour of memory that is saved; memory that is added has that of the capacity."""
_RULE = "1px solid rgba(128,128,128,0.4)"
_PADDING = "padding:0.15em 0.4em"
_SHORT = 24
"""Letters of a text that fits on a line of any table."""
_POINTS = 240
_ROWS = 25
"""Rows of a difference that are shown."""
_HIGHEST_CAPACITY = 2.0
"""The line of the capacity is drawn up to this multiple of the peak, so that the curve stays visible."""


class Cell(NamedTuple):
    """One cell of a table, as HTML."""

    content: str
    is_number: bool = False


def words(text: str) -> Cell:
    """Return a cell of plain text; a short one is never wrapped."""
    content = html.escape(text)
    return Cell(f'<span style="white-space:nowrap">{content}</span>' if len(text) <= _SHORT else content)


def category_cell(category: Category) -> Cell:
    """Return a cell with the colour and the name of a category."""
    return Cell(f'<span style="white-space:nowrap">{_swatch(category)}{category.text}</span>')


def _line_cell(line: str) -> Cell:
    text, path = html.escape(place(line).text), html.escape(line)
    return Cell(f'<span style="white-space:nowrap" title="{path}">{text}</span>')


def number(text: str) -> Cell:
    """Return a cell with a number as text, right-aligned."""
    return Cell(html.escape(text), is_number=True)


def form(sentences: Sequence[str], *parts: str) -> str:
    """Return sentences, the first in bold, over other HTML.

    >>> form(["Fits", "a < b"], "<hr>")
    '<div><p style="margin:0 0 0.3em"><b>Fits</b></p><p style="margin:0 0 0.3em">a &lt; b</p><hr></div>'
    """
    first = [_paragraph(f"<b>{html.escape(sentence)}</b>") for sentence in sentences[:1]]
    return f"<div>{''.join((*first, paragraphs(sentences[1:]), *parts))}</div>"


def paragraphs(sentences: Sequence[str]) -> str:
    """Return sentences as paragraphs.

    >>> paragraphs(["a < b"])
    '<p style="margin:0 0 0.3em">a &lt; b</p>'
    """
    return "".join(_paragraph(html.escape(sentence)) for sentence in sentences)


def _paragraph(content: str) -> str:
    return f'<p style="margin:0 0 0.3em">{content}</p>'


def table(titles: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table; a title stands over its column as the first row of the column is aligned."""
    numeric = [cell.is_number for cell in rows[0]] if rows else []
    numeric += [False] * (len(titles) - len(numeric))
    # A title may wrap where the page is narrow: only numbers must not.
    rule = f"border-bottom:{_RULE};padding:0.2em 0.4em;white-space:normal;vertical-align:bottom"
    head = "".join(
        f'<th scope="col" style="{_align(is_number)};{rule}">{html.escape(title)}</th>'
        for title, is_number in zip(titles, numeric, strict=True)
    )
    body = "".join(f"<tr>{''.join([*map(_heading_cell, row[:1]), *map(_cell, row[1:])])}</tr>" for row in rows)
    style = "border-collapse:collapse;border:0;margin:0.4em 0;color:inherit;background:none"
    return (
        f'<div style="overflow-x:auto"><table style="{style}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _heading_cell(cell: Cell) -> str:
    """Return the first cell of a row, which names it."""
    return f'<th scope="row" style="{_align(cell.is_number)};{_PADDING};font-weight:normal">{cell.content}</th>'


def _cell(cell: Cell) -> str:
    return f'<td style="{_align(cell.is_number)};{_PADDING}">{cell.content}</td>'


def _align(is_number: bool) -> str:
    return "text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums" if is_number else "text-align:left"


def _swatch(category: Category) -> str:
    # The outline shows light colours on light pages.
    return (
        '<span style="display:inline-block;width:0.75em;height:0.75em;margin-right:0.4em;'
        f'border:1px solid currentColor;background:{COLOURS[category]}"></span>'
    )


def bar(share: float, label: str, colour: str = FITS) -> Cell:
    """Return a bar for a share of a whole, with a label for screen readers; a share above 1 fills it."""
    return Cell(
        f'<div role="img" aria-label="{html.escape(label)}" title="{html.escape(label)}" '
        'style="width:5em;height:0.8em;border:1px solid currentColor">'
        f'<div style="width:{min(max(share, 0), 1):.1%};height:100%;background:{colour}"></div></div>'
    )


def two_sided_bar(change: int, largest: int) -> Cell:
    """Return a bar to the left for less memory and to the right for more, in the scale of the largest change."""
    width = min(abs(change) / max(largest, 1), 1) * 50
    label = f"{size_text(abs(change))} {'less' if change < 0 else 'more'}"
    left = 50 - width if change < 0 else 50
    return Cell(
        f'<div role="img" aria-label="{label}" title="{label}" '
        'style="position:relative;width:12em;height:0.9em;border-bottom:1px solid rgba(128,128,128,0.4)">'
        f'<div style="position:absolute;left:{left:.1f}%;width:{width:.1f}%;height:100%;'
        f'background:{LESS if change < 0 else CAPACITY}"></div>'
        '<div style="position:absolute;left:50%;height:100%;border-left:1px solid currentColor"></div></div>'
    )


def signed(size: int, unit: str) -> str:
    """Return a change in a unit with its sign.

    >>> signed(3 << 29, "GiB"), signed(-(1 << 30), "GiB"), signed(0, "GiB")
    ('+1.50', '−1.00', '0.00')
    """
    text = in_unit(size, unit)
    return f"+{text}" if size > 0 and text.strip("0.") else text


def sparkline(tape: Tape, width: int = 560, height: int = 72, top: int = 0) -> str:
    """Return the allocated bytes over the events as inline SVG: the peak as a dot, the capacity as a line if near.

    `top` are the bytes at the top, by default those of the tape: sparklines below each other have one scale.

    Raises ValueError for a tape that is not placed.
    """
    values = curve(tape)
    if not len(values):
        return ""
    highest, row = peak(tape)
    capacity = tape.meta.capacity
    shown = capacity if capacity is not None and capacity <= highest * _HIGHEST_CAPACITY else None
    top = max(top or max(highest, shown or 0), 1)
    # The highest value of each of `_POINTS` parts, so the peak is never lost.
    starts = np.unique(np.linspace(0, len(values), min(_POINTS, len(values)), endpoint=False).astype(np.int64))
    heights = np.maximum.reduceat(values, starts)

    def y(size: float) -> float:
        return round(height - 2 - size / top * (height - 8), 1)

    scale = width / max(len(values), 1)
    path = f"M0 {y(0)}" + "".join(
        f"H{start * scale:.1f}V{y(size)}" for start, size in zip(starts.tolist(), heights.tolist(), strict=True)
    )
    path += f"H{width}"
    label = f"Allocated memory over {len(tape):,} events, peak {size_text(highest)}"
    parts = [
        f'<path d="{path}V{y(0)}Z" fill="currentColor" fill-opacity="0.18"/>',
        f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.2"/>',
    ]
    if shown is not None and shown <= top:
        parts.append(f'<path d="M0 {y(shown)}H{width}" stroke="{CAPACITY}" stroke-width="1.5" stroke-dasharray="6 3"/>')
    parts.append(f'<circle cx="{row * scale:.1f}" cy="{y(highest)}" r="3" fill="{CAPACITY}"/>')
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'style="max-width:100%;overflow:visible"><title>{label}</title>{"".join(parts)}</svg>'
    )


def unbroken(detail: str) -> str:
    """Return the line below the headline of a verdict: no line on a page begins with a percent sign or a version alone.

    >>> unbroken("Peak 2 GiB · 80 % activations · predicted, torch 2.13")
    'Peak 2 GiB · 80\\xa0% activations · predicted, torch\\xa02.13'
    """
    return re.sub(r"(?<=\d) (?=%)|(?<=, torch) (?=\d)", "\xa0", detail)


def tape_html(tape: Tape) -> str:
    """Return a tape as HTML: its verdict, a sparkline, and the categories at the peak; of one not placed a line."""
    try:
        verdict = verdict_content(tape)
    except ValueError:
        return form([tape_text(tape).strip("<>")])
    drawn = picture(tape)
    allocated, row = peak(drawn)
    sizes = category_bytes(drawn, row).tolist()
    unit = unit_of(sizes)
    rows = [
        [
            category_cell(kind),
            number(in_unit(sizes[kind], unit)),
            number(f"{sizes[kind] / allocated * 100:.1f} %"),
            bar(sizes[kind] / allocated, f"{sizes[kind] / allocated * 100:.1f} % of the peak", COLOURS[kind]),
        ]
        for kind in sorted(Category, key=lambda kind: -sizes[kind])
        if sizes[kind]
    ]
    lines = [unbroken(verdict.detail)]
    lines += [f"{place.text}: {place.code}" if place.code else place.text for place in verdict.where[:1]]
    titles = ("at the peak", f"allocated, {unit}", "share", "")
    return form([verdict.headline, *lines], sparkline(drawn), table(titles, rows) if rows else "")


def changes_html(code: str, changed: Sequence[tuple[str, str, str]], unchanged: Sequence[str]) -> str:
    """Return settings as HTML: their line of code, and each changed one with its value and the value as written.

    The names of the `unchanged` settings are behind a disclosure.

    >>> "batch" in changes_html("Knobs(batch=4)", [("batch", "4", "as written")], ["precision"])
    True
    """
    rows = [[words(name), words(value), words(written)] for name, value, written in changed]
    title = f'<p style="margin:0 0 0.3em"><code>{html.escape(code)}</code></p>'
    names = ", ".join(html.escape(name) for name in unchanged)
    rest = f"<details><summary>{len(unchanged)} as written</summary>{names}</details>" if unchanged else ""
    return form([], title, table(("knob", "changed to", "written"), rows) if rows else "", rest)


def difference_html(difference: Difference) -> str:
    """Return the table of `diff` as HTML, with bars to the left for less memory and to the right for more."""
    changed = difference[difference["difference"] != 0]
    unit = unit_of([*difference["before"], *difference["after"]])
    largest = int(changed["difference"].abs().max()) if len(changed) else 0
    kinds = {kind.text: kind for kind in Category}
    rows = [
        [
            words(entry["layer"]),
            number(signed(entry["difference"], unit)),
            two_sided_bar(entry["difference"], largest),
            number(in_unit(entry["before"], unit)),
            number(in_unit(entry["after"], unit)),
            category_cell(kinds[entry["category"]]),
            _line_cell(entry["line"]),
        ]
        for entry in changed.head(_ROWS).to_dict("records")
    ]
    same, more = len(difference) - len(changed), len(changed) - len(rows)
    others = [f"{more} more differences" if more else "", f"{same} without a difference" if same else ""]
    rest = [f"Not shown: {', '.join(filter(None, others))}."] if more or same else []
    titles = ("layer", f"difference, {unit}", "", f"before, {unit}", f"after, {unit}", "category", "line")
    return form([difference.text, *rest], table(titles, rows) if rows else "")


def comparison_html(comparison: Comparison) -> str:
    """Return a comparison of a measured tape with a predicted one as HTML."""
    return form([comparison.text], comparison_tables(comparison))


def comparison_tables(comparison: Comparison) -> str:
    """Return the peaks of a comparison and the requests that differ as HTML."""
    rows = [[words(name), *map(number, values)] for name, *values in comparison.table()]
    differing = [[words(group.full_text)] for group in comparison.differing]
    peaks = table(("", "measured", "predicted", "difference"), rows)
    return peaks + (table(("requests that differ",), differing) if differing else "")


def tape_text(tape: Tape) -> str:
    """Return a tape in one line.

    >>> from memexplore.tape import Meta, Source
    >>> tape_text(Tape.from_columns({"address": [0], "size": [40]}, meta=Meta(Source.MEASURED, "cpu")))
    '<Tape: 1 event · Peak 40 B allocated · measured on cpu>'
    """
    events = f"{len(tape):,} event{'' if len(tape) == 1 else 's'}"
    try:
        state = verdict_content(tape).headline
    except ValueError:
        state = "not placed: memexplore.replay(tape) assigns addresses"
    return f"<Tape: {events} · {state} · {tape.meta.source} on {tape.meta.device}>"
