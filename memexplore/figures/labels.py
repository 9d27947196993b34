"""Place labels in a plot without overlaps: choose one of the candidate places of each text."""

from __future__ import annotations

from typing import NamedTuple

_LETTER = {10: 6.0, 11: 6.3, 12: 7.3}
"""Mean width of a letter in pixels by font size; labels of size 12 are bold."""
LINE = 15.0
"""Height of a label in pixels."""


class Spot(NamedTuple):
    """A candidate place: pixels from the left and top of the plot, and the side of the text that is there."""

    x: float
    y: float
    """Of the middle of the text."""
    anchor: str
    """``left``, ``center`` or ``right``."""


class Label(NamedTuple):
    """A text with its candidate places, best first."""

    text: str
    spots: tuple[Spot, ...]
    size: int = 11


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Return the area that two boxes share, in square pixels."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(wide, 0.0) * max(high, 0.0)


def box_of(label: Label, spot: Spot) -> Box:
    """Return the rectangle that a label takes at a place."""
    width = len(label.text) * _LETTER[label.size]
    left = spot.x - {"left": 0.0, "center": width / 2, "right": width}[spot.anchor]
    return Box(left, spot.y - LINE / 2, left + width, spot.y + LINE / 2)


def placed(
    labels: list[Label], width: float, height: float, obstacles: tuple[Box, ...] = (), above: float = 0.0
) -> list[Spot]:
    """Return a place for each label: the first candidate in a plot of that size that is free, else the freest one.

    Labels that come first choose first. `above` are the pixels above the plot that are free for labels too.

    >>> peak = Label("peak 3 GiB", (Spot(95, 20, "right"),), 12)
    >>> capacity = Label("capacity 4 GiB", (Spot(100, 20, "right"), Spot(100, 60, "right")))
    >>> placed([peak, capacity], 100, 100)[1].y
    60
    """
    taken = list(obstacles)
    spots = []
    for label in labels:

        def cost(spot: Spot, label: Label = label) -> float:
            box = box_of(label, spot)
            inside = box.overlap(Box(0, -above, width, height))
            area = (box.right - box.left) * (box.bottom - box.top)
            # A label that is cut is worse than one that overlaps another.
            return 4 * (area - inside) + sum(box.overlap(other) for other in taken)

        best = min(label.spots, key=cost)
        spots.append(best)
        taken.append(box_of(label, best))
    return spots
