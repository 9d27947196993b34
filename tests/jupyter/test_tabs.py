"""Content of the explorer's tabs: cells, marks and views."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from memexplore.hardware import catalogue
from memexplore.jupyter import tabs
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.outcome import Outcome
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.run.search.advice import Advice, Option
from memexplore.run.search.candidates import LargestBatch

GIB = 1 << 30


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    step = Step(torch.nn.Linear(8, 8), torch.zeros(4, 8), loss=torch.mean, optimizer=torch.optim.SGD)
    return run(step, machine=machine_of("T4")).outcome


def of(outcome: Outcome, **changes: Any) -> Outcome:
    return dataclasses.replace(outcome, **changes) if dataclasses.is_dataclass(outcome) else outcome._replace(**changes)


@pytest.mark.parametrize(
    ("needed", "fits", "tone"),
    [
        (9 * GIB, True, ""),
        (96 * GIB // 10, True, "tight"),  # 0.4 of 10 GiB are left, less than 5 %
        (20 * GIB, False, "over"),
    ],
)
def test_needed_memory_is_a_share_of_the_capacity(outcome: Outcome, needed: int, fits: bool, tone: str) -> None:
    cell = tabs.need_cell(of(outcome, needed=needed, capacity=10 * GIB, fits=fits), "GiB")
    assert cell["share"] == pytest.approx(needed / (10 * GIB))
    assert cell["tone"] == tone


def test_columns_of_sizes_have_one_unit_and_are_right_aligned(outcome: Outcome) -> None:
    large = of(outcome, knobs=Knobs(batch=8), peak_allocated=3 * GIB, needed=4 * GIB, capacity=16 * GIB)
    small = of(outcome, peak_allocated=GIB // 2, needed=GIB, capacity=16 * GIB)
    tab = tabs.history([small, large], Knobs(batch=8))
    assert tab["titles"][1:4] == ["Allocated, GiB", "Needs, GiB", "Left, GiB"]
    assert [row["cells"][1] for row in tab["rows"]] == ["0.50", "3.00"]
    assert tab["rows"][1]["cells"][2] == {"text": "4.00", "share": 0.25, "tone": ""}
    assert [row["current"] for row in tab["rows"]] == [False, True]
    assert len(tab["align"]) == len(tab["titles"])
    assert set(tab["align"][1:]) == {"right"}


def test_setting_that_does_not_fit_says_how_many_bytes_are_missing(outcome: Outcome) -> None:
    stopped = of(outcome, needed=12 * GIB, capacity=10 * GIB, fits=False)
    assert tabs.fit_text(stopped) == "no, 2.00 GiB too much"


def test_largest_batches_are_a_second_view(outcome: Outcome) -> None:
    outcomes = [outcome, of(outcome, knobs=Knobs(precision="fp16"))]
    assert "views" not in tabs.trade_offs(outcomes, Knobs())
    tab = tabs.trade_offs(outcomes, Knobs(), {Knobs(precision="fp16"): LargestBatch(64, True)})
    assert [view["label"] for view in tab["views"]] == ["Time", "Largest batch"]
    (points,) = tab["views"][1]["figure"]["data"]
    assert (list(points["x"]), list(points["customdata"])) == ([64], [1])


def test_text_over_the_rows_of_advice_has_whole_sentences(outcome: Outcome) -> None:
    fitting = of(outcome, needed=GIB, capacity=16 * GIB, fits=True)
    option = Option(fitting, 1.0, 0.0, frozenset(), None, "")
    found = Advice(catalogue.find("T4"), fitting, (option,), (fitting,), {}, {}, frozenset({Knobs()}))
    text = tabs.advice(found)["text"]
    assert text.endswith("1 setting was run. These fit, cheapest first. Click a setting to use it.")


@pytest.mark.parametrize(
    ("base", "current", "text"),
    [
        (Knobs(), Knobs(), "As written it needs"),
        (Knobs(), Knobs(gpu="A10"), 'Found for another GPU: press "What would fit?" for the present one. As written'),
        (Knobs(batch=8, gpu="A10"), Knobs(), "Found for another GPU and batch: "),
        # a setting of the list is in force
        (Knobs(), Knobs(batch=8), "As written it needs"),
    ],
)
def test_advice_says_that_it_was_found_for_another_setting(
    outcome: Outcome, base: Knobs, current: Knobs, text: str
) -> None:
    smaller = Option(of(outcome, knobs=Knobs(batch=8), fits=True), 1.0, 0.0, frozenset(), None, "")
    found = Advice(catalogue.find("T4"), outcome, (smaller,), (outcome,), {}, {}, frozenset({Knobs()}))
    assert tabs.advice(found, current, base)["text"].startswith(text)


def test_chart_of_training_has_no_inference(outcome: Outcome) -> None:
    outcomes = [outcome, of(outcome, knobs=Knobs(mode="inference")), of(outcome, knobs=Knobs(batch=8))]
    figures = [tabs.trade_offs(outcomes, knobs)["figure"] for knobs in (Knobs(), Knobs(mode="inference"))]
    ids = [{name for trace in figure["data"] for name in trace.get("ids", ())} for figure in figures]
    assert ids == [{"as written", "batch 8"}, {str(Knobs(mode="inference"))}]


def test_code_is_shown_as_a_diff() -> None:
    tab = tabs.code(None, Knobs(accumulation=2))
    assert "-     loss = loss_function(model(inputs), targets)" in tab["diff"].split("\n")
    assert tab["text"].startswith(
        "# With general names, as no source with a training loop of this model is known.\n# model"
    )
    assert "diff" not in tabs.code(None, Knobs())
