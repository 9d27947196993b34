import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memexplore import devices
from memexplore.whatif import Knobs, Step
from memexplore.whatif.searching.moves import (
    MOST_SAMPLES,
    Largest,
    Move,
    Place,
    Tried,
    accumulations,
    combined,
    largest_batch,
    moves,
    useful,
)  # fmt: skip


def search(fits, start, *, needs=lambda batch: None, capacity=0, unit=1, most=MOST_SAMPLES):
    """The answer of a search, and the batches it asked for."""
    asking = largest_batch(start, capacity, unit=unit, most=most)
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
    on = {name: {str(move.knobs) for move in moves(step(), devices.find(name))} for name in ("T4", "A100")}
    assert "precision fp16" in on["T4"]
    assert "precision bf16" in on["A100"]
    assert not any("bf16" in words for words in on["T4"])


def test_channels_last_is_tried_on_images_only():
    images = Step(nn.Conv2d(3, 4, 3), torch.zeros(2, 3, 8, 8), loss=torch.mean)
    fields = [{move.field for move in moves(one, devices.find("T4"))} for one in (step(), images)]
    assert ["memory_format" in names for names in fields] == [False, True]


@given(st.integers(1, 5000))
def test_micro_batches_divide_the_batch_and_double_at_least(batch):
    counts = accumulations(batch)
    assert all(batch % count == 0 for count in counts)
    assert all(2 * one <= other for one, other in itertools.pairwise(counts))


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
