"""Summarize a Tape: the object of ``memexplore run --json``."""

from __future__ import annotations

from typing import Any

import numpy as np

from memexplore.analysis.curves import category_bytes, peak
from memexplore.analysis.error_range import need_range, reserved_range
from memexplore.analysis.growth import leak
from memexplore.analysis.location import where
from memexplore.analysis.need import need, need_with_expandable_segments
from memexplore.analysis.rank import nccl_object
from memexplore.analysis.verdict import Verdict, caught_requests, failed_request, verdict
from memexplore.tape import Category, Tape


def summary(tape: Tape) -> dict[str, Any]:
    """Return the object of ``memexplore run --json``; sizes in bytes.

    Keys `source`, `gpu`, `capacity` (None on a CPU), `capacity_without_limit` (None unless the process has a limit
    below it), `outcome` (a `Verdict`), `error` (what ended the program, or
    None), `peak_requested`, `peak_allocated`, `peak_reserved`, `steps` (training steps that began), `at_peak` with
    `step`, `phase`, `layer`, `op`, `line` of the row that reaches the peak allocated and `by_category`, allocated bytes
    by category, which sum to the peak; `failed_request`, the request that ended the program out of memory, or None, and
    `caught_requests`, a list of those after which the program went on, each with `requested` and its location;
    `growth`, None unless memory grows to the last period, with `period` ("step", or "iteration" of a loop),
    `bytes_per_period`, `full_at` (the number of a period, or None) and the location of the allocation that grows most;
    `rank` and `world`, the number of processes, or None; `nccl`, None without NCCL, with `low` and `high`, the range of
    its bytes outside the allocator, in no peak, `communicators`, each with `size` and `all_to_all`, and `source`;
    `need`, the memory with which it runs (`smallest`, `with_expandable_segments`, `without_pressure`, `retries` with
    the smallest; the range of the smallest, `low` and `high`, and of `without_pressure`, `reserved_low` and
    `reserved_high`), or None where it is not known; `notes`.

    >>> from memexplore.tape import Meta, Source
    >>> tape = Tape.from_columns({"address": [0], "size": [40]}, meta=Meta(Source.MEASURED, "cpu"))
    >>> summary(tape)["outcome"], summary(tape)["peak_allocated"]
    ('fits', 40)

    Raises ValueError for a tape that is not placed.
    """
    allocated, row = peak(tape)
    shares = category_bytes(tape, row)
    failed = failed_request(tape)
    return {
        "source": tape.meta.source.value,
        "gpu": tape.meta.gpu or tape.meta.device,
        "capacity": tape.meta.capacity,
        "capacity_without_limit": tape.meta.capacity_without_limit,
        "outcome": verdict(tape).value,
        "error": tape.meta.error or None,
        "peak_requested": peak(tape, "requested")[0],
        "peak_allocated": allocated,
        "peak_reserved": peak(tape, "reserved")[0],
        "need": _need(tape),
        "steps": int(np.count_nonzero(np.unique(tape.step) > 0)),
        "at_peak": where(tape, row) | {"by_category": {kind.text: int(shares[kind]) for kind in Category}},
        "failed_request": _request(tape, failed) if failed >= 0 else None,
        "caught_requests": [_request(tape, caught) for caught in caught_requests(tape)],
        "growth": _growth(tape),
        "rank": tape.meta.rank,
        "world": tape.meta.world,
        "nccl": nccl_object(tape),
        "notes": [*filter(None, (tape.meta.unmeasured,)), *tape.meta.notes],
    }


def _need(tape: Tape) -> dict[str, Any] | None:
    required = need(tape) if tape.meta.capacity is not None and verdict(tape) in (Verdict.FITS, Verdict.OOM) else None
    if required is None:
        return None
    whole = tape if tape.whole is None else tape.whole
    expandable = need_with_expandable_segments(whole)
    reserved = reserved_range(whole)
    others = {
        "with_expandable_segments": None if expandable is None else expandable.smallest,
        "reserved_low": reserved.low,
        "reserved_high": reserved.high,
    }
    return required._asdict() | need_range(whole, required.smallest)._asdict() | others


def _growth(tape: Tape) -> dict[str, Any] | None:
    growing = leak(tape)
    if growing is None:
        return None
    facts = {"period": growing.unit, "bytes_per_period": growing.bytes_per_period, "full_at": growing.full_at}
    return facts | where(tape, growing.row)


def _request(tape: Tape, row: int) -> dict[str, Any]:
    return {"requested": int(tape.size[row])} | where(tape, row)
