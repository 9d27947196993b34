"""Choose the tape to draw for a run that did not fit: the whole run as if there were room.

What Python frees after a failed request is no part of the program's memory: drawn, it looks like a backward pass.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import Rows, cached_by_tape, curve, peak
from memexplore.analysis.verdict import failed_request
from memexplore.tape import COLUMNS, Action, Ending, Tape


class Picture(enum.StrEnum):
    """Picture of a run that ended out of memory."""

    WITH_ROOM = "with room"
    """The whole run, as if there were room."""
    AS_IT_HAPPENED = "as it happened"


def with_whole(tape: Tape, unlimited: Tape) -> Tape:
    """Return a tape that ended out of memory together with the tape of the same run on unlimited memory.

    Its `whole` are the rows of `unlimited` with the capacity of the tape's device, and with the failed request as an
    `oom` row before the request that succeeds there. A tape that fits is returned as it is.

    >>> from memexplore.tape import Meta, Source
    >>> meta = Meta(Source.PREDICTED, "8 B GPU", capacity=8, ending=Ending.OUT_OF_MEMORY)
    >>> columns = {"action": [Action.ALLOC, Action.OOM], "address": [0, -1], "size": [5, 6]}
    >>> unlimited = Tape.from_columns({"address": [0, 512, 1024], "size": [5, 6, 7]}, meta=meta)
    >>> whole = with_whole(Tape.from_columns(columns, meta=meta), unlimited).whole
    >>> whole.action.tolist(), whole.size.tolist()
    ([0, 8, 0, 0], [5, 6, 6, 7])
    """
    failed = failed_request(tape)
    if failed < 0:
        return tape
    at = _corresponding(tape, failed, unlimited)
    if at is None:
        return tape
    columns: dict[str, Any] = {
        name: np.insert(getattr(unlimited, name), at, getattr(unlimited, name)[at]) for name in COLUMNS
    }
    columns["action"][at], columns["address"][at], columns["size"][at] = Action.OOM, -1, tape.size[failed]
    columns["time"][at] = unlimited.time[at]
    meta, device = unlimited.meta, tape.meta
    meta = meta._replace(device=device.device, gpu=device.gpu, capacity=device.capacity, total=device.total)
    meta = meta._replace(limit=device.limit, capacity_without_limit=device.capacity_without_limit)
    meta = meta._replace(settings=device.settings, ending=Ending.OUT_OF_MEMORY, error=device.error)
    for column in columns.values():
        column.flags.writeable = False
    return tape.replace(whole=dataclasses.replace(unlimited, **columns, meta=meta))


def has_same_picture(one: Tape, other: Tape) -> bool:
    """Return whether two tapes have the same events, metadata and whole runs, so that they are drawn alike.

    The text of the error does not count: a tape that is expected has none yet.

    >>> from memexplore.tape import Meta, Source
    >>> one = Tape.from_columns({"address": [0], "size": [8]}, meta=Meta(Source.PREDICTED, "T4"))
    >>> has_same_picture(one, one[:]), has_same_picture(one, one.replace(meta=Meta(Source.PREDICTED, "A100")))
    (True, False)
    """
    if one.meta._replace(error=other.meta.error) != other.meta or not one.equals(other):
        return False
    if one.whole is None or other.whole is None:
        return one.whole is other.whole
    return has_same_picture(one.whole, other.whole)


def _corresponding(tape: Tape, failed: int, unlimited: Tape) -> int | None:
    """Return the row of a tape's failed request in the same run on unlimited memory, None if it has no such row."""
    requests = np.flatnonzero(unlimited.action == Action.ALLOC)
    before = np.flatnonzero(tape.action[:failed] == Action.ALLOC)
    if tape.meta.source is not unlimited.meta.source:
        # A measured run and its prediction need not have the same number of requests: only those at the same place of
        # the program and of the nearest size are counted. Without any, the first that has no room stands for it.
        like = requests[_at_place_of(tape, failed, unlimited, requests)]
        if not len(like):
            too_much = requests[curve(unlimited)[requests] > (tape.meta.capacity or math.inf)]
            return int(too_much[0]) if len(too_much) else None
        difference = np.abs(unlimited.size[like] - tape.size[failed])
        like = like[difference == difference.min()]
        before = before[_at_place_of(tape, failed, tape, before) & (tape.size[before] == tape.size[failed])]
        return int(like[min(len(before), len(like) - 1)])
    return int(requests[len(before)]) if len(before) < len(requests) else None


def _at_place_of(tape: Tape, row: int, other: Tape, rows: Rows) -> NDArray[np.bool_]:
    """Return for each of some rows of another tape whether it has the step, phase and layer of a row."""
    layer = tape.modules[tape.module[row]] if tape.module[row] >= 0 else None
    same = np.array([*(name == layer for name in other.modules), layer is None])
    return (other.step[rows] == tape.step[row]) & (other.phase[rows] == tape.phase[row]) & same[other.module[rows]]


class Refused(NamedTuple):
    """The request at which a picture ends; sizes in bytes."""

    allocated: int
    requested: int


def refused(tape: Tape) -> Refused | None:
    """Return the request that ended a tape in its last row, None for other tapes.

    >>> from memexplore.tape import Meta, Source
    >>> columns = {"action": [Action.ALLOC, Action.OOM], "address": [0, -1], "size": [5, 6]}
    >>> refused(Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "8 B GPU")))
    Refused(allocated=512, requested=6)

    Raises ValueError for a tape that is not placed.
    """
    last = len(tape) - 1
    if last < 1 or failed_request(tape) != last:
        return None
    return Refused(int(curve(tape)[last]), int(tape.size[last]))


def picture(tape: Tape) -> Tape:
    """Return the tape to draw: the whole run if it is known, else the run up to the request that ended it.

    >>> from memexplore.tape import Meta, Source
    >>> actions = [Action.ALLOC, Action.OOM, Action.FREE_REQUESTED]
    >>> columns = {"action": actions, "address": [0, -1, 0], "size": [5, 6, 5]}
    >>> tape = Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "8 B GPU", ending=Ending.OUT_OF_MEMORY))
    >>> len(tape), len(picture(tape))
    (3, 2)
    """
    if tape.whole is not None:
        return tape.whole
    part = _until_stop(tape)
    return tape if part is None else part


class Moment(NamedTuple):
    """The moment of a run that is looked at first."""

    row: int
    """-1 on an empty tape."""
    text: str
    """As it stands behind what is shown, such as "at the peak"."""


def first_moment(tape: Tape) -> Moment:
    """Return the request that ended the run of a picture out of memory, else the peak allocated.

    >>> from memexplore.tape import Meta, Source
    >>> columns = {"action": [Action.ALLOC, Action.OOM], "address": [0, -1], "size": [5, 6]}
    >>> first_moment(Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "8 B GPU")))
    Moment(row=1, text='at the failed request')
    """
    failed = failed_request(tape)
    return Moment(failed, "at the failed request") if failed >= 0 else Moment(peak(tape)[1], "at the peak")


# A cache that returned the tape itself would keep it for ever: its entries live as long as their keys.
@cached_by_tape
def _until_stop(tape: Tape) -> Tape | None:
    failed = failed_request(tape)
    return None if failed < 0 or failed == len(tape) - 1 else tape[: failed + 1]
