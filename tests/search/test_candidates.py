import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memexplore import gpu_catalogue
from memexplore.knobs.knobs import Knobs
from memexplore.search.candidates import (
    MOST_SAMPLES,
    Largest,
    Move,
    Place,
    Tried,
    accumulations,
    combined,
    first_blocks,
    input_sizes,
    largest_batch,
    moves,
    useful,
)  # fmt: skip
from memexplore.steps.step import Step


def search(fits, start, *, needs=lambda batch: None, capacity=0, unit=1, most=MOST_SAMPLES, constant=0, hint=None):
    """The answer of a search, and the batches it asked for."""
    asking = largest_batch(start, capacity, unit=unit, most=most, constant=constant, hint=hint)
    asked = [next(asking)]
    try:
        while True:
            asked.append(asking.send(Tried(fits(asked[-1]), needs(asked[-1]))))
    except StopIteration as end:
        return end.value, asked


# -- the largest batch


@given(st.integers(0, 5000), st.integers(1, 3000), st.integers(1, 16))
def test_the_largest_batch_is_found_and_so_is_that_the_next_does_not_fit(most, start, unit):
    answer, asked = search(lambda batch: batch <= most, start, unit=unit)
    assert answer == Largest(most // unit * unit, True)
    assert answer.samples in asked or answer.samples == 0
    assert answer.samples + unit in asked


@given(st.integers(0, 5000), st.integers(1, 3000), st.integers(0, 10**6), st.integers(1, 10**4))
def test_known_needs_save_runs_and_change_no_answer(most, start, constant, slope):
    def needs(batch):
        return constant + slope * batch

    capacity = needs(most)
    answer, asked = search(lambda batch: needs(batch) <= capacity, start, needs=needs, capacity=capacity)
    assert answer == Largest(most, True)
    # Shrinking from 3000 by halves asks at most 12 times; an even growth is guessed at most one off.
    assert len(asked) <= 16


@given(st.lists(st.integers(0, 10**6), min_size=200, max_size=200), st.integers(1, 199))
def test_whatever_memory_does_the_answer_was_run_and_so_was_the_next(needs, start):
    def fits(batch):
        return batch < 200 and needs[batch] <= 500_000

    answer, asked = search(fits, start, needs=lambda batch: needs[batch] if batch < 200 else None, capacity=500_000)
    assert answer.samples == 0 or (answer.samples in asked and fits(answer.samples))
    assert answer.samples + 1 in asked
    assert not fits(answer.samples + 1)


@given(st.integers(1, 16), st.integers(1, 1000))
def test_every_batch_asked_for_is_a_multiple_of_the_micro_batches(unit, start):
    _, asked = search(lambda batch: batch <= 777, start, unit=unit)
    assert all(batch % unit == 0 for batch in asked)


@given(st.integers(2, 5000), st.integers(1, 3000), st.integers(0, 10**6), st.integers(1, 10**4))
def test_an_even_growth_from_a_known_constant_takes_three_runs(most, start, constant, slope):
    def needs(batch):
        return constant + slope * batch

    capacity = needs(most)
    # A batch is at most 16 times the one before while all fit.
    start = max(start, most // 16 + 1)
    _, asked = search(lambda batch: needs(batch) <= capacity, start, needs=needs, capacity=capacity, constant=constant)
    # The start, the guess and the next one; a guess rounded down by the division takes one more.
    assert len(asked) <= 4


@given(st.integers(1, 5000), st.integers(1, 3000), st.integers(-1, 1))
def test_a_good_hint_saves_runs_and_changes_no_answer(most, start, off):
    answer, asked = search(lambda batch: batch <= most, start, hint=max(1, most + off))
    assert answer == Largest(most, True)
    # The start, 3 leaps of 16 times before 5000 is in reach, the hint, and what is 1 and 5 beyond and the two between.
    assert len(asked) <= 1 + 3 + 1 + 4


@given(st.integers(1, 5000), st.integers(1, 3000), st.integers(1, 10**4))
def test_a_bad_hint_changes_no_answer(most, start, hint):
    assert search(lambda batch: batch <= most, start, hint=hint)[0] == Largest(most, True)


def test_memory_that_does_not_grow_ends_the_search():
    answer, _ = search(lambda batch: True, 8, needs=lambda batch: 5, capacity=10, most=1024)
    assert answer == Largest(1024, False)


def test_no_batch_is_asked_for_twice():
    _, asked = search(lambda batch: batch <= 100, 8, needs=lambda batch: 7 * batch, capacity=706)
    assert len(set(asked)) == len(asked)


# -- moves


def step(batch=12):
    return Step(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.zeros(batch, 4), loss=torch.mean)


def test_half_precision_is_what_the_gpu_has_units_for():
    on = {name: {str(move.knobs) for move in moves(step(), gpu_catalogue.find(name))} for name in ("T4", "A100")}
    assert "precision fp16" in on["T4"]
    assert "precision bf16" in on["A100"]
    assert not any("bf16" in words for words in on["T4"])


def test_channels_last_is_tried_on_images_only():
    images = Step(nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8), loss=torch.mean)
    fields = [{move.field for move in moves(one, gpu_catalogue.find("T4"))} for one in (step(), images)]
    assert ["memory_format" in names for names in fields] == [False, True]


@given(st.integers(1, 5000))
def test_micro_batches_divide_the_batch_and_double_at_least(batch):
    counts = accumulations(batch)
    assert all(batch % count == 0 for count in counts)
    assert all(2 * one <= other for one, other in itertools.pairwise(counts))


def test_smaller_inputs_are_multiples_of_what_the_size_is_one_of():
    sizes = {
        size: input_sizes(Step(nn.Conv2d(3, 4, 3), torch.zeros(2, 3, size, size), loss=torch.mean))
        for size in (224, 256, 28, 33)
    }
    # 224 = 7 * 32: 168 and 112 are nearest to 5 * 32 and, up from the middle, 4 * 32; 28 = 7 * 4; 33 has no power of 2
    assert sizes == {224: (160, 128), 256: (192, 128), 28: (20, 16), 33: (25, 17)}


def test_a_batch_without_size_has_no_smaller_input():
    assert input_sizes(step()) == ()


def test_what_comes_before_the_blocks_is_frozen_with_them():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(8))
            self.head = nn.Linear(4, 10)

    before = ("embedding",)
    # 4 and 6 of 8 layers
    halves = [before + tuple(f"layers.{number}" for number in range(count)) for count in (4, 6)]
    assert first_blocks(Net()) == tuple(halves)


def test_a_model_that_repeats_nothing_has_no_blocks_to_freeze():
    assert first_blocks(nn.Linear(4, 4)) == ()


# -- combinations

WRITTEN = Knobs()
HALF, SQRT, EVERY = Knobs(precision="fp16"), Knobs(checkpoint="sqrt"), Knobs(checkpoint="every 1")
ADAFACTOR = Knobs(optimizer="Adafactor")
MOVES = tuple(Move(next(iter(knobs.changed())), knobs, knobs == ADAFACTOR) for knobs in (HALF, SQRT, EVERY, ADAFACTOR))
PLACES = {
    WRITTEN: Place(1.0, 100, False),
    HALF: Place(0.5, 80, False),
    SQRT: Place(1.3, 60, False),
    EVERY: Place(1.4, 70, False),
    ADAFACTOR: Place(1.0, 90, False),
}


def test_a_knob_beaten_by_the_same_knob_turned_otherwise_is_dropped():
    # every 1 is slower than sqrt and needs more
    assert [move.knobs for move in useful(MOVES, PLACES)] == [HALF, SQRT, ADAFACTOR]


def test_a_knob_that_gains_nothing_is_dropped():
    assert not useful(MOVES, PLACES | {knobs: Place(1.0, 100, False) for knobs in (HALF, SQRT, EVERY, ADAFACTOR)})


def test_what_promises_to_fit_and_trains_the_same_is_run_first():
    # fp16 and sqrt: 0.8 * 60 = 48 <= 50
    following = combined(useful(MOVES, PLACES), PLACES, [], capacity=50, count=3)
    assert following[0] == SQRT.replace(precision="fp16")
    assert {knobs.optimizer for knobs in following[1:]} == {ADAFACTOR.optimizer}


def test_nothing_is_run_twice_and_no_field_is_turned_twice():
    seen = dict(PLACES)
    while following := combined(MOVES, seen, [], capacity=1, count=5):
        assert not set(following) & set(seen)
        seen |= {knobs: Place(1.0, 50, False) for knobs in following}
    # 2 precisions * 3 checkpoints * 2 optimizers
    assert len(seen) == 12


def test_what_failed_is_not_run_again():
    both = SQRT.replace(precision="fp16")
    assert both not in combined(MOVES, PLACES, [both], capacity=50, count=9)


def test_what_fits_is_only_made_quicker():
    places = {knobs: place._replace(fits=True) for knobs, place in PLACES.items()}
    assert all(HALF.precision is knobs.precision for knobs in combined(MOVES, places, [], capacity=200, count=9))


def test_settings_that_contradict_themselves_are_not_run():
    in_backward = Knobs(update="in backward")
    found = (*MOVES[:1], Move("update", in_backward))
    places = {WRITTEN: PLACES[WRITTEN], HALF: PLACES[HALF], in_backward: Place(1.0, 90, False)}
    # fp16's GradScaler looks at all gradients before the step
    assert combined(found, places, [], capacity=50, count=9) == []


LORA = Knobs(lora="layers")
WITH_LORA = (*MOVES, Move("lora", LORA, True))


def test_where_the_same_training_fits_no_other_training_is_combined():
    places = PLACES | {SQRT: Place(1.3, 45, True), LORA: Place(0.9, 80, False)}
    for knobs in combined(WITH_LORA, places, [], capacity=50, count=99):
        assert not knobs.lora
        assert knobs.optimizer is WRITTEN.optimizer


def test_what_takes_too_long_is_no_reason_to_try_nothing_else():
    # 1.6 times as long
    places = PLACES | {SQRT: Place(1.6, 45, True), LORA: Place(0.9, 80, False)}
    assert any(knobs.lora for knobs in combined(WITH_LORA, places, [], capacity=50, count=99))


def test_ways_to_alter_the_training_take_turns():
    places = PLACES | {LORA: Place(0.9, 95, False)}
    following = combined(WITH_LORA, places, [], capacity=55, count=99)
    # With sqrt (0.6): 0.9 * 60 = 54 and 0.95 * 60 = 57, so the optimizer alone promises to fit; both miss with fp16.
    promising = following.index(SQRT.replace(optimizer="Adafactor"))
    missing = [following.index(HALF.replace(optimizer="Adafactor")), following.index(SQRT.replace(lora="layers"))]
    assert promising < min(missing)


def test_what_weights_and_states_alone_leave_no_room_for_is_run_last():
    places = {knobs: place._replace(constant=60) for knobs, place in PLACES.items()}
    places[ADAFACTOR] = Place(1.0, 90, False, constant=30)
    following = combined(MOVES, places, [], capacity=50, count=99)
    # 60 of 50 with AdamW, 30 with Adafactor
    lean = [knobs.optimizer is ADAFACTOR.optimizer for knobs in following]
    assert lean == sorted(lean, reverse=True)
    assert lean[0]
    assert not lean[-1]


TWO, FOUR, EIGHT = (Knobs(accumulation=count) for count in (2, 4, 8))
CUT = (MOVES[0], *(Move("accumulation", knobs) for knobs in (TWO, FOUR, EIGHT)))
CUT_PLACES = {
    WRITTEN: Place(1.0, 100, False),
    HALF: Place(0.5, 80, False),
    TWO: Place(1.0, 70, False),
    FOUR: Place(1.0, 60, False),
    EIGHT: Place(1.0, 55, False),
}


def test_a_setting_is_cut_no_finer_than_promises_to_fit():
    # 0.8 * 70 = 56, 0.8 * 60 = 48, 0.8 * 55 = 44
    assert combined(CUT, CUT_PLACES, [], capacity=50, count=9) == [FOUR.replace(precision="fp16")]


def test_a_setting_that_promises_nothing_is_cut_as_fine_as_can_be():
    assert combined(CUT, CUT_PLACES, [], capacity=40, count=9) == [EIGHT.replace(precision="fp16")]


def test_a_setting_that_fits_is_cut_no_further():
    places = CUT_PLACES | {FOUR.replace(precision="fp16"): Place(0.5, 48, True)}
    assert combined(CUT, places, [], capacity=50, count=9) == []
