"""Every published row to its printed digit, and the recorded runs request by request."""

import functools

import pytest

from memexplore.analysis import curves
from memexplore.tape import Tape
from tests.fidelity import cases, recorded, recorded_training

RECORDED = {case.name: case for case in [*recorded.RECORDED, *recorded_training.RECORDED]}


@functools.cache
def tapes(name: str) -> tuple[Tape, Tape]:
    """A recording as predicted and as measured."""
    return recorded.predicted(RECORDED[name]), recorded.measured(RECORDED[name])


@pytest.mark.parametrize("case", list(cases.published()), ids=lambda case: case.name)
def test_published_peak_is_predicted_to_its_printed_digit(case):
    if case.name in cases.CAUSES:
        pytest.xfail(cases.CAUSES[case.name])
    assert case.predicted() == case.measured


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_run_makes_the_same_requests_in_the_same_order(name):
    ours, theirs = (recorded.without_hash_order(recorded.requests(tape)) for tape in tapes(name))
    first = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    assert first is None, f"request {first}: predicted {ours[first]}, measured {theirs[first]}"
    assert len(ours) == len(theirs)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_run_has_the_same_peak_to_the_byte(name):
    case, (ours, theirs) = RECORDED[name], tapes(name)
    expected = curves.peak(theirs)[0] + case.absorbed_before
    assert curves.peak(ours)[0] == expected
    with recorded.virtual_gpu(case):
        assert recorded.peak(case) == expected
