"""The next batch and the next knobs of a search, by needs made up for the test."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memexplore import gpu_catalogue
from memexplore.knobs.knobs import Knobs
from memexplore.search.candidates import (
    MAX_BATCH,
    BatchResult,
    Candidate,
    LargestBatch,
    SearchPoint,
    blocks_to_freeze,
    largest_batch,
    micro_batch_counts,
    next_combinations,
    single_candidates,
    smaller_input_sizes,
    worth_combining,
)  # fmt: skip
from memexplore.steps.step import Step


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
        name: {str(one.knobs) for one in single_candidates(step(), gpu_catalogue.find(name))} for name in ("T4", "A100")
    }
    assert "precision fp16" in settings["T4"]
    assert "precision bf16" in settings["A100"]
    assert not any("bf16" in setting for setting in settings["T4"])


def test_channels_last_is_tried_on_images_only():
    images = Step(nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8), loss=torch.mean)
    of_rows, of_images = (single_candidates(one, gpu_catalogue.find("T4")) for one in (step(), images))
    assert "memory_format" not in {one.field for one in of_rows}
    assert "memory_format" in {one.field for one in of_images}


@given(st.integers(1, 5000))
def test_micro_batches_divide_the_batch_and_at_least_double(batch):
    counts = micro_batch_counts(batch)
    assert all(batch % count == 0 for count in counts)
    assert all(2 * one <= other for one, other in itertools.pairwise(counts))


def test_smaller_input_sizes_are_multiples_of_the_common_divisor_with_32():
    sizes = {
        size: smaller_input_sizes(Step(nn.Conv2d(3, 4, 3), torch.zeros(2, 3, size, size), loss=torch.mean))
        for size in (224, 256, 28, 33)
    }
    # 224 = 7 * 32: 168 and 112 are nearest to 5 * 32 and, up from the middle, 4 * 32; 28 = 7 * 4; 33 has no power of 2
    assert sizes == {224: (160, 128), 256: (192, 128), 28: (20, 16), 33: (25, 17)}


def test_a_batch_without_input_size_has_no_smaller_one():
    assert smaller_input_sizes(step()) == ()


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


# -- combinations

WRITTEN = Knobs()
HALF, SQRT, EVERY = Knobs(precision="fp16"), Knobs(checkpoint="sqrt"), Knobs(checkpoint="every 1")
ADAFACTOR = Knobs(optimizer="Adafactor")
SINGLE = (HALF, SQRT, EVERY, ADAFACTOR)
CANDIDATES = tuple(Candidate(next(iter(knobs.changed())), knobs, knobs == ADAFACTOR) for knobs in SINGLE)
POINTS = {
    WRITTEN: SearchPoint(1.0, 100, False),
    HALF: SearchPoint(0.5, 80, False),
    SQRT: SearchPoint(1.3, 60, False),
    EVERY: SearchPoint(1.4, 70, False),
    ADAFACTOR: SearchPoint(1.0, 90, False),
}


def test_a_knob_beaten_by_another_value_of_the_same_knob_is_dropped():
    # every 1 is slower than sqrt and needs more
    assert [one.knobs for one in worth_combining(CANDIDATES, POINTS)] == [HALF, SQRT, ADAFACTOR]


def test_a_knob_that_saves_nothing_is_dropped():
    assert not worth_combining(CANDIDATES, dict.fromkeys([WRITTEN, *SINGLE], POINTS[WRITTEN]))


def test_settings_expected_to_fit_that_train_the_same_are_run_first():
    # fp16 and sqrt: 0.8 * 60 = 48 <= 50
    following = next_combinations(worth_combining(CANDIDATES, POINTS), POINTS, [], capacity=50, count=3)
    assert following[0] == SQRT.replace(precision="fp16")
    assert {knobs.optimizer for knobs in following[1:]} == {ADAFACTOR.optimizer}


def test_no_setting_is_run_twice_and_no_field_is_changed_twice():
    seen = dict(POINTS)
    while following := next_combinations(CANDIDATES, seen, [], capacity=1, count=5):
        assert not set(following) & set(seen)
        seen |= {knobs: SearchPoint(1.0, 50, False) for knobs in following}
    # 2 precisions * 3 checkpoints * 2 optimizers
    assert len(seen) == 12


def test_a_setting_that_failed_is_not_run_again():
    both = SQRT.replace(precision="fp16")
    assert both not in next_combinations(CANDIDATES, POINTS, [both], capacity=50, count=9)


def test_a_setting_that_fits_is_combined_with_faster_knobs_only():
    points = {knobs: point._replace(fits=True) for knobs, point in POINTS.items()}
    following = next_combinations(CANDIDATES, points, [], capacity=200, count=9)
    assert all(knobs.precision is HALF.precision for knobs in following)


def test_settings_whose_knobs_conflict_are_not_run():
    in_backward = Knobs(update="in backward")
    candidates = (*CANDIDATES[:1], Candidate("update", in_backward))
    points = {WRITTEN: POINTS[WRITTEN], HALF: POINTS[HALF], in_backward: SearchPoint(1.0, 90, False)}
    # The GradScaler of fp16 reads all gradients before the step.
    assert next_combinations(candidates, points, [], capacity=50, count=9) == []


LORA = Knobs(lora="layers")
WITH_LORA = (*CANDIDATES, Candidate("lora", LORA, True))


def test_where_the_same_training_fits_no_other_training_is_combined():
    points = POINTS | {SQRT: SearchPoint(1.3, 45, True), LORA: SearchPoint(0.9, 80, False)}
    for knobs in next_combinations(WITH_LORA, points, [], capacity=50, count=99):
        assert not knobs.lora
        assert knobs.optimizer is WRITTEN.optimizer


def test_a_fitting_setting_that_is_too_slow_does_not_end_the_search_for_others():
    # 1.6 times the time, above the acceptable 1.5
    points = POINTS | {SQRT: SearchPoint(1.6, 45, True), LORA: SearchPoint(0.9, 80, False)}
    assert any(knobs.lora for knobs in next_combinations(WITH_LORA, points, [], capacity=50, count=99))


def test_fields_that_change_the_training_take_turns():
    points = POINTS | {LORA: SearchPoint(0.9, 95, False)}
    following = next_combinations(WITH_LORA, points, [], capacity=55, count=99)
    # With sqrt (0.6): 0.9 * 60 = 54 and 0.95 * 60 = 57, so of 55 only the optimizer is expected to fit; with fp16 none.
    expected = following.index(SQRT.replace(optimizer="Adafactor"))
    missing = [following.index(HALF.replace(optimizer="Adafactor")), following.index(SQRT.replace(lora="layers"))]
    assert expected < min(missing)


def test_settings_whose_weights_and_states_exceed_the_capacity_are_run_last():
    points = {knobs: point._replace(constant=60) for knobs, point in POINTS.items()}
    points[ADAFACTOR] = SearchPoint(1.0, 90, False, constant=30)
    following = next_combinations(CANDIDATES, points, [], capacity=50, count=99)
    # 60 of 50 bytes with AdamW, 30 with Adafactor
    small_state = [knobs.optimizer is ADAFACTOR.optimizer for knobs in following]
    assert small_state == sorted(small_state, reverse=True)
    assert small_state[0]
    assert not small_state[-1]


TWO, FOUR, EIGHT = (Knobs(accumulation=count) for count in (2, 4, 8))
CUT = (CANDIDATES[0], *(Candidate("accumulation", knobs) for knobs in (TWO, FOUR, EIGHT)))
CUT_POINTS = {
    WRITTEN: SearchPoint(1.0, 100, False),
    HALF: SearchPoint(0.5, 80, False),
    TWO: SearchPoint(1.0, 70, False),
    FOUR: SearchPoint(1.0, 60, False),
    EIGHT: SearchPoint(1.0, 55, False),
}


def test_the_fewest_micro_batches_expected_to_fit_are_run():
    # 0.8 * 70 = 56, 0.8 * 60 = 48, 0.8 * 55 = 44
    assert next_combinations(CUT, CUT_POINTS, [], capacity=50, count=9) == [FOUR.replace(precision="fp16")]


def test_the_most_micro_batches_are_run_where_none_are_expected_to_fit():
    assert next_combinations(CUT, CUT_POINTS, [], capacity=40, count=9) == [EIGHT.replace(precision="fp16")]


def test_a_setting_that_fits_gets_no_more_micro_batches():
    points = CUT_POINTS | {FOUR.replace(precision="fp16"): SearchPoint(0.5, 48, True)}
    assert next_combinations(CUT, points, [], capacity=50, count=9) == []
