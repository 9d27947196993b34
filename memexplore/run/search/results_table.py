"""Tables of settings that were run: sizes in binary units, and a bar for the share of the GPU.

In: a `Line` for each setting. Out: text for a terminal, or HTML for a notebook.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memexplore.analysis.curves import peak
from memexplore.analysis.picture import picture
from memexplore.analysis.verdict_content import TIGHT
from memexplore.figures.palette import CAPACITY, FITS
from memexplore.figures.values import Cell, form, number, sparkline, table, words
from memexplore.figures.values import bar as share_bar
from memexplore.run.programs.outcome import Outcome
from memexplore.tape import Tape
from memexplore.text.units import in_unit, signed_percent, size_text, unit_of

_BAR = 12
"""Characters of a bar."""
_NUMBERS = ("needs", "left", "time", "FLOPs")
_SPARKLINE = 90
"""Pixels: with it the table of a search fits a page of 900 pixels."""


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
    tape: Tape | None = None


def bar(share: float) -> str:
    """Return a share of the GPU as a bar of 12 characters, with an arrow behind it for more than the whole.

    >>> bar(0.5), bar(1.4)
    ('██████░░░░░░ ', '████████████▶')
    """
    filled = min(_BAR, round(share * _BAR))
    return "█" * filled + "░" * (_BAR - filled) + ("▶" if share > 1 else " ")


def sent_columns(outcomes: Iterable[Outcome | None]) -> tuple[str, ...]:
    """Return the titles of the further columns of settings on several GPUs, none where all are on one."""
    return ("sent by each GPU", "sending") if any(one is not None and one.gpus > 1 for one in outcomes) else ()


def sent_cells(outcome: Outcome, columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cells of `sent_columns`: bytes sent in a step, and their time over that of computing."""
    if not columns or outcome.gpus == 1:
        return ("",) * len(columns)
    share = outcome.link_seconds / outcome.compute_seconds if outcome.compute_seconds else math.nan
    return size_text(outcome.sent), "" if math.isnan(share) else f"{share:.2f}× computing"


def text_table(lines: Sequence[Line], more: Sequence[str] = ()) -> str:
    """Return the settings as lines of text; `more` titles the further columns."""
    titles = ["setting", "outcome", "needs", "share of GPU", "left", "time", "FLOPs", *more]
    rows = [titles]
    for line in lines:
        if line.outcome is None:
            rows.append([line.setting, "failed"])
            continue
        share = _share(line.outcome)
        outcome, needs, left, time, flops = _cells(line)
        rows.append(
            [line.setting, outcome, needs, f"{bar(share)} {share * 100:3.0f} %", left, time, flops, *line.more],
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
    """Return the settings as an HTML table under the sentences of a caption; a column is in the unit of its largest.

    Settings with a tape have a sparkline, all in one scale.
    """
    outcomes = [line.outcome for line in lines if line.outcome is not None]
    unit = unit_of(outcome.needed for outcome in outcomes)
    top = max((peak(picture(line.tape))[0] for line in lines if line.tape is not None), default=0)
    of_margin = unit_of(outcome.margin for outcome in outcomes)
    sizes = (f"needs, {unit}", "share of GPU", f"left, {of_margin}")
    titles = ("setting", "outcome", *sizes, *(["allocated"] if top else []), "time", "FLOPs", *more)
    rows = [_html_row(line, unit, of_margin, top) for line in lines if line.outcome is not None]
    failed = [f"{line.setting} failed: {line.error}" for line in lines if line.outcome is None]
    return form([*caption, *failed], table(titles, rows) if rows else "")


def _html_row(line: Line, unit: str, of_margin: str, top: int) -> list[Cell]:
    outcome = line.outcome
    assert outcome is not None
    share = _share(outcome)
    _, _, _, time, flops = _cells(line)
    label = f"{share * 100:.0f} % of the GPU"
    curve = [Cell(sparkline(picture(line.tape), _SPARKLINE, 26, top) if line.tape is not None else "")] if top else []
    return [
        words(line.setting),
        words(_outcome_text(outcome)),
        number(in_unit(outcome.needed, unit)),
        share_bar(share, label, FITS if share <= 1 else CAPACITY),
        number(in_unit(outcome.margin, of_margin)),
        *curve,
        number(time),
        number(flops),
        *(number(text) if text.removeprefix("≥ ").isdecimal() else words(text) for text in line.more),
    ]


def _outcome_text(outcome: Outcome) -> str:
    if not outcome.fits:
        return "out of memory"
    return "tight" if outcome.margin < TIGHT * outcome.capacity else "fits"


def _share(outcome: Outcome) -> float:
    return outcome.needed / max(outcome.capacity, 1)


def _cells(line: Line) -> tuple[str, str, str, str, str]:
    """Outcome, need, left, time and FLOPs as text."""
    assert line.outcome is not None
    return (
        _outcome_text(line.outcome),
        size_text(line.outcome.needed),
        size_text(line.outcome.margin),
        "unknown" if math.isnan(line.slow_down) else f"{line.slow_down:.2f}×",
        "unknown" if math.isnan(line.extra_flops) else signed_percent(line.extra_flops),
    )
