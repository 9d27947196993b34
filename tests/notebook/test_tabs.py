"""Content of the explorer's tabs: cells, marks and views."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from memexplore import gpu_catalogue
from memexplore.knobs.knobs import Knobs
from memexplore.notebook import tabs
from memexplore.search.advice import Advice, Option
from memexplore.search.candidates import LargestBatch
from memexplore.steps.outcome import Outcome, run_outcome
from memexplore.steps.step import Step

GIB = 1 << 30


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    step = Step(torch.nn.Linear(8, 8), torch.zeros(4, 8), loss=torch.mean, optimizer=torch.optim.SGD)
    return run_outcome(step, gpu="T4")[1]


def of(outcome: Outcome, **changes: Any) -> Outcome:
    return dataclasses.replace(outcome, **changes) if dataclasses.is_dataclass(outcome) else outcome._replace(**changes)


@pytest.mark.parametrize(
    ("reserved", "fits", "tone"),
    [
        (9 * GIB, True, ""),
        (96 * GIB // 10, True, "tight"),  # 0.4 of 10 GiB are left, less than 5 %
        (20 * GIB, False, "over"),
    ],
)
def test_reserved_memory_is_a_share_of_the_capacity(outcome: Outcome, reserved: int, fits: bool, tone: str) -> None:
    cell = tabs.reserved_cell(of(outcome, peak_reserved=reserved, capacity=10 * GIB, fits=fits), "GiB")
    assert cell["share"] == pytest.approx(reserved / (10 * GIB))
    assert cell["tone"] == tone


def test_columns_of_sizes_have_one_unit_and_are_right_aligned(outcome: Outcome) -> None:
    large = of(outcome, knobs=Knobs(batch=8), peak_allocated=3 * GIB, peak_reserved=4 * GIB, capacity=16 * GIB)
    small = of(outcome, peak_allocated=GIB // 2, peak_reserved=GIB, capacity=16 * GIB)
    tab = tabs.history([small, large], Knobs(batch=8))
    assert tab["titles"][1:4] == ["Allocated, GiB", "Reserved, GiB", "Left, GiB"]
    assert [row["cells"][1] for row in tab["rows"]] == ["0.50", "3.00"]
    assert tab["rows"][1]["cells"][2] == {"text": "4.00", "share": 0.25, "tone": ""}
    assert [row["current"] for row in tab["rows"]] == [False, True]
    assert len(tab["align"]) == len(tab["titles"])
    assert set(tab["align"][1:]) == {"right"}


def test_setting_that_only_fragmentation_stops_lacks_no_bytes(outcome: Outcome) -> None:
    stopped = of(outcome, peak_reserved=9 * GIB, capacity=10 * GIB, fits=False)
    assert tabs.fit_text(stopped) == "no: there is memory, but no piece of it is large enough"
    assert tabs.fit_text(of(stopped, peak_reserved=12 * GIB)) == "no, 2.00 GiB too much"


def test_largest_batches_are_a_second_view(outcome: Outcome) -> None:
    outcomes = [outcome, of(outcome, knobs=Knobs(precision="fp16"))]
    assert "views" not in tabs.trade_offs(outcomes, Knobs())
    tab = tabs.trade_offs(outcomes, Knobs(), {Knobs(precision="fp16"): LargestBatch(64, True)})
    assert [view["label"] for view in tab["views"]] == ["Time", "Largest batch"]
    (points,) = tab["views"][1]["figure"]["data"]
    assert (list(points["x"]), list(points["customdata"])) == ([64], [1])


def test_text_over_the_rows_of_advice_has_whole_sentences(outcome: Outcome) -> None:
    fitting = of(outcome, peak_reserved=GIB, capacity=16 * GIB, fits=True)
    option = Option(fitting, 1.0, 0.0, frozenset(), None, "")
    found = Advice(gpu_catalogue.find("T4"), fitting, (option,), (fitting,), {}, {}, frozenset({Knobs()}))
    text = tabs.advice(found)["text"]
    assert text.endswith("1 setting was run. These fit, cheapest first. Click a setting to use it.")


def test_code_is_shown_as_a_diff() -> None:
    tab = tabs.code(None, Knobs(accumulation=2))
    assert "-     loss = loss_function(model(inputs), targets)" in tab["diff"].split("\n")
    assert tab["text"].startswith(
        "# With general names, as no source with a training loop of this model is known.\n# model"
    )
    assert "diff" not in tabs.code(None, Knobs())
