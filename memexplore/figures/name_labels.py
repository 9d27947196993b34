"""Place names beside the points of a chart, as annotations without overlaps.

A chart is as wide as its page, so a place of a name is taken only if it is free at every width of `_WIDTHS`. Sizes are
in pixels, y downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_WIDTHS = 240, 330, 480, 700
"""Widths between the axes: of a chart beside a table, and of one below it."""
_AROUND = 64 + 44
"""Height above and below the axes."""
_BESIDE = 20
"""Width on the right of the axes that a name may take."""
_CHARACTER, _LINE = 6.2, 15
"""Width of a character, and height of a line, of 11 px."""
_MARKER = 6
"""Half of the width of a marker."""
_NEAR, _FAR = (0, -13, 13), (-30, 30, -48, 48, -66, 66, -84, 84, -102, 102)
"""Distances of a name's line from its point; from the far ones a line leads to the point."""


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def contains(self, other: _Box) -> bool:
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom


class Line(NamedTuple):
    """A horizontal line over the whole width."""

    y: float
    name: str
    colour: str


class _Place(NamedTuple):
    """A place of a name: distance of its nearer end and of its middle line from the point."""

    side: int
    """1: on the right of the point, -1: on the left, 0: above or below it."""
    dx: float
    dy: float

    def box(self, x: float, y: float, width: float) -> _Box:
        start = x + self.dx - width * (1 - self.side) / 2
        return _Box(start, y + self.dy - _LINE / 2, start + width, y + self.dy + _LINE / 2)


_PLACES = [_Place(side, side * 9, dy) for dy in _NEAR for side in (1, -1)]
_PLACES += [_Place(0, 0, dy) for dy in (-15, 15)]
_PLACES += [_Place(side, side * dx, dy) for dy in _FAR for dx in (6, 40, 80) for side in (1, -1, 0)]


def name_labels(
    named: Sequence[tuple[float, float, str]],
    points: Sequence[tuple[float, float]],
    line: Line | None,
    right: float,
    top: float,
    height: int,
) -> list[dict[str, Any]]:
    """Return annotations: the name of a line, and those of points in order; a point without a free place has none.

    `named` has x, y and name, `points` all points of the chart; `right` and `top` are the ends of the axes, which begin
    at zero, and `height` is that of the figure in pixels. Points at one place have one label with all their names. The
    name of the line, without a free place at it, is above the axes.

    >>> notes = name_labels([(1, 2, "a"), (1, 2, "b")], [(1, 2)], Line(3, "most", "red"), 2, 4, 320)
    >>> [(note["text"], note["y"]) for note in notes]
    [('most', 3), ('a = b', 2)]
    """
    names: dict[tuple[float, float], list[str]] = {}
    for x, y, name in named:
        names.setdefault((x, y), []).append(name)
    inner = height - _AROUND
    taken: dict[int, list[_Box]] = {}
    for width in _WIDTHS:
        places = [(x / right * width, (1 - y / top) * inner) for x, y in points]
        taken[width] = [_Box(x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER) for x, y in places]
    annotations = []
    if line is not None:
        level = (1 - line.y / top) * inner
        annotations.append(_line_name(line, level, inner, taken))
        for width, boxes in taken.items():
            boxes.append(_Box(0, level - 2, width, level + 2))
    for (x, y), together in names.items():
        text = " = ".join(together)
        free = _free(x / right, (1 - y / top) * inner, _CHARACTER * len(text), inner, taken)
        if free is None:
            continue
        place, of_width = free
        for width, box in of_width.items():
            taken[width].append(box)
        annotations.append(_annotation(text, x, y, place))
    return annotations


def _line_name(line: Line, level: float, height: float, taken: dict[int, list[_Box]]) -> dict[str, Any]:
    """Return the name of a line at one of its ends, where no point is; its boxes are added to those taken."""
    length = _CHARACTER * len(line.name)
    note = {"text": line.name, "showarrow": False, "font": {"size": 11, "color": line.colour}, "xref": "paper"}
    for is_right in (False, True):
        for dy in (-9, 9):
            boxes = {}
            for width in taken:
                start = width - length - 2 if is_right else 2
                boxes[width] = _Box(start, level + dy - _LINE / 2, start + length, level + dy + _LINE / 2)
            fits = all(box.top >= 0 and box.bottom <= height for box in boxes.values())
            if not fits or any(box.meets(other) for width, box in boxes.items() for other in taken[width]):
                continue
            for width, box in boxes.items():
                taken[width].append(box)
            end = {"x": 0.995, "xanchor": "right"} if is_right else {"x": 0.005, "xanchor": "left"}
            return note | end | {"y": line.y, "yshift": -dy, "yanchor": "middle"}
    # As in a legend: the line is elsewhere.
    return note | {"text": f"━ {line.name}", "x": 0.005, "xanchor": "left", "y": 1, "yref": "paper", "yshift": 10}


def _free(
    share: float, y: float, length: float, height: float, taken: dict[int, list[_Box]]
) -> tuple[_Place, dict[int, _Box]] | None:
    """Return the first place that is free at every width, with its boxes."""
    for place in _PLACES:
        boxes = {width: place.box(share * width, y, length) for width in taken}
        if all(
            _Box(0, 0, width + _BESIDE, height).contains(box) and not any(box.meets(other) for other in taken[width])
            for width, box in boxes.items()
        ):
            return place, boxes
    return None


def _annotation(text: str, x: float, y: float, place: _Place) -> dict[str, Any]:
    anchors = {"xanchor": ("right", "center", "left")[place.side + 1], "yanchor": "middle", "font": {"size": 11}}
    if place.dy not in _FAR:
        return {"text": text, "x": x, "y": y, "showarrow": False, "xshift": place.dx, "yshift": -place.dy, **anchors}
    arrow = {"showarrow": True, "arrowhead": 0, "arrowwidth": 1, "arrowcolor": "#8f8f8f", "standoff": 6}
    return {"text": text, "x": x, "y": y, "ax": place.dx, "ay": place.dy, **arrow, **anchors}
