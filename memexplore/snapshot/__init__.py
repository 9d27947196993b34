"""PyTorch's memory snapshots: read as Tapes without running anything in them, checked against the model, written."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from memexplore.analysis.segments import segments_at_end
from memexplore.snapshot.history import initial_row_count, tape_of
from memexplore.snapshot.recorded import Recorded, read, sentence
from memexplore.snapshot.verify import verify_device
from memexplore.snapshot.write import as_snapshot, layout, save_snapshot
from memexplore.tape import Tape

__all__ = ["as_snapshot", "event_count", "layout", "load", "read", "save_snapshot", "segment_count", "verify"]

_Result = TypeVar("_Result")
_PARQUET = b"PAR1"


def load(path: str | os.PathLike[str]) -> dict[int, Tape]:
    """The tapes of a file by device: a PyTorch snapshot, plain or gzip, or a tape that `Tape.save` wrote.

    Raises ValueError with one sentence where the file is neither or is damaged; a file that asks for code is refused
    and nothing of it runs.
    """
    with open(path, "rb") as file:
        start = file.read(len(_PARQUET))
    if start == _PARQUET:
        tape = Tape.load(path)
        number = tape.meta.device.rpartition(":")[2]
        return {int(number) if number.isdigit() else 0: tape}
    tapes = {recorded.device: _named(path, tape_of, recorded) for recorded in read(path)}
    _give_back()
    return tapes


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the allocator model reproduces of a snapshot file, device by device.

    Each of `devices` has `device`, `alloc_addresses`, `segment_allocs`, `segment_frees`, `segment_maps`,
    `segment_unmaps` and `final_blocks` as `[as recorded, all]`, `peak_allocated` and `peak_reserved` in bytes, and
    `history` (`complete`, `late` or `none`).

    Raises ValueError as `load` does.
    """
    return {"devices": [_named(path, verify_device, recorded) for recorded in read(path)]}


def _give_back() -> None:
    """Let the system have what reading took: glibc keeps it otherwise, four times the tape for a million events."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # there are other C libraries
            ctypes.CDLL(None).malloc_trim(0)


def _named(path: str | os.PathLike[str], function: Callable[[Recorded], _Result], recorded: Recorded) -> _Result:
    """What a function makes of a recorded device; an error tells the file."""
    try:
        return function(recorded)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{os.fspath(path)} is no snapshot that memexplore can read: {sentence(error)}") from error


def event_count(tape: Tape) -> int:
    """The number of a tape's rows that happened, without those that tell what was there before."""
    return len(tape) - initial_row_count(tape)


def segment_count(tape: Tape) -> int:
    """The number of segments at the end of a tape; a mapped run of an expandable segment counts as one."""
    return len(segments_at_end(tape))
