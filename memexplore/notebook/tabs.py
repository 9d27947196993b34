"""Content of the explorer's own tabs (trade-offs, history, code, advice), from measured settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from memexplore.codegen.lines import lines as code_lines
from memexplore.figures.tradeoff import tradeoff
from memexplore.knobs.knobs import Knobs
from memexplore.notebook.view import Tab
from memexplore.search.advice import Advice, setting_text
from memexplore.steps.outcome import Outcome, extra_flops, point
from memexplore.steps.sentences import percent_text
from memexplore.steps.step import Step
from memexplore.units import size_text

TRADE_OFFS, HISTORY, CODE, ADVICE = "Trade-offs", "History", "Code", "Advice"
_NO_CODE = "# The step runs as written. Change a knob to see the lines of PyTorch with the same effect."


def explorer_tabs(
    step: Step | None, shown: Sequence[Outcome], advised: Sequence[Outcome], current: Knobs
) -> dict[str, Tab]:
    """Return all tabs except the advice, by name, in order. The chart draws advised settings after those shown."""
    return {
        TRADE_OFFS: trade_offs([*shown, *advised], current),
        HISTORY: history(shown, current),
        CODE: code(step, current),
    }


def trade_offs(outcomes: Sequence[Outcome], current: Knobs) -> Tab:
    """Return a chart with a point for each setting: time and memory."""
    as_written = _as_written(outcomes)
    capacities = {outcome.capacity for outcome in outcomes if outcome.knobs == current}
    points = [point(outcome, as_written) for outcome in outcomes]
    figure = tradeoff(points, *capacities, chosen=str(current))
    return {"kind": "figure", "figure": figure.to_dict()}


def history(outcomes: Sequence[Outcome], current: Knobs) -> Tab:
    """Return a table of settings in order: peaks, whether they fit, and FLOPs per sample."""
    as_written = _as_written(outcomes)
    rows = [
        {
            "cells": [
                str(outcome.knobs),
                size_text(outcome.peak_allocated),
                size_text(outcome.peak_reserved),
                fit_text(outcome),
                _flops_text(outcome, as_written),
            ],
            "current": outcome.knobs == current,
            "hint": "Return to this setting",
        }
        for outcome in outcomes
    ]
    titles = ["Setting", "Peak allocated", "Peak reserved", "Fits", "FLOPs per sample"]
    return {"kind": "table", "titles": titles, "rows": rows, "text": "Click a setting to return to it."}


def code(step: Step | None, knobs: Knobs) -> Tab:
    """Return the lines of PyTorch with the same effect as the knobs."""
    return {"kind": "code", "text": code_lines(step, knobs).strip("\n") or _NO_CODE}


def advice(advice: Advice) -> Tab:
    """Return a table of the settings that fit, cheapest first."""
    rows = []
    for option in advice.options:
        largest = option.largest
        at_least = "" if largest is None or largest.proven else "≥ "
        cells = [
            setting_text(option.knobs),
            size_text(option.outcome.peak_reserved),
            size_text(option.outcome.margin),
            "" if math.isnan(option.slow_down) else f"× {option.slow_down:.2f}",
            _flops_text(option.outcome, advice.as_written),
            f"{at_least}{largest.samples}" if largest is not None and largest.samples else "",
        ]
        warning = ["The training result changes."] if option.alters else []
        rows.append({"cells": cells, "hint": " ".join(("Use this setting.", *warning, *option.notes))})
    titles = ["Setting", "Peak reserved", "Margin", "Time per sample", "FLOPs per sample", "Largest batch"]
    text = " ".join((*advice.sentences, "Click a setting to use it."))
    return {"kind": "table", "titles": titles, "rows": rows, "text": text}


def fit_text(outcome: Outcome) -> str:
    """Return whether a setting fits, and by how much."""
    if outcome.fits:
        return f"yes, {size_text(outcome.margin)} to spare"
    return f"no, {size_text(max(-outcome.margin, 0))} too much"


def _as_written(outcomes: Sequence[Outcome]) -> Outcome | None:
    return next((outcome for outcome in outcomes if outcome.knobs == Knobs()), None)


def _flops_text(outcome: Outcome, as_written: Outcome | None) -> str:
    share = extra_flops(outcome, as_written)
    if math.isnan(share):
        return ""
    return "as written" if abs(share) < 5e-5 else percent_text(1 + share)
