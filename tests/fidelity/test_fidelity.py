"""Every published row to its printed digit, and the recorded runs request by request."""

import pytest

from memexplore.analysis import curves
from tests.fidelity import cases, recorded, recorded_training

RECORDED = [*recorded.RECORDED, *recorded_training.RECORDED]


@pytest.mark.parametrize("case", list(cases.published()), ids=lambda case: case.name)
def test_published_peak_is_predicted_to_its_printed_digit(case):
    if case.name in cases.CAUSES:
        pytest.xfail(cases.CAUSES[case.name])
    assert case.predicted() == case.measured


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.name)
def test_recorded_run_makes_the_same_requests_in_the_same_order(case):
    ours = recorded.without_hash_order(recorded.requests(recorded.predicted(case)))
    theirs = recorded.without_hash_order(recorded.requests(recorded.measured(case)))
    first = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    assert first is None, f"request {first}: predicted {ours[first]}, measured {theirs[first]}"
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.name)
def test_recorded_run_has_the_same_peak_to_the_byte(case):
    ours, theirs = recorded.predicted(case), recorded.measured(case)
    expected = curves.peak(theirs)[0] + case.absorbed_before
    assert curves.peak(ours)[0] == expected
    with recorded.virtual_gpu(case):
        assert recorded.peak(case) == expected
