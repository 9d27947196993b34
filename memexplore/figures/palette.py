"""Name the colours, fonts and axis ticks of every figure."""

from __future__ import annotations

import enum
import math

from memexplore.tape import Category
from memexplore.text.units import size_text

COLOURS: dict[Category, str] = {
    Category.PARAMETER: "#0072B2",
    Category.BUFFER: "#4E9AC7",
    Category.OPTIMIZER_STATE: "#CC79A7",
    Category.GRADIENT: "#009E73",
    Category.ACTIVATION: "#E69F00",
    Category.INPUT: "#56B4E9",
    Category.TEMPORARY: "#F0E442",
    Category.WORKSPACE: "#999999",
    Category.UNKNOWN: "#C9C9C9",
    Category.GATHERED_PARAMETER: "#5A4FE0",
    Category.GRADIENT_BUCKET: "#2F6B3C",
    Category.COMMUNICATION_BUFFER: "#7A4B2A",
}
"""One colour per category in every figure, distinguishable by colour-blind readers (after Okabe and Ito)."""

SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Colours of lines or bars that are no categories, in this order (after Okabe and Ito)."""

CAPACITY = "#D55E00"
FITS = "#0072B2"
RESERVED = "#808080"
GRID = "rgba(128,128,128,0.25)"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"


class Theme(enum.Enum):
    """Background of a figure; the value is the colour of its text. The figure itself is transparent."""

    ANY = "#7d7d7d"
    """Legible on light and on dark."""
    LIGHT = "#333333"
    DARK = "#d6d6d6"


def text_colour(colour: str) -> str:
    """Return dark or white, whichever has more contrast with a colour (WCAG 2.2, relative luminance).

    >>> text_colour("#E69F00"), text_colour("#0072B2")
    ('#1a1a1a', '#ffffff')
    """
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    # Contrast with white is 1.05 / (luminance + 0.05), with #1a1a1a (0.0103) it is (luminance + 0.05) / 0.0603.
    return "#1a1a1a" if (luminance + 0.05) ** 2 > 1.05 * 0.0603 else "#ffffff"


def byte_ticks(highest: float, most: int = 6) -> tuple[list[int], list[str]]:
    """Return ticks in bytes from 0 up to a size, at a distance of a power of two, and their labels.

    At most `most` ticks are above zero.

    >>> byte_ticks(3 * 1024**3, most=3)
    ([0, 1073741824, 2147483648, 3221225472], ['0', '1 GiB', '2 GiB', '3 GiB'])
    """
    step = 1 << max(math.ceil(math.log2(max(highest, 1) / most)), 0)
    values = list(range(0, int(highest) + 1, step))
    return values, ["0", *(_without_zeros(size_text(value)) for value in values[1:])]


def event_ticks(first: int, last: int, most: int = 6) -> list[int]:
    """Return round row numbers between two rows, at most `most` + 1.

    >>> event_ticks(0, 2076)
    [0, 500, 1000, 1500, 2000]
    """
    steps = (digit * 10**power for power in range(12) for digit in (1, 2, 5))
    step = next(step for step in steps if (last - first) / step <= most)
    return list(range(-(-first // step) * step, last + 1, step))


def escaped(text: str) -> str:
    """Return a text with HTML escaped, because plotly interprets some HTML tags.

    >>> escaped("<lambda>")
    '&lt;lambda&gt;'
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _without_zeros(text: str) -> str:
    number, unit = text.split(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
