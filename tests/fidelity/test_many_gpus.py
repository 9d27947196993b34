"""Published peaks of several GPUs, to their printed digits; docs/many_gpus.md has the command for torchtitan's."""

from __future__ import annotations

import pathlib

import pytest

from tests.fidelity import many_gpus, sharded_mlp

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/many_gpus.md"


@pytest.mark.filterwarnings("ignore:barrier:UserWarning")
def test_a_sharded_optimizer_has_the_published_peaks():
    rows = list(many_gpus.sharded_optimizer(True))
    assert [row.predicted for row in rows] == [row.published for row in rows]


# AdamW on every rank and in turn need no range, and four ranks no other code than two.
@pytest.mark.parametrize("run", many_gpus.XL_RUNS[2:5:2], ids=lambda run: str(run.dtype))
def test_a_published_peak_lies_in_the_range_that_timing_decides(run):
    lowest, highest = (round(end, 1) for end in many_gpus.xl_range(run))
    assert lowest <= float(run.published) <= highest


def test_weights_that_stay_gathered_have_the_published_peak():
    row = many_gpus.llama()
    assert row.predicted == row.published


@pytest.mark.parametrize("strategy", sharded_mlp.Strategy, ids=lambda strategy: strategy.value)
def test_a_perceptron_has_the_published_peak_with_each_strategy(strategy):
    row = many_gpus.perceptron(strategy)
    assert row.predicted == row.published


def test_the_document_has_the_published_values():
    text = DOCUMENT.read_text()
    assert all(value in text for values in many_gpus.PUBLISHED.values() for value in values)
    assert f" | 8 | {many_gpus.LLAMA_PUBLISHED} GB | " in text
    assert all(f" | 4 | {value} MB | {value} |" in text for value in many_gpus.MLP_PUBLISHED.values())
    assert all(f" | {run.gpus} | {run.published} GiB | " in text for run in many_gpus.XL_RUNS)
