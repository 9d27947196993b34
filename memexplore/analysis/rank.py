"""Say which rank of several a tape is of, and what NCCL holds beside its peak: for verdicts, pages and JSON objects."""

from __future__ import annotations

from typing import Any

from memexplore.analysis.curves import peak
from memexplore.hardware.outside_allocator import nccl_bytes
from memexplore.tape import Tape
from memexplore.text.units import size_text


def nccl_text(tape: Tape) -> str:
    """Return the memory of NCCL beside the peak, "" for a program without it.

    >>> from memexplore.tape import Communicator, Meta, Source
    >>> meta = Meta(Source.PREDICTED, "H100", communicators=(Communicator(8),))
    >>> nccl_text(Tape.from_columns({"address": [0], "size": [1024]}, meta=meta))
    'plus 688 MiB to 1.60 GiB of NCCL, outside the allocator'
    """
    nccl = nccl_bytes(tape.meta.communicators)
    if nccl is None:
        return ""
    spare = tape.meta.capacity - peak(tape, "reserved")[0] if tape.meta.capacity is not None else nccl.high
    room = ""
    if 0 < spare < nccl.high:
        room = ": more than is left" if spare < nccl.low else ": more than is left at its upper end"
    return f"plus {size_text(nccl.low)} to {size_text(nccl.high)} of NCCL, outside the allocator{room}"


def rank_text(tape: Tape) -> str:
    """Return which of several processes a tape is of, "" for a program of one.

    >>> from memexplore.tape import Meta, Source
    >>> rank_text(Tape.from_columns({}, meta=Meta(Source.PREDICTED, "H100", rank=3, world=8)))
    'rank 3 of 8'
    """
    return "" if tape.meta.rank is None else f"rank {tape.meta.rank} of {tape.meta.world}"


def most_of_nccl(tape: Tape) -> int:
    """Return the highest number of bytes that NCCL may hold, 0 for a program without it."""
    nccl = nccl_bytes(tape.meta.communicators)
    return 0 if nccl is None else nccl.high


def nccl_object(tape: Tape) -> dict[str, Any] | None:
    """Return the range of NCCL's bytes, its communicators and its source for a JSON object, None without NCCL."""
    groups = tape.meta.communicators
    nccl = nccl_bytes(groups)
    return None if nccl is None else nccl._asdict() | {"communicators": [group._asdict() for group in groups]}
