"""Timeline of a Tape as an SVG image in pure Python, for saved notebooks; legible on light and on dark."""

from __future__ import annotations

import base64
import html
import textwrap

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import peak
from memexplore.analysis.verdict_content import verdict_content
from memexplore.figures import bands
from memexplore.figures.palette import CAPACITY, COLOURS, FONT, RESERVED, Theme, byte_ticks, event_ticks
from memexplore.figures.scale import scale
from memexplore.figures.timeline import timeline_arrays, window_rows
from memexplore.tape import Action, Category, Tape
from memexplore.units import size_text

_LEFT, _RIGHT, _BOTTOM = 70, 16, 82
_POINTS = 800
"""Maximum number of points per line."""


class _Canvas:
    """SVG elements of an image, and its scales from rows and bytes to pixels."""

    def __init__(self, width: int, height: int, rows: tuple[int, int], axis_bytes: float, top: int) -> None:
        self.rows, self.axis_bytes, self.top = rows, axis_bytes, top
        self.right, self.bottom = width - _RIGHT, height - _BOTTOM
        self.elements: list[str] = []

    def x(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        first, last = self.rows
        return _LEFT + (row - first) / max(last - first, 1) * (self.right - _LEFT)

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
    """Return the timeline as an SVG document: verdict, areas, reserved, capacity, steps, peak and legend.

    `width` and `height` are in pixels. The background is transparent, the text has a grey that is legible on light and
    on dark, and each line has at most 800 points.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> svg(tape)[:4]
    '<svg'

    Raises ValueError for a tape that is not placed.
    """
    heights = scale(tape)
    # The mean width of a bold letter of 14 pixels is about 7.6 pixels, of a normal one of 12 pixels about 6.4.
    verdict = verdict_content(tape)
    lines = [(part, 14, 'font-weight="600"') for part in textwrap.wrap(verdict.headline, int((width - 16) / 7.6))]
    lines += [(part, 12, "") for part in textwrap.wrap(verdict.detail, int((width - 16) / 6.4))]
    top = 44 + 20 * len(lines)
    canvas = _Canvas(width, height, window_rows(tape, None), heights.ceiling * 1.15, top)
    for number, (line, size, more) in enumerate(lines):
        canvas.text(line, 8, 20 + 20 * number, size=size, more=more)
    if not len(tape):
        return _document(canvas.elements, width, top)
    arrays = timeline_arrays(tape, None, _POINTS)
    _axes(canvas, tape, heights.ceiling)
    kinds = _areas(canvas, arrays)
    canvas.elements.append(
        f'<path fill="none" d="{canvas.steps(arrays["row"], arrays["reserved"])}" stroke="{RESERVED}" '
        'stroke-width="1.5" stroke-dasharray="6 4"/>'
    )
    x, y = canvas.at(heights.row, heights.allocated)
    in_right_half = x > (_LEFT + canvas.right) / 2
    canvas.elements.append(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{CAPACITY}" stroke="white" stroke-width="1.5"/>'
    )
    above = canvas.at(0, heights.label)[1] - 6
    x += 8 if in_right_half else -8
    label = f"peak {size_text(heights.allocated)}"
    canvas.text(label, x, above, anchor="end" if in_right_half else "start", size=12, more='font-weight="600"')
    if heights.capacity is not None:
        y = canvas.at(0, heights.capacity)[1]
        canvas.line(_LEFT, y, canvas.right, y, CAPACITY, 'stroke-width="2"')
    y = canvas.top + 14 if heights.capacity is None else canvas.at(0, heights.capacity)[1] - 5
    x, anchor = (_LEFT + 4.0, "start") if in_right_half else (canvas.right - 4.0, "end")
    canvas.text(heights.capacity_text, x, y, anchor=anchor, more=f'fill="{CAPACITY}"')
    for row in np.flatnonzero(tape.action == Action.OOM)[-1:].tolist():
        x, _ = canvas.at(row, 0)
        canvas.line(x, canvas.top, x, canvas.bottom, CAPACITY, 'stroke-width="2" stroke-dasharray="2 3"')
    _legend(canvas, kinds)
    return _document(canvas.elements, width, height)


def _axes(canvas: _Canvas, tape: Tape, ceiling: float) -> None:
    for value, text in zip(*byte_ticks(ceiling, most=5), strict=True):
        y = canvas.at(0, value)[1]
        canvas.line(_LEFT, y, canvas.right, y, RESERVED, 'stroke-opacity="0.3"')
        canvas.text(text, _LEFT - 6, y + 4, anchor="end")
    centre_y = (canvas.top + canvas.bottom) / 2
    rotation = f'transform="rotate(-90 14 {centre_y:g})"'
    canvas.text(f"allocated, {tape.meta.source}", 14, centre_y, anchor="middle", more=rotation)
    window = canvas.rows
    for row in event_ticks(*window):
        x, _ = canvas.at(row, 0)
        canvas.line(x, canvas.bottom, x, canvas.bottom + 4, RESERVED)
        canvas.text(f"{row:,}", x, canvas.bottom + 17, anchor="middle")
    canvas.text("event", (_LEFT + canvas.right) / 2, canvas.bottom + 33, anchor="middle")
    pixels = canvas.right - _LEFT
    step_bands = bands.steps(tape, window)
    for band in step_bands if len(step_bands) * 8 <= pixels else []:
        if band.first > window[0]:
            x = canvas.at(band.first, 0)[0]
            canvas.line(x, canvas.top, x, canvas.bottom, RESERVED, 'stroke-opacity="0.5" stroke-dasharray="2 3"')
    for band in bands.with_visible_label(step_bands, window, pixels):
        canvas.text(band.text, canvas.at((band.first + band.last) / 2, 0)[0], canvas.top - 18, anchor="middle")
    phase_bands = bands.phases(tape, window)
    for band in phase_bands if len(phase_bands) * 4 <= pixels else []:
        left, right = canvas.at(band.first, 0)[0], canvas.at(band.last, 0)[0]
        opacity = 0.12 + 0.12 * int(band.phase or 0)
        canvas.elements.append(
            f'<rect x="{left:.1f}" y="{canvas.top - 14}" width="{right - left:.1f}" height="14" '
            f'fill="{RESERVED}" fill-opacity="{opacity:.2f}"/>'
        )
    if len(phase_bands) * 4 <= pixels:
        for band in bands.with_visible_label(phase_bands, window, pixels, letter_pixels=6):
            centre = canvas.at((band.first + band.last) / 2, 0)[0]
            canvas.text(band.text, centre, canvas.top - 3.5, anchor="middle", size=10)


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


def _legend(canvas: _Canvas, kinds: list[Category]) -> None:
    x, y = 8.0, canvas.bottom + 56.0
    entries = [(kind.text, f'fill="{COLOURS[kind]}"') for kind in kinds] + [("reserved", "")]
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
    alternative = f"Timeline of the allocated memory, peak {size_text(peak(tape)[0])}"
    return f'<img style="max-width:100%" alt="{alternative}" src="data:image/svg+xml;base64,{data}">'
