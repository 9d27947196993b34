"""Recorded runs of other people's models: every request, peak and segment, and where it can be told, every address."""

import functools
import itertools
import os

import numpy as np
import pytest

from memexplore import curves
from memexplore.snapshot.history import events_before
from memexplore.tape import Action, Category, Tape
from tests.fidelity import cases, recorded
from tests.fidelity.recorded_models import LATE, RECORDED

pytestmark = pytest.mark.skipif(
    not cases.PUBLISHED.exists() and not os.environ.get("CI"), reason="../shared/recordings is not beside this checkout"
)
BY_NAME = {case.file.partition(".")[0]: case for case in [*RECORDED, LATE]}
PLACED = [name for name in BY_NAME if BY_NAME[name] is not LATE]
COMPLETE = [name for name in PLACED if name.startswith("small-lm")]
"""Recorded from the first allocation on."""


@functools.cache
def tapes(name: str) -> tuple[Tape, Tape]:
    """A recording as predicted and as measured."""
    return recorded.predicted(BY_NAME[name]), recorded.measured(BY_NAME[name])


def without_estimates(tape: Tape) -> Tape:
    """A predicted tape without the workspaces of convolutions, of which the measured run took none."""
    of_convolution = [number for number, op in enumerate(tape.ops) if "convolution" in op]
    drop = (tape.action == Action.ALLOC) & (tape.category == Category.WORKSPACE) & np.isin(tape.op, of_convolution)
    for row in np.flatnonzero(drop):
        later = np.flatnonzero((tape.address == tape.address[row]) & (tape.action == Action.FREE_REQUESTED))
        drop[later[later > row][0]] = True
    rows = np.flatnonzero(~drop)
    return Tape.from_columns(
        {name: getattr(tape, name)[rows] for name in ("action", "address", "size")}, meta=tape.meta
    )


def emptied(tape: Tape) -> list[bool]:
    """Of every request, whether it is a cast weight given back at the end of autocast, as a measured stack tells.

    The cache of cast weights is a hash table keyed by addresses: in which order it is emptied is nobody's to predict.
    """
    rows = np.flatnonzero((tape.action == Action.ALLOC) | (tape.action == Action.FREE_REQUESTED))
    innermost = [tape.stacks[tape.stack[row]][0].filename if tape.stack[row] >= 0 else "" for row in rows]
    return [name.endswith("autocast_mode.py") for name in innermost]


def runs(requests: list[int], unordered: list[bool]) -> list[list[int]]:
    """The requests, those of unknown order sorted, run by run."""
    found = []
    for (any_order, _), pairs in itertools.groupby(
        zip(unordered, requests, strict=True), lambda pair: (pair[0], pair[0] or None)
    ):
        each = [request for _, request in pairs]
        found.append(sorted(each) if any_order else each)
    return found


@pytest.mark.parametrize("name", BY_NAME)
def test_recorded_run_makes_the_same_requests_in_the_same_order(name):
    ours, theirs = tapes(name)
    if name == "conv3d-train-a":
        ours = without_estimates(ours)
    unordered = emptied(theirs)
    mine, wanted = recorded.requests(ours), recorded.requests(theirs)
    assert len(mine) == len(wanted)
    assert runs(mine, unordered) == runs(wanted, unordered)


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
def test_recorded_run_takes_and_gives_back_the_same_segments_in_the_same_order(name):
    ours, theirs = tapes(name)
    assert _segments(ours) == _segments(theirs)


def _segments(tape: Tape) -> list[tuple[int, int]]:
    inside = tape[slice(events_before(tape), len(tape))]
    rows = np.flatnonzero((inside.action == Action.SEGMENT_ALLOC) | (inside.action == Action.SEGMENT_FREE))
    return list(zip(inside.action[rows].tolist(), inside.size[rows].tolist(), strict=True))


@pytest.mark.parametrize("name", COMPLETE)
def test_told_where_the_segments_lie_every_block_is_at_its_recorded_address(name):
    ours, theirs = tapes(name)
    ours_at, theirs_at = (tape.address[tape.action == Action.ALLOC].tolist() for tape in (ours, theirs))
    assert ours_at == theirs_at
