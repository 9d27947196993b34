"""Content of the explorer's own tabs (trade-offs, history, code, advice), from measured settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from memexplore.analysis.verdict_content import TIGHT
from memexplore.figures.tradeoff import HEIGHT, largest_batches, tradeoff
from memexplore.jupyter.view import Tab
from memexplore.run.code import diff
from memexplore.run.code.own_code import OwnCode
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.outcome import Outcome, extra_flops, point
from memexplore.run.programs.step import Step
from memexplore.run.search.advice import Advice
from memexplore.run.search.candidates import LargestBatch
from memexplore.run.search.setting_text import on_base
from memexplore.run.sentences import percent_text
from memexplore.text.units import in_unit, size_text, unit_of

_WRITTEN = Knobs()
TRADE_OFFS, HISTORY, CODE, ADVICE = "Trade-offs", "History", "Code", "Advice"
_ALIGN = ["left", "right", "right", "right", "right", "right"]
UNSEARCHED: Tab = {
    "kind": "table",
    "titles": [],
    "rows": [],
    "text": 'Press "What would fit?" to run many settings beside the kernel: those that fit are listed here.',
}
"""The tab of the advice before a search."""
NO_ADVICE: Tab = {"kind": "table", "titles": [], "rows": [], "text": "The step with its batch is run first…"}
"""The tab of the advice before its first run has ended."""
_VIEWS_HEIGHT = 40
"""Pixels of the buttons above a chart with several views."""
_NO_CODE = "# The step runs as written.\n# Change a knob to see lines of PyTorch with the same effect."
"""In lines that fit into the panel, which does not break them."""


def explorer_tabs(
    step: Step | None,
    shown: Sequence[Outcome],
    advised: Advice | None,
    current: Knobs,
    *,
    base: Knobs = _WRITTEN,
    unsearched: Tab | None = None,
    own: OwnCode | None = None,
) -> dict[str, Tab]:
    """Return the tabs by name, in order: `advised` is the advice so far, `unsearched` its tab where there is none.

    `base` has the GPU, the batch and the input size with which the search began. The chart draws the settings that the
    advice is about after those shown. `own` is the code that the person runs, if it is known.
    """
    first = unsearched if advised is None else advice(advised, current, base)
    history_of = tuple(outcome.knobs for outcome in shown)
    largest = {} if advised is None else {on_base(knobs, base): batch for knobs, batch in advised.largest.items()}
    return ({} if first is None else {ADVICE: first}) | {
        TRADE_OFFS: trade_offs([*shown, *_advised(history_of, advised, base)], current, largest),
        HISTORY: history(shown, current),
        CODE: code(step, current, own),
    }


def settings(
    tab: str, shown: Sequence[Knobs], advised: Advice | None, base: Knobs = _WRITTEN
) -> list[tuple[str, Knobs]]:
    """Return the text and the setting of each row, or point, of a tab; an empty list for a tab without settings."""
    if tab == ADVICE and advised is not None:
        return [(advised.text_of(option), on_base(option.knobs, base)) for option in advised.options]
    if tab in (TRADE_OFFS, HISTORY):
        others = (outcome.knobs for outcome in _advised(shown, advised, base))
        return [(str(knobs), knobs) for knobs in (*shown, *others)]
    return []


def clicked(request: Mapping[str, Any], settings: Sequence[tuple[str, Knobs]]) -> Knobs | None:
    """Return the setting of the row or point that a request of the page names, None if its tab has none there.

    While a search goes on, its rows and points move: their texts (`label`) tell them apart.

    >>> settings = [("batch 4", Knobs(batch=4)), ("batch 8", Knobs(batch=8))]
    >>> clicked({"row": 1}, settings), clicked({"row": 1, "label": "batch 4"}, settings)
    (Knobs(batch=8), Knobs(batch=4))
    """
    if (label := request.get("label")) is None:
        return settings[request["row"]][1] if settings else None
    return next((knobs for text, knobs in settings if text == label), None)


def _advised(shown: Sequence[Knobs], advice_so_far: Advice | None, base: Knobs) -> list[Outcome]:
    """Return the runs of a search that train the same and were not shown."""
    if advice_so_far is None:
        return []
    same = [outcome for outcome in advice_so_far.tried if outcome.knobs in advice_so_far.same_training]
    advised = [outcome._replace(knobs=on_base(outcome.knobs, base)) for outcome in same]
    return [outcome for outcome in advised if outcome.knobs not in shown]


def trade_offs(
    outcomes: Sequence[Outcome], current: Knobs, largest: Mapping[Knobs, LargestBatch] = MappingProxyType({})
) -> Tab:
    """Return charts with a point for each setting on the present GPU: time and memory; memory and `largest`.

    `largest` are the largest batches, where a search found them. Training and inference are not in one chart: neither
    can replace the other.
    """
    as_written = _as_written(outcomes)
    outcomes = [outcome for outcome in outcomes if outcome.knobs.mode is current.mode]
    gpus = {outcome.gpu for outcome in outcomes if outcome.knobs == current}
    outcomes = [outcome for outcome in outcomes if outcome.gpu in gpus or not gpus]
    capacities = {outcome.capacity for outcome in outcomes if outcome.knobs == current}
    points = [point(outcome, as_written) for outcome in outcomes]
    batches = [largest[outcome.knobs].samples if outcome.knobs in largest else 0 for outcome in outcomes]
    if not any(batches):
        return {"kind": "figure", "figure": tradeoff(points, *capacities, chosen=str(current)).to_dict()}
    style: dict[str, Any] = {"chosen": str(current), "height": HEIGHT - _VIEWS_HEIGHT}
    figure = tradeoff(points, *capacities, **style).to_dict()
    second = largest_batches(points, batches, *capacities, **style).to_dict()
    views = [{"label": "Time", "figure": figure}, {"label": "Largest batch", "figure": second}]
    return {"kind": "figure", "figure": figure, "views": views}


def history(outcomes: Sequence[Outcome], current: Knobs) -> Tab:
    """Return a table of settings in order: peaks, what is left of the GPU, and FLOPs per sample."""
    as_written = _as_written(outcomes)
    unit = unit_of(outcome.needed for outcome in outcomes)
    left = unit_of(abs(outcome.margin) for outcome in outcomes)
    rows = [
        {
            "cells": [
                str(outcome.knobs),
                in_unit(outcome.peak_allocated, unit),
                need_cell(outcome, unit),
                in_unit(outcome.margin, left),
                _flops_text(outcome, as_written),
            ],
            "current": outcome.knobs == current,
            "hint": f"{fit_text(outcome)}. Return to this setting",
        }
        for outcome in outcomes
    ]
    titles = ["Setting", f"Allocated, {unit}", f"Needs, {unit}", f"Left, {left}", "FLOPs per sample"]
    return {
        "kind": "table",
        "titles": titles,
        "align": _ALIGN[: len(titles)],
        "rows": rows,
        "text": "Click a setting to return to it.",
    }


def code(step: Step | None, knobs: Knobs, own: OwnCode | None = None) -> Tab:
    """Return the lines of PyTorch with the same effect as the knobs, shown as a diff."""
    lines = diff.code(step, knobs, own)
    return {"kind": "code", **lines._asdict()} if lines.text else {"kind": "code", "text": _NO_CODE}


def advice(advice: Advice, current: Knobs | None = None, base: Knobs = _WRITTEN) -> Tab:
    """Return a table of the settings that fit, cheapest first; `current` is the setting in force.

    `base` has the GPU, the batch and the input size with which the search began.
    """
    unit = unit_of(option.outcome.needed for option in advice.options)
    left = unit_of(abs(option.outcome.margin) for option in advice.options)
    rows = []
    for option in advice.options:
        cells = [
            advice.text_of(option),
            need_cell(option.outcome, unit),
            in_unit(option.outcome.margin, left),
            "" if math.isnan(option.slow_down) else f"× {option.slow_down:.2f}",
            _flops_text(option.outcome, advice.as_written),
            option.largest_text,
        ]
        warning = ["The training result changes.", option.training] if option.alters else []
        row = {
            "cells": cells,
            "hint": " ".join(("Use this setting.", *warning, *option.notes)),
            "current": on_base(option.knobs, base) == current,
            "mark": "trains differently" if option.alters else "",
            "copy": option.code,
        }
        rows.append(row)
    titles = ["Setting", f"Needs, {unit}", f"Left, {left}", "Time", "FLOPs", "Largest batch"]
    sentences = [sentence.removesuffix(":").removesuffix(".") + "." for sentence in advice.sentences]
    is_listed = current is None or any(row["current"] for row in rows)
    other = "" if current is None or is_listed else _other_search(base, current)
    text = " ".join(filter(None, (other, *sentences, "Click a setting to use it." if rows else "")))
    return {"kind": "table", "titles": titles, "align": _ALIGN, "rows": rows, "text": text}


def _other_search(base: Knobs, current: Knobs) -> str:
    """Return for what a search was, where the GPU, the batch or the input size are other ones now; else nothing."""
    names = {"gpu": "GPU", "batch": "batch", "input_size": "input size"}
    changed = [text for name, text in names.items() if getattr(base, name) != getattr(current, name)]
    if not changed:
        return ""
    return f'Found for another {" and ".join(changed)}: press "What would fit?" for the present one.'


def need_cell(outcome: Outcome, unit: str) -> dict[str, Any]:
    """Return the cell of the need: its text, its share of the capacity, and "tight" or "over"."""
    share = outcome.needed / max(outcome.capacity, 1)
    tone = "over" if not outcome.fits else "tight" if 0 <= outcome.margin < TIGHT * outcome.capacity else ""
    return {"text": in_unit(outcome.needed, unit), "share": share, "tone": tone}


def fit_text(outcome: Outcome) -> str:
    """Return whether a setting fits, and by how much."""
    if outcome.fits:
        return f"yes, {size_text(outcome.margin)} to spare"
    return f"no, {size_text(-outcome.margin)} too much"


def _as_written(outcomes: Sequence[Outcome]) -> Outcome | None:
    return next((outcome for outcome in outcomes if outcome.knobs == Knobs()), None)


def _flops_text(outcome: Outcome, as_written: Outcome | None) -> str:
    share = extra_flops(outcome, as_written)
    if math.isnan(share):
        return ""
    return "+0 %" if abs(share) < 5e-5 else percent_text(1 + share)
