"""Recorded runs of other people's models: every request, peak and segment, and where possible every address."""

import functools

import pytest

from memexplore.analysis import curves
from memexplore.tape import Action, Tape
from tests.fidelity import compared, recorded
from tests.fidelity.recorded_models import LATE, RECORDED

BY_NAME = {case.name: case for case in [*RECORDED, LATE]}
PLACED = [name for name in BY_NAME if BY_NAME[name] is not LATE]
COMPLETE = [name for name in PLACED if name.startswith("small-lm")]
"""Recorded from the first allocation on."""


@functools.cache
def tapes(name: str) -> tuple[Tape, Tape]:
    """A recording as predicted and as measured."""
    return recorded.predicted(BY_NAME[name]), recorded.measured(BY_NAME[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_recorded_run_makes_the_same_requests_in_the_same_order(name):
    ours, theirs = tapes(name)
    if name == "conv3d-train-a":
        ours = compared.without_estimates(ours)
    unordered = compared.freed_by_autocast(theirs)
    mine, wanted = recorded.requests(ours), recorded.requests(theirs)
    assert len(mine) == len(wanted)
    assert compared.with_runs_sorted(mine, unordered) == compared.with_runs_sorted(wanted, unordered)


@pytest.mark.parametrize("name", BY_NAME)
def test_recorded_run_has_the_same_peak_requested(name):
    ours, theirs = tapes(name)
    assert curves.peak(ours, "requested")[0] == curves.peak(theirs, "requested")[0]


@pytest.mark.parametrize("name", PLACED)
def test_recorded_run_has_the_same_peaks_allocated_and_reserved(name):
    ours, theirs = tapes(name)
    for curve in ("allocated", "reserved"):
        assert curves.peak(ours, curve)[0] == curves.peak(theirs, curve)[0]


@pytest.mark.parametrize("name", PLACED)
def test_recorded_run_allocates_and_frees_the_same_segments_in_the_same_order(name):
    ours, theirs = tapes(name)
    assert compared.segments(ours) == compared.segments(theirs)


@pytest.mark.parametrize("name", COMPLETE)
def test_with_the_recorded_segment_addresses_every_block_has_its_recorded_address(name):
    ours, theirs = tapes(name)
    ours_at, theirs_at = (tape.address[tape.action == Action.ALLOC].tolist() for tape in (ours, theirs))
    assert ours_at == theirs_at
