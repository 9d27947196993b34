"""Comparison of a recording with the same script on the virtual GPU: requests, segments and peaks; as a table."""

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
    """The first position at which two sequences differ; None for the value of a sequence that has ended."""

    number: int
    predicted: object
    measured: object


class Comparison(NamedTuple):
    """The comparison for one recording; pairs are predicted and measured, sizes in bytes."""

    name: str
    torch: str
    requests: int
    """Number of allocs and frees in the recording."""
    request_difference: Difference | None
    """The first request that differs."""
    reordered: int
    """Requests at another position within a run whose order is not predictable."""
    estimated: int
    """Number of blocks left out: estimated workspaces of convolutions that the measured run did not allocate."""
    requested: tuple[int, int]
    allocated: tuple[int, int]
    reserved: tuple[int, int]
    absorbed_before: int
    segment_allocs: int
    segment_frees: int
    segment_difference: Difference | None


PEAKS: tuple[curves.CurveName, ...] = ("requested", "allocated", "reserved")


def difference(ours: Sequence[object], theirs: Sequence[object]) -> Difference | None:
    """Return the first difference of two sequences, None if they are equal.

    >>> difference([1, 2, 3], [1, 4]), difference([1], [1, 5]), difference([1], [1])
    (Difference(number=1, predicted=2, measured=4), Difference(number=1, predicted=None, measured=5), None)
    """
    for number, (predicted, measured) in enumerate(itertools.zip_longest(ours, theirs)):
        if predicted != measured:
            return Difference(number, predicted, measured)
    return None


def freed_by_autocast(tape: Tape) -> list[bool]:
    """Return for every request whether it frees a cast weight at the end of autocast, by its measured stack.

    The cache of cast weights is a hash table keyed by addresses (cached_casts in ATen/autocast_mode.cpp), so the order
    of these frees is not predictable.
    """
    freed = tape.action == Action.FREE_REQUESTED
    rows = np.flatnonzero(((tape.action == Action.ALLOC) | freed) & (tape.size > 0))
    innermost = [tape.stacks[tape.stack[row]][0].filename if tape.stack[row] >= 0 else "" for row in rows]
    return [bool(freed[row]) and name.endswith("autocast_mode.py") for row, name in zip(rows, innermost, strict=True)]


def with_runs_sorted(requests: Sequence[int], unordered: Sequence[bool]) -> list[int]:
    """Return the requests with each run of unordered ones sorted; requests beyond the end of `unordered` are ordered.

    >>> with_runs_sorted([5, -3, -1, -2, 7], [False, True, True, False])
    [5, -3, -1, -2, 7]
    >>> with_runs_sorted([5, -1, -3, -2, 7], [False, True, True, False])
    [5, -3, -1, -2, 7]
    """
    pairs = itertools.zip_longest(unordered[: len(requests)], requests, fillvalue=False)
    result: list[int] = []
    for any_order, run in itertools.groupby(pairs, operator.itemgetter(0)):
        each = [request for _, request in run]
        result += sorted(each) if any_order else each
    return result


def without_estimates(tape: Tape) -> Tape:
    """Return a predicted tape without the workspaces of convolutions."""
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
    """Return action and bytes of every segment allocated or freed during the recording, in order."""
    inside = tape[slice(initial_row_count(tape), len(tape))]
    rows = np.flatnonzero((inside.action == Action.SEGMENT_ALLOC) | (inside.action == Action.SEGMENT_FREE))
    return list(zip(inside.action[rows].tolist(), inside.size[rows].tolist(), strict=True))


def compare(name: str, torch: str, ours: Tape, theirs: Tape, absorbed_before: int = 0) -> Comparison:
    """Compare a predicted tape with the measured one."""
    unordered = freed_by_autocast(theirs)
    predicted, measured = recorded.requests(ours), recorded.requests(theirs)
    estimated = 0
    first = difference(with_runs_sorted(predicted, unordered), with_runs_sorted(measured, unordered))
    if first is not None:
        bare = without_estimates(ours)
        fewer = recorded.requests(bare)
        if difference(with_runs_sorted(fewer, unordered), with_runs_sorted(measured, unordered)) is None:
            first, predicted = None, fewer
            estimated = _allocs(ours) - _allocs(bare)
    of_theirs = segments(theirs)
    return Comparison(
        name,
        torch,
        len(measured),
        first,
        sum(map(operator.ne, predicted, measured)),
        estimated,
        *((curves.peak(ours, name)[0], curves.peak(theirs, name)[0]) for name in PEAKS),
        absorbed_before,
        sum(action == Action.SEGMENT_ALLOC for action, _ in of_theirs),
        sum(action == Action.SEGMENT_FREE for action, _ in of_theirs),
        difference(segments(ours), of_theirs),
    )


def _allocs(tape: Tape) -> int:
    return int(np.count_nonzero(tape.action == Action.ALLOC))


def compare_run(case: RecordedRun) -> Comparison:
    """Compare a recording with its script on the virtual GPU, with recorded segment addresses if it has them."""
    return compare(case.name, case.torch, recorded.predicted(case), recorded.measured(case), case.absorbed_before)


HEADS = ("recording", "torch", "requests", "requests same", "peak allocated", "peak reserved / segments")
LEGEND = """\
Every alloc and free in order with its bytes, both peaks and every segment allocated or freed while recording (allocated
+ freed), of the same script on a virtual GPU. Sizes are the recording's, in bytes; in brackets the difference of the
virtual GPU. Free blocks of equal size are ordered by address: if that decides which block is split, the virtual driver
gives segments their recorded addresses."""
CAUSES = {
    "lm-forward-fp32": "earlier steps left room in segments that the file does not record: its requests can be "
    "compared, but neither addresses nor blocks larger than requested nor reserved memory",
}
"""Recording -> why more than its requests differs."""


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the comparisons as a Markdown table, one line a recording."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for each in comparisons:
        cells = (each.name, each.torch, each.requests, _requests(each), _allocated(each), _reserved(each))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    same = sum(each.request_difference is None for each in comparisons)
    lines.append(
        f"| **all of them** | | {sum(each.requests for each in comparisons)} | {same} of {len(comparisons)} | | |"
    )
    causes = [f"- {each.name}: {CAUSES[each.name]}." for each in comparisons if each.name in CAUSES]
    return "\n".join([*lines, "", LEGEND, *causes])


def _requests(each: Comparison) -> str:
    if each.request_difference is not None:
        return f"first difference at request {each.request_difference.number}: {_sizes(each.request_difference)}"
    text = "all"
    if each.reordered:
        text += f"; {each.reordered} frees of autocast's cache in another order"
    if each.estimated:
        text += f"; workspaces of convolutions left out, which are estimates: {each.estimated}"
    return text


def _sizes(difference: Difference) -> str:
    sides = (("predicted", difference.predicted), ("measured", difference.measured))
    return ", ".join(f"{side} {'none' if value is None else value}" for side, value in sides)


def _allocated(each: Comparison) -> str:
    ours, theirs = each.allocated
    if each.absorbed_before and ours == theirs + each.absorbed_before:
        return f"{theirs} ({ours - theirs:+d}, as the file leaves untold)"
    if ours != theirs and each.requested[0] == each.requested[1]:
        return f"{theirs} ({ours - theirs:+d}; peak requested same)"
    return _pair(each.allocated)


def _pair(pair: tuple[int, int]) -> str:
    ours, theirs = pair
    return f"{theirs} ({'same' if ours == theirs else f'{ours - theirs:+d}'})"


def _reserved(each: Comparison) -> str:
    count = f"{each.segment_allocs} + {each.segment_frees}"
    segments = (
        "same" if each.segment_difference is None else f"first difference at segment {each.segment_difference.number}"
    )
    return f"{_pair(each.reserved)} / {count} ({segments})"
