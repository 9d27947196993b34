"""The timeline as one SVG picture in pure Python, for saved notebooks, readable on light and on dark."""

from __future__ import annotations

import base64
import html
import textwrap

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.summary import sentence
from memexplore.figures import bands
from memexplore.figures.palette import CAPACITY, COLOURS, FONT, RESERVED, Theme, byte_ticks, event_ticks
from memexplore.figures.scale import scale
from memexplore.figures.timeline import timeline_arrays, window_rows
from memexplore.tape import Action, Category, Tape
from memexplore.units import size_text

_LEFT, _RIGHT, _BOTTOM = 70, 16, 82
_POINTS = 800


class _Picture:
    """The elements drawn so far, and the scales from rows and bytes to pixels."""

    def __init__(self, width: int, height: int, rows: tuple[int, int], top: float, roof: int) -> None:
        self.rows, self.top, self.roof = rows, top, roof
        self.right, self.floor = width - _RIGHT, height - _BOTTOM
        self.elements: list[str] = []

    def x(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        first, last = self.rows
        return _LEFT + (row - first) / max(last - first, 1) * (self.right - _LEFT)

    def y(self, size: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.floor - size / self.top * (self.floor - self.roof)

    def at(self, row: float, size: float) -> tuple[float, float]:
        return float(self.x(np.array(row))), float(self.y(np.array(size)))

    def steps(self, rows: NDArray[np.float64], sizes: NDArray[np.float64]) -> str:
        """A line that keeps its height until the next row, as path commands."""
        x, y = np.round(self.x(rows), 1), np.round(self.y(sizes), 1)
        moves = [f"M{x[0]:g} {y[0]:g}"]
        moves += [f"H{to_x:g}V{to_y:g}" for to_x, to_y in zip(x[1:].tolist(), y[1:].tolist(), strict=True)]
        return "".join(moves)

    def text(self, words: str, x: float, y: float, *, anchor: str = "start", size: int = 11, more: str = "") -> None:
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" {more}>'
            f"{html.escape(words)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> None:
        self.elements.append(f'<path fill="none" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" {more}/>')


def svg(tape: Tape, width: int = 900, height: int = 420) -> str:
    """The timeline as an SVG document: sentence, areas, reserved, capacity, steps, peak and legend; sizes in pixels.

    Background transparent, text in a grey that is readable on light and on dark; at most 800 points a line.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> svg(tape)[:4]
    '<svg'

    Raises ValueError where the tape is not placed.
    """
    heights = scale(tape)
    # A letter 14 pixels high and bold is about 7.6 pixels wide, one 12 pixels high about 6.4.
    head, *others = sentence(tape).splitlines()
    lines = [(part, 14, 'font-weight="600"') for part in textwrap.wrap(head, int((width - 16) / 7.6))]
    lines += [(part, 12, "") for line in others for part in textwrap.wrap(line, int((width - 16) / 6.4))]
    roof = 44 + 20 * len(lines)
    picture = _Picture(width, height, window_rows(tape, None), heights.ceiling * 1.15, roof)
    for number, (line, size, more) in enumerate(lines):
        picture.text(line, 8, 20 + 20 * number, size=size, more=more)
    if not len(tape):
        return _document(picture.elements, width, roof)
    arrays = timeline_arrays(tape, None, _POINTS)
    _axes(picture, tape, heights.ceiling)
    shown = _areas(picture, arrays)
    picture.elements.append(
        f'<path fill="none" d="{picture.steps(arrays["row"], arrays["reserved"])}" stroke="{RESERVED}" '
        'stroke-width="1.5" stroke-dasharray="6 4"/>'
    )
    x, y = picture.at(heights.row, heights.allocated)
    on_right = x > (_LEFT + picture.right) / 2
    picture.elements.append(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{CAPACITY}" stroke="white" stroke-width="1.5"/>'
    )
    above = picture.at(0, heights.label)[1] - 6
    x += 8 if on_right else -8
    words = f"peak {size_text(heights.allocated)}"
    picture.text(words, x, above, anchor="end" if on_right else "start", size=12, more='font-weight="600"')
    if heights.capacity is not None:
        y = picture.at(0, heights.capacity)[1]
        picture.line(_LEFT, y, picture.right, y, CAPACITY, 'stroke-width="2"')
    y = picture.roof + 14 if heights.capacity is None else picture.at(0, heights.capacity)[1] - 5
    x, anchor = (_LEFT + 4.0, "start") if on_right else (picture.right - 4.0, "end")
    picture.text(heights.capacity_text, x, y, anchor=anchor, more=f'fill="{CAPACITY}"')
    for row in np.flatnonzero(tape.action == Action.OOM)[-1:].tolist():
        x, _ = picture.at(row, 0)
        picture.line(x, picture.roof, x, picture.floor, CAPACITY, 'stroke-width="2" stroke-dasharray="2 3"')
    _legend(picture, shown)
    return _document(picture.elements, width, height)


def _axes(picture: _Picture, tape: Tape, ceiling: float) -> None:
    for value, text in zip(*byte_ticks(ceiling, most=5), strict=True):
        y = picture.at(0, value)[1]
        picture.line(_LEFT, y, picture.right, y, RESERVED, 'stroke-opacity="0.3"')
        picture.text(text, _LEFT - 6, y + 4, anchor="end")
    middle = (picture.roof + picture.floor) / 2
    upright = f'transform="rotate(-90 14 {middle:g})"'
    picture.text(f"allocated, {tape.meta.source}", 14, middle, anchor="middle", more=upright)
    window = picture.rows
    for row in event_ticks(*window):
        x, _ = picture.at(row, 0)
        picture.line(x, picture.floor, x, picture.floor + 4, RESERVED)
        picture.text(f"{row:,}", x, picture.floor + 17, anchor="middle")
    picture.text("event", (_LEFT + picture.right) / 2, picture.floor + 33, anchor="middle")
    pixels = picture.right - _LEFT
    step_bands = bands.steps(tape, window)
    for band in step_bands if len(step_bands) * 8 <= pixels else []:
        if band.first > window[0]:
            x = picture.at(band.first, 0)[0]
            picture.line(x, picture.roof, x, picture.floor, RESERVED, 'stroke-opacity="0.5" stroke-dasharray="2 3"')
    for band in bands.with_visible_label(step_bands, window, pixels):
        picture.text(band.text, picture.at((band.first + band.last) / 2, 0)[0], picture.roof - 18, anchor="middle")
    phase_bands = bands.phases(tape, window)
    for band in phase_bands if len(phase_bands) * 4 <= pixels else []:
        left, right = picture.at(band.first, 0)[0], picture.at(band.last, 0)[0]
        opacity = 0.12 + 0.12 * int(band.phase or 0)
        picture.elements.append(
            f'<rect x="{left:.1f}" y="{picture.roof - 14}" width="{right - left:.1f}" height="14" '
            f'fill="{RESERVED}" fill-opacity="{opacity:.2f}"/>'
        )
    if len(phase_bands) * 4 <= pixels:
        for band in bands.with_visible_label(phase_bands, window, pixels, letter=6):
            centre = picture.at((band.first + band.last) / 2, 0)[0]
            picture.text(band.text, centre, picture.roof - 3.5, anchor="middle", size=10)


def _areas(picture: _Picture, arrays: dict[str, NDArray[np.float64]]) -> list[Category]:
    """Draw the areas from the bottom up; the answer is the categories that occur."""
    shown = [kind for kind in Category if arrays[kind.text].any()]
    below = np.zeros_like(arrays["row"])
    edges = []
    for kind in shown:
        edges.append((kind, below + arrays[kind.text]))
        below = edges[-1][1]
    floor = f"V{picture.floor}H{_LEFT}Z"
    # From the top down, so that every area covers the rest of the one above it and no seam shows.
    for kind, upper in reversed(edges):
        picture.elements.append(f'<path fill="{COLOURS[kind]}" d="{picture.steps(arrays["row"], upper)}{floor}"/>')
    return shown


def _legend(picture: _Picture, shown: list[Category]) -> None:
    x, y = 8.0, picture.floor + 56.0
    entries = [(kind.text, f'fill="{COLOURS[kind]}"') for kind in shown] + [("reserved", "")]
    for text, fill in entries:
        width = 36 + 6.4 * len(text)
        if x + width > picture.right:
            x, y = 8.0, y + 18
        if fill:
            picture.elements.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="16" height="10" {fill}/>')
        else:
            picture.line(x, y - 4, x + 16, y - 4, RESERVED, 'stroke-width="1.5" stroke-dasharray="6 4"')
        picture.text(text, x + 21, y)
        x += width


def _document(elements: list[str], width: int, height: int) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" fill="{Theme.ANY.value}" font-family="{html.escape(FONT)}">'
    )
    return head + "".join(elements) + "</svg>"


def image(tape: Tape, width: int = 900) -> str:
    """The picture of `svg` as one HTML `<img>`, its text alternative the sentence.

    A saved notebook drops a bare `<svg>` but keeps an image with a data address (FRONTEND.md, section 5).

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [10]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> image(tape)[:43]
    '<img style="max-width:100%" alt="Peak 10 B '

    Raises ValueError where the tape is not placed.
    """
    data = base64.b64encode(svg(tape, width).encode()).decode()
    words = html.escape(" ".join(sentence(tape).split("\n")))
    return f'<img style="max-width:100%" alt="{words}" src="data:image/svg+xml;base64,{data}">'
