"""Bytes to text and back; the only place that knows 1024."""

from __future__ import annotations

import re

_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[kmgtp]i?b?|b)?\s*", re.IGNORECASE)


def size_text(size: float) -> str:
    """Write a number of bytes with a binary unit and three digits.

    >>> size_text(9_803_000_000), size_text(512), size_text(-3 * 1024**2)
    ('9.13 GiB', '512 B', '-3.00 MiB')
    """
    if size < 0:
        return "-" + size_text(-size)
    value = float(size)
    for unit in _PREFIXES:
        # 999.5 would be written with four digits, so it moves to the next unit.
        if value < 999.5 or unit == _PREFIXES[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{value:.0f} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def difference_text(before: float, after: float) -> str:
    """Write a change in bytes with its sign and per cent of what was there before.

    >>> difference_text(1024**3, 512 * 1024**2)
    '-512 MiB (-50 %)'
    """
    change = after - before
    sign = "+" if change >= 0 else "-"
    percent = f" ({sign}{abs(change) / before * 100:.0f} %)" if before else ""
    return f"{sign}{size_text(abs(change))}{percent}"


def parse_size(text: str) -> int:
    """Read a size such as ``24GiB``, ``512 MiB`` or ``80GB``; a unit is needed, and K to P are binary.

    >>> parse_size("24GiB") == 24 * 1024**3, parse_size("1.5 MiB")
    (True, 1572864)

    Raises ValueError where the text is no size.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match["unit"] is None:
        raise ValueError(f"{text!r} is no size: write a number and a unit, such as 24GiB or 512MiB")
    power = "bkmgtp".index(match["unit"][0].lower())
    return int(float(match["number"]) * 1024**power)
