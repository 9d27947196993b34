"""The next batch and the next knobs of a search, by needs made up for the test."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memexplore.hardware import catalogue
from memexplore.run.knobs.accumulation import micro_batch_counts
from memexplore.run.knobs.frozen import blocks_to_freeze
from memexplore.run.knobs.input_size import smaller_input_sizes
from memexplore.run.programs.step import Step
from memexplore.run.search.candidates import (
    MAX_BATCH,
    BatchResult,
    LargestBatch,
    largest_batch,
    single_candidates,
)  # fmt: skip


def search(
    fits, start, *, needs=lambda batch: None, capacity=0, unit=1, max_batch=MAX_BATCH, constant=0, estimate=None
):
    """Return the answer of a search and the batches it yielded."""
    generator = largest_batch(start, capacity, unit=unit, max_batch=max_batch, constant=constant, estimate=estimate)
    batches = [next(generator)]
    try:
        while True:
            batches.append(generator.send(BatchResult(fits(batches[-1]), needs(batches[-1]))))
    except StopIteration as end:
        return end.value, batches


# -- the largest batch


@given(st.integers(0, 5000), st.integers(1, 3000), st.integers(1, 16))
def test_the_largest_batch_and_the_next_larger_one_are_run(most, start, unit):
    answer, batches = search(lambda batch: batch <= most, start, unit=unit)
    assert answer == LargestBatch(most // unit * unit, True)
    assert answer.samples in batches or answer.samples == 0
    assert answer.samples + unit in batches


@given(st.integers(0, 5000), st.integers(1, 3000), st.integers(0, 10**6), st.integers(1, 10**4))
def test_known_needs_save_runs_and_do_not_change_the_answer(most, start, constant, slope):
    def needs(batch):
        return constant + slope * batch

    capacity = needs(most)
    answer, batches = search(lambda batch: needs(batch) <= capacity, start, needs=needs, capacity=capacity)
    assert answer == LargestBatch(most, True)
    # Halving from 3000 takes at most 12 runs; linear growth is estimated at most one off.
    assert len(batches) <= 16


@given(st.lists(st.integers(0, 10**6), min_size=200, max_size=200), st.integers(1, 199))
def test_the_answer_and_the_next_larger_batch_are_run_for_any_needs(needs, start):
    def fits(batch):
        return batch < 200 and needs[batch] <= 500_000

    answer, batches = search(fits, start, needs=lambda batch: needs[batch] if batch < 200 else None, capacity=500_000)
    assert answer.samples == 0 or (answer.samples in batches and fits(answer.samples))
    assert answer.samples + 1 in batches
    assert not fits(answer.samples + 1)


def test_an_estimate_is_asked_for_only_where_the_search_goes_on():
    asked = []
    generator = largest_batch(10, 100)
    batches = [next(generator)]
    answer = None
    while answer is None:
        batch = batches[-1]
        result = BatchResult(batch <= 20, None, lambda batch=batch: asked.append(batch) or 20)
        try:
            batches.append(generator.send(result))
        except StopIteration as end:
            answer = end.value
    assert (answer, batches, asked) == (LargestBatch(20, True), [10, 20, 21], [10, 20])


@given(st.integers(1, 16), st.integers(1, 1000))
def test_every_batch_is_a_multiple_of_the_micro_batches(unit, start):
    _, batches = search(lambda batch: batch <= 777, start, unit=unit)
    assert all(batch % unit == 0 for batch in batches)


@given(st.integers(2, 5000), st.integers(1, 3000), st.integers(0, 10**6), st.integers(1, 10**4))
def test_linear_growth_from_a_known_constant_takes_three_runs(most, start, constant, slope):
    def needs(batch):
        return constant + slope * batch

    capacity = needs(most)

    def fits(batch):
        return needs(batch) <= capacity

    # While all batches fit, each is at most 16 times the one before.
    start = max(start, most // 16 + 1)
    _, batches = search(
        lambda batch: needs(batch) <= capacity, start, needs=needs, capacity=capacity, constant=constant
    )
    # The start, the estimate and the next batch; an estimate rounded down by the division takes one more.
    assert len(batches) <= 4


@given(st.integers(1, 5000), st.integers(1, 3000), st.integers(-1, 1))
def test_a_good_estimate_saves_runs_and_does_not_change_the_answer(most, start, off):
    answer, batches = search(lambda batch: batch <= most, start, estimate=max(1, most + off))
    assert answer == LargestBatch(most, True)
    # The start, 3 leaps of 16 times before 5000 is in reach, the estimate, then 1 and 5 beyond it and two between.
    assert len(batches) <= 1 + 3 + 1 + 4


@given(st.integers(1, 5000), st.integers(1, 3000), st.integers(1, 10**4))
def test_a_bad_estimate_does_not_change_the_answer(most, start, estimate):
    assert search(lambda batch: batch <= most, start, estimate=estimate)[0] == LargestBatch(most, True)


def test_memory_that_does_not_grow_ends_the_search():
    answer, _ = search(lambda batch: True, 8, needs=lambda batch: 5, capacity=10, max_batch=1024)
    assert answer == LargestBatch(1024, False)


def test_no_batch_is_run_twice():
    _, batches = search(lambda batch: batch <= 100, 8, needs=lambda batch: 7 * batch, capacity=706)
    assert len(set(batches)) == len(batches)


# -- single knobs


def step(batch=12):
    return Step(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.zeros(batch, 4), loss=torch.mean)


def test_half_precision_is_the_one_the_gpu_has_units_for():
    settings = {
        name: {str(one.knobs) for one in single_candidates(step(), catalogue.find(name))} for name in ("T4", "A100")
    }
    assert "precision fp16" in settings["T4"]
    assert "precision bf16" in settings["A100"]
    assert not any("bf16" in setting for setting in settings["T4"])


def test_channels_last_is_tried_on_images_only():
    images = Step(nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8), loss=torch.mean)
    of_rows, of_images = (single_candidates(one, catalogue.find("T4")) for one in (step(), images))
    assert "memory_format" not in {one.field for one in of_rows}
    assert "memory_format" in {one.field for one in of_images}


@given(st.integers(1, 5000))
def test_micro_batches_divide_the_batch_and_at_least_double(batch):
    counts = micro_batch_counts(batch)
    assert all(batch % count == 0 for count in counts)
    assert all(2 * one <= other for one, other in itertools.pairwise(counts))


def test_smaller_input_sizes_are_multiples_of_the_common_divisor_with_32():
    sizes = {size: smaller_input_sizes(size) for size in (224, 256, 28, 33)}
    # 224 = 7 * 32: 168 and 112 are nearest to 5 * 32 and, up from the middle, 4 * 32; 28 = 7 * 4; 33 has no power of 2
    assert sizes == {224: (160, 128), 256: (192, 128), 28: (20, 16), 33: (25, 17)}


def test_layers_before_the_blocks_are_frozen_with_them():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(8))
            self.head = nn.Linear(4, 10)

    before = ("embedding",)
    # 4 and 6 of 8 layers
    halves = [before + tuple(f"layers.{number}" for number in range(count)) for count in (4, 6)]
    assert blocks_to_freeze(Net()) == tuple(halves)


def test_a_model_without_repeated_blocks_has_none_to_freeze():
    assert blocks_to_freeze(nn.Linear(4, 4)) == ()
