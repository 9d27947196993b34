"""Tables of settings that were run: sizes in binary units, and a bar for the share of the GPU.

In: a `Line` for each setting. Out: text for a terminal, or a ``<table>`` for a notebook.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from memexplore.figures.palette import CAPACITY, FITS
from memexplore.steps.outcome import Outcome
from memexplore.units import size_text

_BAR = 12
"""Characters of a bar."""
_NUMBERS = ("reserved", "left", "time", "FLOPs")


class Line(NamedTuple):
    """One setting of a table."""

    setting: str
    outcome: Outcome | None
    """None for a setting that raised an error."""
    slow_down: float = math.nan
    extra_flops: float = math.nan
    more: tuple[str, ...] = ()
    """Cells of further columns."""
    error: str = ""


def bar(share: float) -> str:
    """Return a share of the GPU as a bar of 12 characters, with an arrow behind it for more than the whole.

    >>> bar(0.5), bar(1.4)
    ('██████░░░░░░ ', '████████████▶')
    """
    filled = min(_BAR, round(share * _BAR))
    return "█" * filled + "░" * (_BAR - filled) + ("▶" if share > 1 else " ")


def text_table(lines: Sequence[Line], more: Sequence[str] = ()) -> str:
    """Return the settings as lines of text; `more` titles the further columns."""
    titles = ["setting", "outcome", "reserved", "share of GPU", "left", "time", "FLOPs", *more]
    rows = [titles]
    for line in lines:
        if line.outcome is None:
            rows.append([line.setting, "failed"])
            continue
        share = _share(line.outcome)
        outcome, reserved, left, time, flops = _cells(line)
        rows.append(
            [line.setting, outcome, reserved, f"{bar(share)} {share * 100:3.0f} %", left, time, flops, *line.more],
        )
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(len(titles))]
    right_aligned = [title in _NUMBERS for title in titles]
    errors = iter([line.error for line in lines if line.outcome is None])
    text = []
    for row in rows:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, right_aligned, strict=False)
        ]
        text.append("  ".join([*cells, *([next(errors)] if len(row) == 2 else [])]).rstrip())
    return "\n".join(text)


def html_table(caption: Sequence[str], lines: Sequence[Line], more: Sequence[str] = ()) -> str:
    """Return the settings as an HTML table under the sentences of a caption."""
    titles = ("setting", "outcome", "reserved", "share of GPU", "left", "time", "FLOPs", *more)
    head = "".join(f'<th scope="col" style="text-align:left">{html.escape(title)}</th>' for title in titles)
    body = "".join(_html_row(line, len(titles)) for line in lines)
    sentences = "<br>".join(map(html.escape, caption))
    return (
        f'<table><caption style="text-align:left">{sentences}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _html_row(line: Line, columns: int) -> str:
    setting = f'<th scope="row" style="text-align:left">{html.escape(line.setting)}</th>'
    if line.outcome is None:
        error = html.escape(line.error)
        return f'<tr>{setting}<td>failed</td><td colspan="{columns - 2}" style="text-align:left">{error}</td></tr>'
    outcome, reserved, *others = _cells(line)
    cells = [outcome, reserved, _html_bar(_share(line.outcome)), *others, *map(html.escape, line.more)]
    return f"<tr>{setting}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _html_bar(share: float) -> str:
    colour = FITS if share <= 1 else CAPACITY
    return (
        f'<div role="img" aria-label="{share * 100:.0f} % of the GPU" title="{share * 100:.0f} %" '
        'style="width:8em;height:0.8em;border:1px solid currentColor">'
        f'<div style="width:{min(share, 1):.0%};height:100%;background:{colour}"></div></div>'
    )


def _share(outcome: Outcome) -> float:
    return outcome.peak_reserved / max(outcome.capacity, 1)


def _cells(line: Line) -> tuple[str, str, str, str, str]:
    """Outcome, reserved, left, time and FLOPs as text."""
    assert line.outcome is not None
    return (
        "fits" if line.outcome.fits else "out of memory",
        size_text(line.outcome.peak_reserved),
        size_text(line.outcome.margin),
        "unknown" if math.isnan(line.slow_down) else f"{line.slow_down:.2f}×",
        "unknown" if math.isnan(line.extra_flops) else f"{line.extra_flops * 100:+.0f} %",
    )
