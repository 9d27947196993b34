"""Segments of recorded runs: allocs, frees and, with the recorded segment addresses, every block's address."""

import functools

import pytest

from memexplore import snapshot
from memexplore.analysis import curves
from memexplore.tape import Action, Tape
from tests.fidelity import compared, recorded
from tests.fidelity.recorded_training import RECORDED

BY_NAME = {case.name: case for case in RECORDED}


@functools.cache
def tapes(name: str) -> tuple[Tape, Tape]:
    """A recording as predicted and as measured."""
    return recorded.predicted(BY_NAME[name]), recorded.measured(BY_NAME[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_recorded_run_allocates_and_frees_the_same_segments_in_the_same_order(name):
    ours, theirs = tapes(name)
    assert compared.segments(ours) == compared.segments(theirs)


@pytest.mark.parametrize("name", BY_NAME)
def test_recorded_run_reserves_the_same(name):
    ours, theirs = tapes(name)
    assert curves.peak(ours, "reserved")[0] == curves.peak(theirs, "reserved")[0]
    assert curves.curve(ours, "reserved")[-1] == curves.curve(theirs, "reserved")[-1]


@pytest.mark.parametrize(("name", "allocs"), [("lm-medium-train-seq128", 6526), ("lm-medium-train-seq512", 7591)])
def test_with_the_recorded_segment_addresses_every_block_has_its_recorded_address(name, allocs):
    # Six training steps, the last one recorded. The file alone leaves ten addresses of the second one open: it does
    # not record the sizes of three blocks from before its history.
    ours, theirs = tapes(name)
    ours_at, theirs_at = (tape.address[tape.action == Action.ALLOC].tolist() for tape in (ours, theirs))
    assert ours_at == theirs_at
    assert len(ours_at) == allocs
    assert _layout(ours) == _layout(theirs)


def _layout(tape: Tape) -> list[tuple[int, list[tuple[int, int, int, str]]]]:
    return [
        (
            segment["total_size"],
            [
                tuple(block[key] for key in ("address", "size", "requested_size", "state"))
                for block in segment["blocks"]
            ],
        )
        for segment in snapshot.layout(tape)
    ]
