"""What a recording and the same script on the virtual GPU have in common: every request, segment and peak."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memexplore.analysis import curves
from memexplore.snapshot.history import initial_row_count
from memexplore.tape import Action, Category, Tape
from tests.fidelity import recorded
from tests.fidelity.recorded import RecordedRun


class Difference(NamedTuple):
    """The first place where two sequences are not the same; None where one has ended."""

    number: int
    predicted: object
    measured: object


class Comparison(NamedTuple):
    """What was found for one recording; pairs are predicted and measured, sizes in bytes."""

    name: str
    torch: str
    requests: int
    """Allocs and frees that the recording holds."""
    apart: Difference | None
    """The first request that is not the same."""
    reordered: int
    """Requests at another place within a run whose order is nobody's to predict."""
    estimated: int
    """Blocks left out: estimated workspaces of convolutions, where the measured run took none."""
    requested: tuple[int, int]
    allocated: tuple[int, int]
    reserved: tuple[int, int]
    untold: int
    taken: int
    given_back: int
    segments_apart: Difference | None


PEAKS: tuple[curves.CurveName, ...] = ("requested", "allocated", "reserved")


def difference(ours: Sequence[object], theirs: Sequence[object]) -> Difference | None:
    """The first difference of two sequences, None where they are the same.

    >>> difference([1, 2, 3], [1, 4]), difference([1], [1, 5]), difference([1], [1])
    (Difference(number=1, predicted=2, measured=4), Difference(number=1, predicted=None, measured=5), None)
    """
    for number, (mine, wanted) in enumerate(itertools.zip_longest(ours, theirs)):
        if mine != wanted:
            return Difference(number, mine, wanted)
    return None


def emptied(tape: Tape) -> list[bool]:
    """Of every request, whether it is a cast weight given back at the end of autocast, as a measured stack tells.

    The cache of cast weights is a hash table keyed by addresses (cached_casts in ATen/autocast_mode.cpp): in which
    order it is emptied is nobody's to predict.
    """
    freed = tape.action == Action.FREE_REQUESTED
    rows = np.flatnonzero(((tape.action == Action.ALLOC) | freed) & (tape.size > 0))
    innermost = [tape.stacks[tape.stack[row]][0].filename if tape.stack[row] >= 0 else "" for row in rows]
    return [bool(freed[row]) and name.endswith("autocast_mode.py") for row, name in zip(rows, innermost, strict=True)]


def in_order(requests: Sequence[int], unordered: Sequence[bool]) -> list[int]:
    """The requests, each run of those without an order of their own sorted; what is beyond `unordered` has one.

    >>> in_order([5, -3, -1, -2, 7], [False, True, True, False])
    [5, -3, -1, -2, 7]
    >>> in_order([5, -1, -3, -2, 7], [False, True, True, False])
    [5, -3, -1, -2, 7]
    """
    pairs = itertools.zip_longest(unordered[: len(requests)], requests, fillvalue=False)
    found: list[int] = []
    for any_order, run in itertools.groupby(pairs, operator.itemgetter(0)):
        each = [request for _, request in run]
        found += sorted(each) if any_order else each
    return found


def without_estimates(tape: Tape) -> Tape:
    """A predicted tape without the workspaces of convolutions."""
    of_convolution = [number for number, op in enumerate(tape.ops) if "convolution" in op]
    drop = (tape.action == Action.ALLOC) & (tape.category == Category.WORKSPACE) & np.isin(tape.op, of_convolution)
    for row in np.flatnonzero(drop):
        later = np.flatnonzero((tape.address == tape.address[row]) & (tape.action == Action.FREE_REQUESTED))
        drop[later[later > row][0]] = True
    rows = np.flatnonzero(~drop)
    return Tape.from_columns(
        {name: getattr(tape, name)[rows] for name in ("action", "address", "size")}, meta=tape.meta
    )


def segments(tape: Tape) -> list[tuple[int, int]]:
    """Action and bytes of every segment that was taken or given back while recording, in order."""
    inside = tape[slice(initial_row_count(tape), len(tape))]
    rows = np.flatnonzero((inside.action == Action.SEGMENT_ALLOC) | (inside.action == Action.SEGMENT_FREE))
    return list(zip(inside.action[rows].tolist(), inside.size[rows].tolist(), strict=True))


def compare(name: str, torch: str, ours: Tape, theirs: Tape, untold: int = 0) -> Comparison:
    """A predicted tape beside the measured one."""
    unordered = emptied(theirs)
    mine, wanted = recorded.requests(ours), recorded.requests(theirs)
    estimated = 0
    apart = difference(in_order(mine, unordered), in_order(wanted, unordered))
    if apart is not None:
        bare = without_estimates(ours)
        fewer = recorded.requests(bare)
        if difference(in_order(fewer, unordered), in_order(wanted, unordered)) is None:
            apart, mine = None, fewer
            estimated = _allocs(ours) - _allocs(bare)
    of_theirs = segments(theirs)
    return Comparison(
        name,
        torch,
        len(wanted),
        apart,
        sum(map(operator.ne, mine, wanted)),
        estimated,
        *((curves.peak(ours, name)[0], curves.peak(theirs, name)[0]) for name in PEAKS),
        untold,
        sum(action == Action.SEGMENT_ALLOC for action, _ in of_theirs),
        sum(action == Action.SEGMENT_FREE for action, _ in of_theirs),
        difference(segments(ours), of_theirs),
    )


def _allocs(tape: Tape) -> int:
    return int(np.count_nonzero(tape.action == Action.ALLOC))


def met(case: RecordedRun) -> Comparison:
    """A recording beside its script on the virtual GPU, told where the driver put each segment where the case says."""
    return compare(case.name, case.torch, recorded.predicted(case), recorded.measured(case), case.untold)


HEADS = ("recording", "torch", "requests", "requests same", "peak allocated", "peak reserved / segments")
LEGEND = """\
Every alloc and free in order with its bytes, both peaks and every segment taken or given back while recording (taken +
given back), of the same script on a virtual GPU. Sizes are the recording's, in bytes, and what the virtual GPU differs
by. Free blocks of one size are taken by address: where that decides what is split, the virtual driver puts its segments
where the recorded one did."""
KNOWN = {
    "lm-forward-fp32": "earlier steps left room in segments that the file does not tell: its requests can be compared, "
    "not where they lie, so neither blocks that are larger than asked for nor what is reserved",
}
"""Recording -> why more than its requests is not the same."""


def markdown(found: Sequence[Comparison]) -> str:
    """The table of what was found, one line a recording."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for each in found:
        cells = (each.name, each.torch, each.requests, _requests(each), _allocated(each), _reserved(each))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    same = sum(each.apart is None for each in found)
    lines.append(f"| **all of them** | | {sum(each.requests for each in found)} | {same} of {len(found)} | | |")
    known = [f"- {each.name}: {KNOWN[each.name]}." for each in found if each.name in KNOWN]
    return "\n".join([*lines, "", LEGEND, *known])


def _requests(each: Comparison) -> str:
    if each.apart is not None:
        return f"first difference at request {each.apart.number}: {_sizes(each.apart)}"
    said = "all"
    if each.reordered:
        said += f"; {each.reordered} frees of autocast's cache in another order"
    if each.estimated:
        said += f"; workspaces of convolutions left out, which are estimates: {each.estimated}"
    return said


def _sizes(apart: Difference) -> str:
    sides = (("predicted", apart.predicted), ("measured", apart.measured))
    return ", ".join(f"{side} {'none' if value is None else value}" for side, value in sides)


def _allocated(each: Comparison) -> str:
    ours, theirs = each.allocated
    if each.untold and ours == theirs + each.untold:
        return f"{theirs} ({ours - theirs:+d}, as the file leaves untold)"
    if ours != theirs and each.requested[0] == each.requested[1]:
        return f"{theirs} ({ours - theirs:+d}; peak requested same)"
    return _pair(each.allocated)


def _pair(pair: tuple[int, int]) -> str:
    ours, theirs = pair
    return f"{theirs} ({'same' if ours == theirs else f'{ours - theirs:+d}'})"


def _reserved(each: Comparison) -> str:
    count = f"{each.taken} + {each.given_back}"
    apart = "same" if each.segments_apart is None else f"first difference at segment {each.segments_apart.number}"
    return f"{_pair(each.reserved)} / {count} ({apart})"
