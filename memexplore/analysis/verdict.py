"""Decide whether a recorded program fits, and find the out-of-memory errors that it caught.

Everything that says whether a run fits calls `verdict` or `failed_request`; `verdict_content` puts it into words.
"""

from __future__ import annotations

import enum

import numpy as np

from memexplore.analysis.curves import peak
from memexplore.analysis.location import location_text, where
from memexplore.analysis.places import place
from memexplore.tape import Action, Ending, Tape
from memexplore.text.units import size_text

_SHOWN = 5
"""Caught errors that `caught_text` lists one by one."""


class Verdict(enum.StrEnum):
    """Verdict on a run; the values are those of ``memexplore run --json``."""

    FITS = "fits"
    OOM = "oom"
    ERROR = "error"
    INTERRUPTED = "interrupted"
    NOT_ON_GPU = "not on gpu"
    """The program came to its end without the GPU, so its memory on a GPU is not known."""
    PARTLY_MEASURED = "partly measured"
    """Child processes of the program were not measured, so its memory on a GPU is not known."""


def failed_request(tape: Tape) -> int:
    """Return the row of the request that ended the program; -1 if no request did.

    A program that catches the error and allocates nothing afterwards has given up: that request ended it too. A
    snapshot file does not say how its program ended: there the last request that failed is the result.

    >>> from memexplore.tape import Meta, Source
    >>> columns = {"action": [Action.ALLOC, Action.OOM], "address": [0, -1], "size": [1024, 4096]}
    >>> failed_request(Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "Tesla T4")))
    1
    >>> columns = {"action": [Action.OOM, Action.ALLOC], "address": [-1, 0], "size": [4096, 1024]}
    >>> failed_request(Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "Tesla T4", ending=Ending.COMPLETED)))
    -1
    """
    rows = np.flatnonzero(tape.action == Action.OOM)
    if not len(rows) or tape.meta.ending in (Ending.ERROR, Ending.INTERRUPTED):
        return -1
    last = int(rows[-1])
    went_on = tape.meta.ending is Ending.COMPLETED and np.any(tape.action[last:] == Action.ALLOC)
    return -1 if went_on else last


def caught_requests(tape: Tape) -> list[int]:
    """Return the rows of the requests that failed, after which the program went on.

    >>> from memexplore.tape import Meta, Source
    >>> columns = {"action": [Action.OOM, Action.ALLOC], "address": [-1, 0], "size": [4096, 1024]}
    >>> caught_requests(Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "Tesla T4", ending=Ending.COMPLETED)))
    [0]
    """
    if tape.meta.ending is Ending.UNKNOWN:
        return []
    rows: list[int] = np.flatnonzero(tape.action == Action.OOM).tolist()
    return rows[:-1] if failed_request(tape) >= 0 else rows


def verdict(tape: Tape) -> Verdict:
    """Return the verdict on a run.

    >>> from memexplore.tape import Meta, Source
    >>> meta = Meta(Source.PREDICTED, "Tesla T4", capacity=1 << 30, ending=Ending.COMPLETED)
    >>> tape = Tape.from_columns({"address": [0], "size": [1024]}, meta=meta)
    >>> verdict(tape).value, verdict(tape[:0]).value
    ('fits', 'not on gpu')

    Raises ValueError for a tape that is not placed.
    """
    meta = tape.meta
    if failed_request(tape) >= 0:
        return Verdict.OOM
    if meta.ending in (Ending.ERROR, Ending.OUT_OF_MEMORY):
        # An out-of-memory error without a request of the tape: of another device, or raised by the program.
        return Verdict.ERROR
    if meta.ending is Ending.INTERRUPTED:
        return Verdict.INTERRUPTED
    if meta.unmeasured:
        return Verdict.PARTLY_MEASURED
    if meta.ending is Ending.COMPLETED and meta.capacity is not None and (meta.trained_on_cpu or not peak(tape)[0]):
        return Verdict.NOT_ON_GPU
    return Verdict.FITS


def stop_text(tape: Tape) -> str:
    """Return where a program ran out of memory, with the op and the bytes that it requested; empty if it did not.

    >>> from memexplore.tape import Meta, Phase, Source
    >>> columns = {"action": [Action.OOM], "size": [4096], "op": [0], "step": [2], "phase": [Phase.BACKWARD]}
    >>> stop_text(Tape.from_columns(columns, ops=["aten::mm"], meta=Meta(Source.PREDICTED, "Tesla T4")))
    'in step 2, backward (aten::mm, 4.00 KiB)'
    """
    row = failed_request(tape)
    if row < 0:
        return ""
    location, op, request = location_text(tape, row), where(tape, row)["op"], size_text(int(tape.size[row]))
    return (f"in {location} " if location else "") + (f"({op}, {request})" if op else f"({request})")


def caught_text(tape: Tape) -> str:
    """Return the out-of-memory errors after which the program went on as one sentence; empty if there are none.

    >>> from memexplore.tape import Meta, Source
    >>> columns = {"action": [Action.OOM, Action.ALLOC], "address": [-1, 0], "size": [4096, 1024],
    ...            "op": [0, -1], "step": [1, 1]}
    >>> meta = Meta(Source.PREDICTED, "Tesla T4", ending=Ending.COMPLETED)
    >>> caught_text(Tape.from_columns(columns, ops=["aten::mm"], meta=meta))
    'The program went on after 1 out-of-memory error: step 1, aten::mm requested 4.00 KiB.'
    """
    rows = caught_requests(tape)
    if not rows:
        return ""
    texts = []
    for row in rows[:_SHOWN]:
        request = where(tape, row)
        parts = [location_text(tape, row), f"{request['op'] or 'a request'} requested {size_text(int(tape.size[row]))}"]
        texts.append(", ".join(filter(None, parts)) + (f" at {place(request['line']).text}" if request["line"] else ""))
    if len(rows) > _SHOWN:
        texts.append(f"and {len(rows) - _SHOWN} more")
    errors = "1 out-of-memory error" if len(rows) == 1 else f"{len(rows)} out-of-memory errors"
    return f"The program went on after {errors}: {'; '.join(texts)}."
