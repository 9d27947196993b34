"""The next combinations of a search, by needs made up for the test."""

from __future__ import annotations

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.search.candidates import Candidate
from memexplore.run.search.combinations import next_combinations, worth_combining
from memexplore.run.search.estimates import SearchPoint

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


def test_knobs_of_weights_are_compared_by_all_they_need():
    # As for a step whose weights, gradients and states take 100, and its activations 10.
    point = SearchPoint(1.0, 110, False, constant=100, gradients=30, fixed=110, peak=101, other=10)
    fused, in_backward = Knobs(update="fused"), Knobs(update="in backward")
    points = {
        WRITTEN: point,
        fused: point._replace(needed=100, fixed=100),
        # The activations beside the update are more, and the gradients are gone.
        in_backward: point._replace(needed=85, constant=70, gradients=0, fixed=70, other=15),
    }
    candidates = [Candidate("update", knobs) for knobs in (fused, in_backward)]
    assert [one.knobs for one in worth_combining(candidates, points)] == [in_backward]


def test_knobs_of_activations_are_compared_by_these_where_weights_need_the_most():
    point = SearchPoint(1.0, 110, False, constant=100, gradients=30, fixed=110, peak=101, other=10)
    points = {WRITTEN: point, SQRT: point._replace(time=1.3, other=5), EVERY: point._replace(time=1.4, other=6)}
    candidates = [Candidate("checkpoint", knobs) for knobs in (SQRT, EVERY)]
    assert [one.knobs for one in worth_combining(candidates, points)] == [SQRT]


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
