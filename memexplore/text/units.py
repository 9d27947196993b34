"""Write sizes as text with binary units, and read them."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[kmgtp]i?b?|b)?\s*", re.IGNORECASE)


def size_text(size: float) -> str:
    """Return a number of bytes as text with three digits and a binary unit.

    >>> size_text(9_803_000_000), size_text(512), size_text(-3 * 1024**2)
    ('9.13 GiB', '512 B', '-3.00 MiB')
    """
    if size < 0:
        return "-" + size_text(-size)
    value = float(size)
    for unit in _PREFIXES:
        # 999.5 rounds to four digits, so it gets the next unit.
        if value < 999.5 or unit == _PREFIXES[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{value:.0f} B"
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def unit_of(sizes: Iterable[int]) -> str:
    """Return the unit in which the largest of some sizes has at most three digits.

    >>> unit_of([300 << 20, 14 << 30]), unit_of([])
    ('GiB', 'B')
    """
    return size_text(max(map(abs, sizes), default=0)).split()[1]


def in_unit(size: int, unit: str) -> str:
    """Return a size in a unit, without the unit, with two decimals: the sizes of a column are aligned.

    >>> in_unit(15_247_000_000, "GiB"), in_unit(-(300 << 20), "GiB"), in_unit(512, "B")
    ('14.20', '−0.29', '512')
    """
    value = size / 1024 ** _PREFIXES.index(unit)
    text = f"{abs(value):.0f}" if unit == "B" else f"{abs(value):.2f}"
    return f"−{text}" if value < 0 and float(text) else text


def range_text(low: int, high: int) -> str:
    """Return the sizes from one to another as text.

    >>> range_text(1024, 2048), range_text(1024, 1 << 20), range_text(1024, 1024)
    ('1.00–2.00 KiB', '1.00 KiB–1.00 MiB', '1.00 KiB')
    """
    first, last = size_text(low), size_text(high)
    number, unit = first.split(" ")
    return last if first == last else f"{number if last.endswith(f' {unit}') else first}–{last}"


def difference_text(before: float, after: float) -> str:
    """Return a change in bytes as text, with its sign and in per cent of `before`.

    >>> difference_text(1024**3, 512 * 1024**2)
    '−512 MiB (−50 %)'
    >>> difference_text(1024**2, 20 * 1024**2)
    '+19.0 MiB (+1,900 %)'
    """
    change = after - before
    sign = "+" if change >= 0 else "−"
    percent = f" ({sign}{abs(change) / before * 100:,.0f} %)" if before else ""
    return f"{sign}{size_text(abs(change))}{percent}"


def signed_percent(share: float) -> str:
    """Return a share by which something changes in per cent, with its sign.

    >>> signed_percent(0.352), signed_percent(-0.52), signed_percent(-0.001), signed_percent(29.42)
    ('+35 %', '−52 %', '+0 %', '+2,942 %')
    """
    number = f"{abs(share) * 100:,.0f}"
    return f"{'−' if share < 0 and number != '0' else '+'}{number} %"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``24GiB``, ``512 MiB`` or ``80GB``; K to P are binary, also without "i".

    >>> parse_size("24GiB") == 24 * 1024**3, parse_size("1.5 MiB")
    (True, 1572864)

    Raises ValueError for a text without a number and a unit, and for a size of 8 EiB or more.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match["unit"] is None:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as 24GiB or 512MiB")
    size = float(match["number"]) * 1024.0 ** "bkmgtp".index(match["unit"][0].lower())
    if size >= 2**63:
        raise ValueError("a size of 8 EiB or more does not fit into 63 bits; write a smaller one, such as 24GiB")
    return int(size)
