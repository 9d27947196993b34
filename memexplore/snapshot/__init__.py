"""Read PyTorch's memory snapshots as Tapes without running code from them, verify them, and write Tapes as snapshots.

- `unpickle`, with `events` and `plain`: a pickle of plain data; every class is refused.
- `recorded`: the fields of a snapshot as columns, one `Recorded` a device.
- `history`: from a `Recorded` to a Tape, with the state before the first event.
- `stacks`, `imported`: facts about stacks; steps, phases and categories inferred from them.
- `verify`: a recorded device replayed and compared with the allocator model.
- `write`: a Tape as a snapshot.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from memexplore.analysis.segments import segments_at_end
from memexplore.snapshot.history import first_time, initial_row_count, tape_of
from memexplore.snapshot.recorded import Recorded, read, unreadable
from memexplore.snapshot.verify import verify_device
from memexplore.snapshot.write import as_snapshot, device_number, layout, save_snapshot
from memexplore.tape import Tape
from memexplore.text.result_files import PARQUET, TAPE

__all__ = [
    "as_snapshot",
    "event_count",
    "layout",
    "load",
    "load_with_clock",
    "read",
    "save_snapshot",
    "segment_count",
    "verify",
]

_Result = TypeVar("_Result")
_TAPES = (*TAPE.starts, *PARQUET.starts)


def load(path: str | os.PathLike[str]) -> dict[int, Tape]:
    """Load a PyTorch snapshot, plain or gzip, or a tape that `Tape.save` wrote, and return its tapes by device.

    Raises ValueError with one sentence if the file is neither or is damaged. A file that refers to code is refused, and
    nothing of it runs.
    """
    return {device: tape for device, (tape, _) in load_with_clock(path).items()}


def load_with_clock(path: str | os.PathLike[str]) -> dict[int, tuple[Tape, int | None]]:
    """Load a file as `load` does; beside each tape when its first event was, in microseconds since 1970.

    None where the file has no clock. Raises ValueError as `load` does.
    """
    with open(path, "rb") as file:
        start = file.read(max(map(len, _TAPES)))
    if start.startswith(_TAPES):
        tape = Tape.load(path)
        return {device_number(tape): (tape, None)}
    tapes = {recorded.device: (_with_path(path, tape_of, recorded), first_time(recorded)) for recorded in read(path)}
    _return_free_memory()
    return tapes


def verify(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Replay a snapshot file and count the events that the allocator model reproduces, device by device.

    Each of `devices` has `device`, `alloc_addresses`, `segment_allocs`, `segment_frees`, `segment_maps`,
    `segment_unmaps` and `final_blocks` as `[as recorded, all]`, `peak_allocated` and `peak_reserved` in bytes, and
    `history` (`complete`, `late` or `none`).

    Raises ValueError as `load` does.
    """
    return {"devices": [_with_path(path, verify_device, recorded) for recorded in read(path)]}


def _return_free_memory() -> None:
    """Return freed memory to the system: glibc keeps it otherwise, four times the tape for a million events."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError, OSError):  # other C libraries lack malloc_trim
            ctypes.CDLL(None).malloc_trim(0)


def _with_path(path: str | os.PathLike[str], function: Callable[[Recorded], _Result], recorded: Recorded) -> _Result:
    """Call a function with a recorded device; its errors become a ValueError that names the file."""
    try:
        return function(recorded)
    except Exception as error:
        raise unreadable(os.fspath(path), error) from error


def event_count(tape: Tape) -> int:
    """Return the number of a tape's events, without the rows that describe the state before the first of them."""
    return len(tape) - initial_row_count(tape)


def segment_count(tape: Tape) -> int:
    """Return the number of segments at the end of a tape; a mapped run of an expandable segment counts as one."""
    return len(segments_at_end(tape))
