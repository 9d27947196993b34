"""The explorer's own tabs, ready for the view: history, trade-offs, code and advice."""

from __future__ import annotations

import math
from collections.abc import Sequence

from memexplore.codegen.lines import lines as code_lines
from memexplore.figures.tradeoff import tradeoff
from memexplore.knobs.knobs import Knobs
from memexplore.notebook.view import Sheet
from memexplore.search.advice import Advice, setting_text
from memexplore.steps.outcome import Outcome, extra_flops, point
from memexplore.steps.sentences import percent_text
from memexplore.steps.step import Step
from memexplore.units import size_text

TRADE_OFFS, HISTORY, CODE, ADVICE = "Trade-offs", "History", "Code", "Advice"
_NOTHING = "# Nothing is changed. Turn a knob to see the lines of PyTorch that do the same."


def room_text(one: Outcome) -> str:
    """Whether a setting fits, and by how much."""
    return f"yes, {size_text(one.margin)} to spare" if one.fits else f"no, {size_text(max(-one.margin, 0))} too much"


def _flops_text(one: Outcome, as_written: Outcome | None) -> str:
    share = extra_flops(one, as_written)
    if math.isnan(share):
        return ""
    return "as written" if abs(share) < 5e-5 else percent_text(1 + share)


def history(tried: Sequence[Outcome], current: Knobs) -> Sheet:
    """Every setting that was tried, in order: what it needs, whether it fits, and its FLOPs for a sample."""
    as_written = next((one for one in tried if one.knobs == Knobs()), None)
    rows = [
        {
            "cells": [
                str(one.knobs),
                size_text(one.peak_allocated),
                size_text(one.peak_reserved),
                room_text(one),
                _flops_text(one, as_written),
            ],
            "current": one.knobs == current,
            "hint": "Return to this setting",
        }
        for one in tried
    ]
    titles = ["Setting", "Peak allocated", "Peak reserved", "Fits", "FLOPs a sample"]
    return {"kind": "table", "titles": titles, "rows": rows, "text": "Click a setting to return to it."}


def trade_offs(tried: Sequence[Outcome], current: Knobs) -> Sheet:
    """Every setting that was tried as a point: time and memory."""
    as_written = next((one for one in tried if one.knobs == Knobs()), None)
    capacities = {one.capacity for one in tried if one.knobs == current}
    points = [point(one, as_written) for one in tried]
    figure = tradeoff(points, *capacities, chosen=str(current))
    return {"kind": "figure", "figure": figure.to_dict()}


def lines(step: Step | None, knobs: Knobs) -> Sheet:
    """The lines of PyTorch that do what the knobs do."""
    return {"kind": "code", "text": code_lines(step, knobs).strip("\n") or _NOTHING}


def advice(found: Advice) -> Sheet:
    """The settings that fit, cheapest first."""
    rows = []
    for option in found.options:
        largest = option.largest
        least = "" if largest is None or largest.proven else "≥ "
        cells = [
            setting_text(option.knobs),
            size_text(option.outcome.peak_reserved),
            size_text(option.outcome.margin),
            "" if math.isnan(option.slow_down) else f"× {option.slow_down:.2f}",
            _flops_text(option.outcome, found.as_written),
            f"{least}{largest.samples}" if largest is not None and largest.samples else "",
        ]
        hint = " ".join(("Take this setting.", *(["It is another training."] if option.alters else []), *option.notes))
        rows.append({"cells": cells, "hint": hint})
    titles = ["Setting", "Peak reserved", "To spare", "Time a sample", "FLOPs a sample", "Largest batch"]
    text = " ".join(found.sentences)
    return {"kind": "table", "titles": titles, "rows": rows, "text": f"{text} Click a setting to take it."}


def sheets(step: Step | None, tried: Sequence[Outcome], advised: Sequence[Outcome], current: Knobs) -> dict[str, Sheet]:
    """All tabs but the advice, by name and in order; the chart shows what was advised too, behind what was tried."""
    return {
        TRADE_OFFS: trade_offs([*tried, *advised], current),
        HISTORY: history(tried, current),
        CODE: lines(step, current),
    }
