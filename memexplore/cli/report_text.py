"""Plain text of the command line: tables with aligned columns, and the report of a tape."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memexplore.text.tensor_text import tensor_text
from memexplore.text.units import size_text

if TYPE_CHECKING:
    from memexplore.out_of_memory.value import PostMortem
    from memexplore.out_of_memory.what_fits import WhatFits
    from memexplore.tape import Tape


_PLACES = 5
"""Lines of a stack in a report."""


def text_table(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Return the lines of a table; `align` has one letter per column, `l` or `r`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(align))]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=True)
        ).rstrip()
        for row in rows
    ]


def report_text(tape: Tape, post_mortem: PostMortem | None = None, what_fits: WhatFits | None = None) -> str:
    """Return the report of a tape: verdict, post-mortem, advice, blocks at the peak, fragmentation, growth, notes."""
    from memexplore.analysis import placements, summary, verdict_content

    result, verdict = summary.summary(tape), verdict_content.verdict_content(tape)
    lines = [verdict.headline, verdict.detail]
    lines += [f"  at {place.text}" + (f": {place.code}" if place.code else "") for place in verdict.where[:_PLACES]]
    if post_mortem is not None:
        lines += ["", post_mortem.text]
    if what_fits is not None:
        lines += ["", what_fits.text]
    if peak := result["peak_allocated"]:
        shares = [(kind, size) for kind, size in result["at_peak"]["by_category"].items() if size]
        rows = [(kind, size_text(size), f"{size / peak * 100:.0f} %") for kind, size in shares]
        lines += ["", "At the peak:", *text_table(rows, "lrr")]
        lines += ["", "Largest tensors at the peak:", *_largest_tensors(tape)]
        lines += _origin_lines(tape)
    notes = (*tape.meta.notes, placements.placement_note(tape))
    lines += [f"Note: {note}" for note in notes if note]
    return _relative("\n".join(lines))


def report_of(tape: Tape) -> str:
    """Return the report of a tape, with the post-mortem of one that ended out of memory."""
    from memexplore.out_of_memory.value import of_tape

    return report_text(tape, of_tape(tape))


def _largest_tensors(tape: Tape) -> list[str]:
    """Return a table of the largest tensors at the peak, without columns that are empty."""
    from memexplore.analysis import streams, tables

    table = tables.tensors(tape, count=10)
    table["tensor"] = [
        tensor_text(shape, dtype) if dtype else "" for shape, dtype in zip(table["shape"], table["dtype"], strict=True)
    ]
    if "stream" in table:
        table["stream"] = table["stream"].map(streams.stream_text)
    names = ["size", "category", "tensor", "op", "layer", "stream", "line"]
    table = table[[name for name in names if name in table]]
    table["size"] = table["size"].map(size_text)
    table["line"] = table["line"].map(_relative)
    table = table.loc[:, (table != "").any()]
    rows = [list(table.columns), *table.to_numpy().tolist()]
    return text_table(rows, "r" + "l" * (len(rows[0]) - 1))


def _origin_lines(tape: Tape) -> list[str]:
    """Return bytes by line at the peak, fragmentation and growth, each if the tape has the columns for it."""
    from memexplore.analysis import addresses, curves, groups, growth

    lines = []
    if any(tape.stacks):
        held = groups.by_line(tape).head(10)
        rows = [
            (size_text(size), f"{count:,}", category, _relative(line))
            for size, count, category, line in zip(*(held[name].tolist() for name in held.columns), strict=True)
        ]
        lines += ["", "By line of code:", *text_table([("size", "blocks", "category", "line"), *rows], "rrll")]
    if addresses.has_segments(tape):
        lines += ["", addresses.fragmentation_text(tape, curves.peak(tape)[1])]
    if grown := growth.growth_text(tape):
        table = growth.growth(tape).head(10)
        rows = [
            (f"+{size_text(size)}", category, layer, _relative(line))
            for size, category, layer, line in zip(
                *(table[name].tolist() for name in ("grew", "category", "layer", "line")), strict=True
            )
        ]
        lines += ["", grown, *text_table([("grew", "category", "layer", "line"), *rows], "rlll")]
    return lines


def _relative(text: str) -> str:
    """Return a text with the files below the working directory relative to it."""
    return text.replace(os.getcwd() + os.sep, "")


def write_html(tape: Tape, post_mortem: PostMortem | None, path: pathlib.Path) -> None:
    """Write a stand-alone HTML page."""
    from memexplore.page import report

    path.write_text(report.html(tape, post_mortem), encoding="utf-8")
