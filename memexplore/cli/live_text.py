"""Write the `Status` of a watched run as lines for a terminal that `rich` draws, or as plain lines."""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from memexplore.cli.live_status import Status
from memexplore.ranks.rows import StepRow
from memexplore.text.units import size_text
from memexplore.text.untrusted import clean_text

if TYPE_CHECKING:
    from rich.text import Text

_BAR = 24
_FINE, _TIGHT, _FULL = "#009E73", "#E69F00", "#D55E00"
"""Colours of the bar, of memory's categories: safe for the colour-blind."""
_COLUMNS = "▁▂▃▄▅▆▇█"
_STATES = {
    "watching": ("●", _FINE),
    "paused": ("❚❚", _TIGHT),
    "ended": ("■", "default"),
    "failed": ("✖", _FULL),
    "died": ("✖", _FULL),
}
_NOTES = 2
_HOLDERS = 2


def lines(status: Status, width: int = 100) -> list[Text]:
    """Return the lines of a run, the most important ones first; errors and warnings are wrapped to a width."""
    from rich.text import Text

    def coloured(text: str, colour: str) -> list[Text]:
        return [Text(line, colour) for line in wrapped(text, width)]

    mark, colour = _STATES.get(status.state, ("·", "default"))
    shown = [Text.assemble((mark, colour), " ", (_headline(status), "bold"))]
    if status.error:
        shown += coloured(status.error, _FULL)
    shown += _peaks(status)
    if status.growth:
        shown += coloured(f"⚠ {status.growth}{_time_left(status)}", _TIGHT)
        shown += [Text(f"  held by {clean_text(_short(holder))}", _TIGHT) for holder in status.held_by[:_HOLDERS]]
    if len(status.curve) > 1:
        shown.append(Text.assemble(("every step  ", "dim"), _columns(status.curve)))
    for row in reversed(status.rises):
        step = f"{row.step:,}".rjust(_width(status.rises))
        size = f"  {size_text(row.peak_allocated)}" if row.peak_allocated is not None else ""
        shown.append(Text.assemble(("peak rose   ", "dim"), f"{step}{size}  {clean_text(_short(row.rose_because))}"))
    shown += [Text(f"Note: {clean_text(_short(note))}", "dim") for note in status.notes[:_NOTES]]
    return shown


def wrapped(text: str, width: int) -> list[str]:
    """Return a text as lines of a width, in the characters that a terminal prints."""
    return textwrap.wrap(clean_text(_short(text)), max(width, 20), subsequent_indent="  ")


def plain(status: Status, prefix: str = "memexplore") -> str:
    """Return a run as one line, with the warning about growth on a further one."""
    parts = [f"{prefix}: {_headline(status)}"]
    newest, worst = status.newest, status.worst
    if newest is not None and newest.peak_allocated is not None:
        parts.append(f"peak {_of_capacity(newest, status.capacity)}")
    if worst is not None:
        parts.append(f"worst {size_text(worst.peak_allocated or 0)} in step {worst.step:,}")
    line = " · ".join(parts)
    if status.error:
        line += f"\n{prefix}: {clean_text(status.error)}"
    if status.growth:
        holders = f" Held by {clean_text(_short(status.held_by[0]))}." if status.held_by else ""
        line += f"\n{prefix}: {clean_text(status.growth)}{_time_left(status)}{holders}"
    return line


def _headline(status: Status) -> str:
    step = f"step {status.newest.step:,}" if status.newest is not None else "no step yet"
    parts = [step] if status.state == "watching" else [status.state, step]
    if status.seconds is not None:
        parts.append(f"{_seconds(status.seconds)}/step")
    parts.append(clean_text(status.device))
    if status.overhead is not None:
        parts.append(f"watching costs {status.overhead * 100:.1f} %")
    return " · ".join(parts)


def _seconds(seconds: float) -> str:
    """Return a time as text.

    >>> _seconds(0.0123), _seconds(0.412), _seconds(3.214)
    ('12.3 ms', '412 ms', '3.21 s')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.{1 if seconds < 0.09995 else 0}f} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"


def _time_left(status: Status) -> str:
    if status.full_at is None or status.newest is None or not status.seconds:
        return ""
    minutes = (status.full_at - status.newest.step) * status.seconds / 60
    if minutes < 0:
        return ""
    for unit, length in (("days", 1440), ("h", 60), ("min", 1)):
        if minutes >= 2 * length or length == 1:
            return f" That is in about {max(round(minutes / length), 1)} {unit}."
    return ""


def _of_capacity(row: StepRow, capacity: int | None) -> str:
    peak = row.peak_allocated or 0
    at_least = "≥ " if row.peak_from == "sampled" else ""
    if not capacity:
        return at_least + size_text(peak)
    return f"{at_least}{size_text(peak)} of {size_text(capacity)} ({peak / capacity * 100:.0f} %)"


def _peaks(status: Status) -> list[Text]:
    from rich.text import Text

    newest, worst = status.newest, status.worst
    if newest is None:
        return []
    shown = Text("Peak allocated ")
    if newest.peak_allocated is None:
        shown.append("not known: this step was not recorded")
    else:
        shown.append(_of_capacity(newest, status.capacity), "bold")
        if status.capacity:
            shown.append(" ").append_text(_bar(newest.peak_allocated / status.capacity))
    known = [f"worst so far {size_text(worst.peak_allocated or 0)} in step {worst.step:,}"] if worst is not None else []
    sizes = (
        ("reserved", newest.peak_reserved),
        ("at the end of the step", newest.allocated_after),
        ("free in cache", newest.free_in_cache),
        ("outside the allocator", newest.outside),
        ("other processes", newest.other_processes or None),
    )
    known += [f"{name} {size_text(size)}" for name, size in sizes if size is not None]
    counts = (("micro-batches", newest.micro_batches), ("evaluations", newest.evaluations))
    known += [f"{count} {name}" for name, count in counts if count > (name == "micro-batches")]
    return [shown, Text(" · ".join(known))] if known else [shown]


def _bar(share: float) -> Text:
    from rich.text import Text

    filled = min(round(share * _BAR), _BAR)
    colour = _FINE if share < 0.8 else _TIGHT if share < 0.95 else _FULL
    return Text.assemble(("█" * filled, colour), ("░" * (_BAR - filled), "dim"))


def _columns(curve: Sequence[int]) -> str:
    """Return a curve as columns from zero on.

    >>> _columns([1, 4, 8])
    '▁▄█'
    """
    highest = max(curve) or 1
    return "".join(_COLUMNS[max(-(-size * len(_COLUMNS) // highest) - 1, 0)] for size in curve)


def _width(rows: Iterable[StepRow]) -> int:
    return max(len(f"{row.step:,}") for row in rows)


def _short(text: str) -> str:
    """Return a text with the files below the working directory relative to it."""
    return text.replace(os.getcwd() + os.sep, "")


def as_text(shown: Iterable[Text], width: int | None = None) -> list[str]:
    """Return lines without colours; without a width they are not cut."""
    return [
        line.plain if width is None or len(line.plain) <= width else line.plain[: width - 1] + "…" for line in shown
    ]


def drawn(shown: Iterable[Text], width: int, colours: str | None) -> list[str]:
    """Return lines with the codes of a terminal, each cut to a width; `colours` is a colour system of `rich`."""
    from rich.console import Console

    target = io.StringIO()
    console = Console(
        file=target,
        force_terminal=True,
        width=width,
        color_system=colours,  # type: ignore[arg-type]
        legacy_windows=False,
        highlight=False,
    )
    for line in shown:
        console.print(line, no_wrap=True, overflow="ellipsis")
    return target.getvalue().splitlines()
