"""How far a prediction may be off: by cuDNN's workspaces, which are estimates, and by what nobody has measured.

A tape of the virtual GPU says of each convolution what its workspace is under a few assumptions (`Tape.workspaces`).
Replays with each of them give other peaks and other needs, and the lowest and the highest are the range. What a run
needs differs less than what it reserves where there is room: a convolution runs without a workspace that does not fit.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator.actions import SEGMENT_ACTIONS
from memexplore.allocator.replay import trial
from memexplore.analysis.curves import cached_by_tape
from memexplore.analysis.need import smallest
from memexplore.tape import Action, Category, Source, Tape
from memexplore.tape.allocator_settings import Settings

BESIDE_RANGE = 0.02
"""Share by which a range is widened at both ends (docs/accuracy.md)."""
WITHOUT_RANGE = 0.08
"""Share by which a prediction with cuDNN is off at most where the workspaces have no range (docs/accuracy.md)."""
_OPS_OF_CUDNN = ("conv", "cudnn", "rnn", "lstm", "gru")
_RECURRENT = ("rnn", "lstm", "gru")
_OF_A_WORKSPACE = 3
"""Rows of a workspace: its request, and the two of its free, as nothing else happens meanwhile."""


class Range(NamedTuple):
    """The lowest and the highest number of bytes that are to be expected."""

    low: int
    high: int


def need_range(tape: Tape, needed: int) -> Range:
    """Return the range of the bytes that a whole run needs, of which `needed` are predicted.

    >>> from memexplore.tape import Meta
    >>> rows = {"size": [1 << 20], "category": [Category.WORKSPACE], "op": [0]}
    >>> tape = Tape.from_columns(rows, ops=["aten::_cudnn_rnn"], meta=Meta(Source.PREDICTED, "Tesla T4"))
    >>> need_range(tape, 100), need_range(tape.replace(meta=Meta(Source.MEASURED, "cuda:0")), 100)
    (Range(low=92, high=108), Range(low=100, high=100))
    """
    return _widened(tape, (needed, *_other_needs(tape)) if _is_estimate(tape) else (needed,))


def reserved_range(tape: Tape) -> Range:
    """Return the range of the peak reserved by a whole run where there is room.

    It is wider than that of what the run needs, as then every workspace fits.
    """
    return _widened(tape, reserved_under_assumptions(tape))


def _is_estimate(tape: Tape) -> bool:
    """Return whether a tape is a prediction with ops of cuDNN."""
    names = [name.lower() for name in tape.ops]
    return tape.meta.source is Source.PREDICTED and any(part in name for name in names for part in _OPS_OF_CUDNN)


def _widened(tape: Tape, sizes: tuple[int, ...]) -> Range:
    if not _is_estimate(tape):
        return Range(sizes[0], sizes[0])
    of_workspaces = np.unique(tape.op[(tape.category == Category.WORKSPACE) & (tape.op >= 0)])
    names = [tape.ops[op].lower() for op in of_workspaces.tolist()]
    has_unknown = any(part in name for name in names for part in (_RECURRENT if tape.workspaces else _OPS_OF_CUDNN))
    beside = WITHOUT_RANGE if has_unknown else BESIDE_RANGE
    return Range(round(min(sizes) * (1 - beside)), round(max(sizes) * (1 + beside)))


@cached_by_tape
def _other_needs(tape: Tape) -> tuple[int, ...]:
    """Return what a run needs under each assumption but the first, that all is as predicted."""
    return tuple(smallest(under_assumption(tape, number)).smallest for number in range(1, _assumptions(tape)))


def _assumptions(tape: Tape) -> int:
    """Return how many assumptions a tape knows, 1 if it knows only what it has."""
    return max(map(len, tape.workspaces), default=1)


@cached_by_tape
def reserved_under_assumptions(tape: Tape) -> tuple[int, ...]:
    """Return the peaks reserved, where there is room, under each assumption on the workspaces; the tape's own is first.

    >>> from memexplore.tape import Meta
    >>> rows = {"size": [30 << 20], "address": [1], "workspace": [0]}
    >>> meta = Meta(Source.PREDICTED, "H100")
    >>> reserved_under_assumptions(Tape.from_columns(rows, workspaces=[(0, 10 << 20)], meta=meta))
    (31457280, 41943040)

    Raises ValueError if a row frees an address without a block.
    """
    own = Settings.parse(tape.meta.settings)
    unlimited = dataclasses.replace(own, per_process_memory_fraction=1.0, throw_on_cudamalloc_oom=False)
    replays = (trial(under_assumption(tape, number), unlimited, None) for number in range(_assumptions(tape)))
    return tuple(replay.reserved for replay in replays)


def under_assumption(tape: Tape, number: int) -> Tape:
    """Return the requests of a tape with the workspaces of one of the assumptions.

    >>> from memexplore.tape import Meta
    >>> rows = {"size": [512], "address": [1], "workspace": [0]}
    >>> tape = Tape.from_columns(rows, workspaces=[(0, 1024)], meta=Meta(Source.PREDICTED, "H100"))
    >>> under_assumption(tape, 1).size.tolist()
    [512, 1024, 1024, 1024]
    """
    tape = tape[~np.isin(tape.action, SEGMENT_ACTIONS)]
    rows = np.flatnonzero((tape.workspace >= 0) & (tape.action == Action.ALLOC))
    possible = np.array([sizes[number if number < len(sizes) else 0] for sizes in tape.workspaces], dtype=np.int64)
    wanted = possible[tape.workspace[rows]]
    has_one = _has_workspace(tape, rows)
    own = rows[has_one][:, None] + np.arange(1, _OF_A_WORKSPACE + 1)
    size = tape.size.copy()
    size[own] = wanted[has_one][:, None]
    counts = np.ones(len(tape), dtype=np.int64)
    counts[own[wanted[has_one] == 0]] = 0
    added = ~has_one & (wanted > 0)
    counts[rows[added]] += _OF_A_WORKSPACE
    source = np.repeat(np.arange(len(tape)), counts)
    result = tape.replace(size=size)[source].without_workspaces()
    return _with_added(result, np.cumsum(counts)[rows[added]] - _OF_A_WORKSPACE, wanted[added])


def _has_workspace(tape: Tape, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether the workspace of the request in a row was requested behind it."""
    after = np.minimum(rows + 1, len(tape) - 1)
    is_next = (tape.action[after] == Action.ALLOC) & (tape.category[after] == Category.WORKSPACE)
    return is_next & (tape.op[after] == tape.op[rows]) & (rows + _OF_A_WORKSPACE < len(tape))


def _with_added(tape: Tape, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> Tape:
    """Make workspaces of copied rows, which begin at `starts`."""
    rows = starts[:, None] + np.arange(_OF_A_WORKSPACE)
    size, address, action, category = (getattr(tape, name).copy() for name in ("size", "address", "action", "category"))
    size[rows] = sizes[:, None]
    # Addresses tell blocks apart and nothing else: a replay places them.
    address[rows] = (tape.address.max(initial=0) + 1 + np.arange(len(starts)))[:, None]
    action[rows] = (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
    category[rows] = Category.WORKSPACE
    return tape.replace(size=size, address=address, action=action, category=category)
