"""Why a peak rose: found from what was noted about the step, or from the next recorded step."""

from __future__ import annotations

import pytest
import torch

import memexplore as mx
from memexplore.live.reasons import UNEXPLAINED, Facts, reason, rises
from memexplore.ranks import writer
from tests.live.training import Loop, on, watched


def reasons(live) -> dict[int, str]:
    table = live.steps()
    return {int(row.step): row.rose_because for row in table.itertuples() if row.rose_because}


def test_a_larger_batch():
    live = watched("cuda", 8, 8, 8, 4000, 8)
    assert reasons(live)[4] == "larger batch: 4000×64 float32 instead of 8×64 float32"
    assert 5 not in reasons(live)


def test_the_state_of_an_optimizer():
    # On the CPU a peak is reached in the first step before the state exists, in the second with it.
    live = watched("cpu", 8, 8, 8, 8)
    assert reasons(live) == {1: "first step"} or "optimizer state" in reasons(live)[2]
    assert reason(Facts(2, 2000, state_size=900), Facts(1, 1000), leaks=False) == "optimizer state: 900 B more"


def test_a_validation_with_a_large_batch():
    with on("cuda"):
        loop = Loop("cuda")
        with mx.watch(loop.model) as live:
            for step in range(5):
                loop.step()
                if step == 2:
                    with torch.no_grad():
                        loop.model(torch.randn(20_000, 64, device="cuda"))
    assert reasons(live)[4] == "validation: the model ran without gradients between two steps"
    assert live.steps()["evaluations"].tolist() == [0, 0, 0, 1, 0]


def test_more_micro_batches():
    loop = Loop()
    facts = [Facts(1, 1000, micro_batches=1), Facts(2, 2000, micro_batches=4)]
    assert reason(facts[1], facts[0], leaks=False) == "micro-batches: 4 instead of 1"
    assert loop.model is not None


def test_what_no_fact_explains_is_found_in_the_tapes_around_it():
    with on("cuda"):
        loop = Loop("cuda")
        with mx.watch(loop.model, first=2, every=1000) as live:
            for step in range(8):
                loss = loop.loss()
                if step >= 4:  # a larger temporary tensor, which no input and no argument shows
                    extra = torch.zeros(8 * 1024**2, dtype=torch.uint8, device="cuda")
                    loss = loss + extra.float().sum() * 0
                    del extra
                loss.backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    found = reasons(live)[5]
    assert "32.0 MiB more temporary" in found
    assert f"({__file__}:" in found
    assert found.endswith("in step 6")


@pytest.mark.parametrize("seconds", [0.0, 1000.0], ids=["written", "waiting"])
def test_a_reason_that_was_found_later_is_in_the_folder_too(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(writer, "SECONDS", seconds)
    loop = Loop()
    with mx.watch(loop.model, folder=tmp_path) as live:
        for step in range(12):
            if step == 1:
                kept = torch.zeros(1_000_000)
            loop.step()
    assert kept.numel()
    assert "in step 2" in reasons(live)[2]
    written = mx.load(tmp_path).rows(0)
    assert {row.step: row.rose_because for row in written if row.rose_because} == reasons(live)


def test_a_rise_that_no_recorded_step_explains_says_so():
    assert reason(Facts(2, 2000), Facts(1, 1000), leaks=False) == UNEXPLAINED


def test_small_rises_are_not_marked():
    assert not rises(1_000_400, 1_000_000)
    assert rises(1_002_000, 1_000_000)
    assert not rises(1000, 1000)
    assert rises(2000, 1000)
