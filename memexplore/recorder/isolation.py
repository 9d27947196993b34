"""Isolate a run on a shared GPU: give it segments of its own, and drop the blocks of other code from its history."""

from __future__ import annotations

import contextlib
import enum
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from memexplore import snapshot
from memexplore.allocator.actions import GROWTH
from memexplore.analysis.curves import lifetimes
from memexplore.tape import Action, Tape
from memexplore.tape.allocator_settings import SMALL
from memexplore.torch_internals.cuda import clear_cublas_workspaces

_RELEASED = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


class Unrelated(enum.Enum):
    """Whether a tape keeps tensors of a GPU that are older than the recording and not used by the recorded code."""

    KEPT = "kept"
    DROPPED = "dropped"


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Run the block on a device in the state of a fresh process, except for the tensors that are alive.

    On a GPU the caching allocator releases its free segments, cuBLAS its workspaces, and every gap between living
    tensors is filled. So the block gets segments of its own and releases them all at its end.
    """
    gc.collect()
    if device.type == "cpu":
        yield
        return
    _release_cached(device)
    fillers = _fill_gaps(device)
    try:
        yield
    finally:
        fillers.clear()
        gc.collect()
        _release_cached(device)


def _release_cached(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    # None in a build of torch for the CPU, where the GPU is a virtual one.
    if clear_cublas_workspaces is not None:
        clear_cublas_workspaces()
    torch.cuda.empty_cache()


def _fill_gaps(device: torch.device) -> list[torch.Tensor]:
    """Return tensors that fill all free blocks that requests on the current stream could get."""
    fillers: list[torch.Tensor] = []
    # Requests up to 1 MiB go to small segments, whose free blocks may be larger: these are filled in pieces first.
    for small, size in _gaps(device):
        if small and size > SMALL:
            _fill(device, SMALL, fillers)
    # The smallest gap goes to a request of exactly its size.
    for small, size in sorted(_gaps(device), key=lambda gap: gap[1]):
        if small or size > SMALL:
            _fill(device, size, fillers)
    torch.cuda.empty_cache()
    return fillers


def _gaps(device: torch.device) -> list[tuple[bool, int]]:
    """Return for each free block whether its segment is small, and its size in bytes."""
    stream = torch.cuda.current_stream(device).cuda_stream
    return [
        (segment["segment_type"] == "small", block["size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == (device.index or 0)
        and segment["stream"] == stream
        and tuple(segment["segment_pool_id"]) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]


def _fill(device: torch.device, size: int, fillers: list[torch.Tensor]) -> None:
    before = torch.cuda.memory_reserved(device)
    with contextlib.suppress(torch.OutOfMemoryError):
        filler = torch.empty(size, dtype=torch.uint8, device=device)
        # Settings that round requests up can make a request too large for its gap: it then gets a new segment.
        if torch.cuda.memory_reserved(device) == before:
            fillers.append(filler)


def drop_unrelated(history: Tape, recorded: Tape) -> tuple[Tape, int]:
    """Return an allocator's history without older blocks that the run did not use, and the bytes of dropped segments.

    `recorded` is the recorder's tape of the run; its preexisting rows are the older blocks that the run used. A segment
    older than the run is dropped if it has none of these. Frees of other code during the run are not followed.
    """
    used = set(_blocks(recorded, np.flatnonzero(recorded.action == Action.PREEXISTING)))
    life = lifetimes(history)
    is_older = history.action[life.born] == Action.PREEXISTING
    is_used = np.array([block in used for block in _blocks(history, life.born)], dtype=bool)
    unrelated = is_older & ~is_used
    dropped = np.zeros(len(history) + 1, dtype=bool)
    for rows in (life.born, life.requested, life.completed):
        dropped[rows[unrelated]] = True
    kept = history.address[life.born[is_older & is_used]]
    dropped_bytes = 0
    dropped_segments: dict[int, int] = {}
    for row in range(len(history) - snapshot.event_count(history)):
        start, size = int(history.address[row]), int(history.size[row])
        is_segment = history.action[row] in GROWTH
        if is_segment and not np.any((kept >= start) & (kept < start + size)):
            dropped[row] = True
            dropped_segments[start] = start + size
            dropped_bytes += size
    for row in np.flatnonzero(np.isin(history.action, _RELEASED)).tolist():
        start = int(history.address[row])
        if any(begin <= start < end for begin, end in dropped_segments.items()):
            dropped[row] = True
            # A segment of the run may get the same address.
            dropped_segments.pop(start, None)
    return history[~dropped[:-1]], dropped_bytes


def _blocks(tape: Tape, rows: Any) -> list[tuple[int, int]]:
    return list(zip(tape.address[rows].tolist(), tape.size[rows].tolist(), strict=True))
