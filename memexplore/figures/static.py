"""Draw the timeline of a Tape as an SVG image in pure Python, for saved notebooks; legible on light and on dark."""

from __future__ import annotations

import base64
import html
import textwrap

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import peak
from memexplore.analysis.layer_rows import held_layers
from memexplore.analysis.picture import picture, refused
from memexplore.analysis.verdict_content import verdict_content
from memexplore.figures import bands
from memexplore.figures.layers import largest_rows, open_rows
from memexplore.figures.palette import CAPACITY, COLOURS, FONT, RESERVED, Theme, byte_ticks, event_ticks
from memexplore.figures.positions import axis_ticks, positions
from memexplore.figures.scale import scale
from memexplore.figures.timeline import OVER_CAPACITY, REQUESTED, timeline_arrays
from memexplore.figures.timeline_layout import Plot, failed_rows, plot_labels, shown_bands, window_rows
from memexplore.tape import Category, Tape
from memexplore.text.units import size_text

_LEFT, _RIGHT, _BOTTOM = 70, 16, 82
_POINTS = 800
"""Maximum number of points per line."""
_LAYERS = 10
"""Layers below the timeline."""


class _Canvas:
    """SVG elements of an image, and its scales from rows and bytes to pixels."""

    def __init__(self, width: int, height: int, tape: Tape, axis_bytes: float, top: int) -> None:
        self.axis_bytes, self.top = axis_bytes, top
        self.right, self.bottom = width - _RIGHT, height - _BOTTOM
        inner = self.right - _LEFT, self.bottom - top
        self.plot = Plot(tape, *window_rows(tape, None), positions(tape), *inner, axis_bytes)
        self.elements: list[str] = []

    def x(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.pixels(self.plot.places.x(row))

    def pixels(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the pixels of places on the axis."""
        low, high = self.plot.ends
        return _LEFT + (x - low) / max(high - low, 1e-9) * (self.right - _LEFT)

    def y(self, size: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.bottom - size / self.axis_bytes * (self.bottom - self.top)

    def at(self, row: float, size: float) -> tuple[float, float]:
        return float(self.x(np.array(row))), float(self.y(np.array(size)))

    def steps(self, rows: NDArray[np.float64], sizes: NDArray[np.float64]) -> str:
        """Return the path commands of a line that changes its value at each row."""
        x, y = np.round(self.x(rows), 1), np.round(self.y(sizes), 1)
        moves = [f"M{x[0]:g} {y[0]:g}"]
        moves += [f"H{to_x:g}V{to_y:g}" for to_x, to_y in zip(x[1:].tolist(), y[1:].tolist(), strict=True)]
        return "".join(moves)

    def text(self, text: str, x: float, y: float, *, anchor: str = "start", size: int = 11, more: str = "") -> None:
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" {more}>{html.escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> None:
        self.elements.append(f'<path fill="none" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" {more}/>')


def svg(tape: Tape, width: int = 900, height: int = 420) -> str:
    """Return the timeline as an SVG document, with the layers at the peak below it.

    `width` and `height` are the pixels of the timeline. The background is transparent, the text has a grey that is
    legible on light and on dark, and each line has at most 800 points.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> svg(tape)[:4]
    '<svg'

    Raises ValueError for a tape that is not placed.
    """
    verdict, tape = verdict_content(tape), picture(tape)
    heights = scale(tape)
    # The mean width of a bold letter of 14 pixels is about 7.6 pixels, of a normal one of 12 pixels about 6.4.
    lines = [(part, 14, 'font-weight="600"') for part in textwrap.wrap(verdict.headline, int((width - 16) / 7.6))]
    lines += [(part, 12, "") for part in textwrap.wrap(verdict.detail, int((width - 16) / 6.4))]
    top = 44 + 20 * len(lines)
    canvas = _Canvas(width, height, tape, heights.ceiling * 1.15, top)
    for number, (line, size, more) in enumerate(lines):
        canvas.text(line, 8, 20 + 20 * number, size=size, more=more)
    if not len(tape):
        return _document(canvas.elements, width, top)
    arrays = timeline_arrays(tape, None, _POINTS, canvas.plot.places)
    _axes(canvas, tape, heights.ceiling)
    kinds = _areas(canvas, arrays)
    hatched = []
    if heights.capacity is not None and heights.allocated > heights.capacity:
        hatched.append(OVER_CAPACITY)
        over = canvas.steps(arrays["row"], np.maximum(arrays["allocated"], heights.capacity))
        canvas.elements.append(_hatched(f"{over}V{canvas.at(0, heights.capacity)[1]:.1f}H{_LEFT}Z"))
    if (end := refused(tape)) is not None:
        hatched.append(REQUESTED)
        left, right = canvas.at(len(tape) - 1, 0)[0], float(canvas.right)
        low = canvas.at(0, end.allocated)[1]
        high = max(canvas.at(0, end.allocated + end.requested)[1], float(canvas.top))
        canvas.elements.append(_hatched(f"M{left:.1f} {low:.1f}H{right:.1f}V{high:.1f}H{left:.1f}Z"))
    canvas.elements.append(
        f'<path fill="none" d="{canvas.steps(arrays["row"], arrays["reserved"])}" stroke="{RESERVED}" '
        'stroke-width="1.5" stroke-dasharray="6 4"/>'
    )
    x, y = canvas.at(heights.row, heights.allocated)
    canvas.elements.append(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{CAPACITY}" stroke="white" stroke-width="1.5"/>'
    )
    if heights.capacity is not None:
        y = canvas.at(0, heights.capacity)[1]
        canvas.line(_LEFT, y, canvas.right, y, CAPACITY, 'stroke-width="2"')
    for row in failed_rows(canvas.plot):
        x, _ = canvas.at(row, 0)
        canvas.line(x, canvas.top, x, canvas.bottom, CAPACITY, 'stroke-width="2" stroke-dasharray="2 3"')
    for (text, _, size), (x, y, anchor), colour, is_peak in plot_labels(canvas.plot, heights):
        more = ('font-weight="600" ' if size == 12 else "") + ("" if is_peak else f'fill="{colour}"')
        side = {"left": "start", "center": "middle", "right": "end"}[anchor]
        canvas.text(text, _LEFT + x, canvas.top + y + 4, anchor=side, size=size, more=more)
    _legend(canvas, kinds, hatched)
    return _document(canvas.elements, width, _layers(canvas, tape, heights.row, height))


def _axes(canvas: _Canvas, tape: Tape, ceiling: float) -> None:
    for value, text in zip(*byte_ticks(ceiling, most=5), strict=True):
        y = canvas.at(0, value)[1]
        canvas.line(_LEFT, y, canvas.right, y, RESERVED, 'stroke-opacity="0.3"')
        canvas.text(text, _LEFT - 6, y + 4, anchor="end")
    centre_y = (canvas.top + canvas.bottom) / 2
    rotation = f'transform="rotate(-90 14 {centre_y:g})"'
    canvas.text(f"allocated, {tape.meta.source}", 14, centre_y, anchor="middle", more=rotation)
    plot = canvas.plot
    ticks = axis_ticks(tape, plot.places, plot.first, plot.last, plot.width)
    rows = event_ticks(plot.first, plot.last)
    xs = plot.places.x(rows) if ticks is None else np.array(ticks["tickvals"])
    texts = [f"{row:,}" for row in rows] if ticks is None else ticks["ticktext"]
    for at, text in zip(np.interp(xs, plot.places.xs, plot.places.rows).tolist(), texts, strict=True):
        x, _ = canvas.at(at, 0)
        canvas.line(x, canvas.bottom, x, canvas.bottom + 4, RESERVED)
        canvas.text(text, x, canvas.bottom + 17, anchor="middle")
    canvas.text("event", (_LEFT + canvas.right) / 2, canvas.bottom + 33, anchor="middle")
    step_bands, phase_bands = shown_bands(plot)
    for band in step_bands if len(step_bands) * 8 <= plot.width else []:
        if band.first > plot.first:
            x = canvas.at(band.first, 0)[0]
            canvas.line(x, canvas.top, x, canvas.bottom, RESERVED, 'stroke-opacity="0.5" stroke-dasharray="2 3"')
    for band in bands.with_visible_label(step_bands, plot.x):
        canvas.text(band.text, _middle(canvas, band), canvas.top - 18, anchor="middle")
    for band in phase_bands if len(phase_bands) * 4 <= plot.width else []:
        left, right = canvas.at(band.first, 0)[0], canvas.at(band.last, 0)[0]
        colour = CAPACITY if band.text == bands.UNWINDING else RESERVED
        opacity = 0.12 + 0.12 * (int(band.phase or 0) % 3)
        canvas.elements.append(
            f'<rect x="{left:.1f}" y="{canvas.top - 14}" width="{right - left:.1f}" height="14" '
            f'fill="{colour}" fill-opacity="{opacity:.2f}"/>'
        )
    if len(phase_bands) * 4 <= plot.width:
        for band in bands.with_visible_label(phase_bands, plot.x, letter_pixels=6):
            canvas.text(band.text, _middle(canvas, band), canvas.top - 3.5, anchor="middle", size=10)


def _middle(canvas: _Canvas, band: bands.Band) -> float:
    return (canvas.at(band.first, 0)[0] + canvas.at(band.last, 0)[0]) / 2


def _areas(canvas: _Canvas, arrays: dict[str, NDArray[np.float64]]) -> list[Category]:
    """Draw the stacked areas and return their categories, bottom to top."""
    kinds = [kind for kind in Category if arrays[kind.text].any()]
    below = np.zeros_like(arrays["row"])
    uppers = []
    for kind in kinds:
        uppers.append((kind, below + arrays[kind.text]))
        below = uppers[-1][1]
    close = f"V{canvas.bottom}H{_LEFT}Z"
    # Each area reaches down to the axis and is drawn after the one above it, so no gap is visible between them.
    for kind, upper in reversed(uppers):
        canvas.elements.append(f'<path fill="{COLOURS[kind]}" d="{canvas.steps(arrays["row"], upper)}{close}"/>')
    return kinds


def _hatched(path: str) -> str:
    """Return a hatched area."""
    pattern = (
        '<pattern id="over" width="7" height="7" patternTransform="rotate(45)" patternUnits="userSpaceOnUse">'
        f'<path d="M0 0V7" stroke="{CAPACITY}" stroke-width="4" fill="none"/></pattern>'
    )
    return f'<defs>{pattern}</defs><path fill="url(#over)" d="{path}"/>'


def _legend(canvas: _Canvas, kinds: list[Category], hatched: list[str]) -> None:
    x, y = 8.0, canvas.bottom + 56.0
    entries = [(kind.text, f'fill="{COLOURS[kind]}"') for kind in kinds]
    entries += [(name, f'fill="url(#over)" stroke="{CAPACITY}"') for name in hatched] + [("reserved", "")]
    for text, fill in entries:
        width = 36 + 6.4 * len(text)
        if x + width > canvas.right:
            x, y = 8.0, y + 18
        if fill:
            canvas.elements.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="16" height="10" {fill}/>')
        else:
            canvas.line(x, y - 4, x + 16, y - 4, RESERVED, 'stroke-width="1.5" stroke-dasharray="6 4"')
        canvas.text(text, x + 21, y)
        x += width


def _layers(canvas: _Canvas, tape: Tape, row: int, top: int) -> int:
    """Draw the largest layers with what they hold after a row, as rows with bars; return the height of the image.

    A line below them counts the rows that are left out.
    """
    rows, others = largest_rows(open_rows(held_layers(tape, row)), _LAYERS)
    if not any(tape.modules) or not rows:
        return top
    canvas.text("Layers at the peak", 8, top + 8, size=12, more='font-weight="600"')
    left, total = 320.0, max(shown.row.total for shown in rows)
    for number, (layers, level, label) in enumerate(rows):
        y = top + 28 + 18 * number
        name = textwrap.shorten(label, 34 - 2 * level, placeholder="…")
        canvas.text(name, 8 + 14 * (level - 1), y)
        canvas.text(size_text(layers.total), left - 10, y, anchor="end")
        x = left
        for kind, size in zip(Category, layers.sizes, strict=True):
            width = size / total * (canvas.right - left)
            if size:
                canvas.elements.append(
                    f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="{width:.1f}" height="10" fill="{COLOURS[kind]}"/>'
                )
            x += width
    bottom = top + 28 + 18 * len(rows)
    if not others:
        return bottom
    count, most = len(others), max(left_out.row.total for left_out in others)
    canvas.text(f"not shown: {count} smaller {'row' if count == 1 else 'rows'}, up to {size_text(most)}", 8, bottom)
    return bottom + 18


def _document(elements: list[str], width: int, height: int) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" fill="{Theme.ANY.value}" font-family="{html.escape(FONT)}">'
    )
    return head + "".join(elements) + "</svg>"


def image(tape: Tape, width: int = 900) -> str:
    """Return the image of `svg` as an HTML `<img>` with its peak as the text alternative.

    Saved notebooks drop an inline `<svg>` and keep an image with a data URL.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> image(tape)[:44]
    '<img style="max-width:100%" alt="Timeline of'

    Raises ValueError for a tape that is not placed.
    """
    data = base64.b64encode(svg(tape, width).encode()).decode()
    alternative = f"Timeline of the allocated memory, peak {size_text(peak(picture(tape))[0])}"
    return f'<img style="max-width:100%" alt="{alternative}" src="data:image/svg+xml;base64,{data}">'
