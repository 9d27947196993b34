"""A run alone on a device that others use too: what of the allocator's memory is the run's own."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from memexplore import snapshot
from memexplore.allocator.settings import SMALL
from memexplore.analysis.curves import lifetimes
from memexplore.recorder.cuda import COLUMNS
from memexplore.tape import Action, Tape
from memexplore.torch_internals.cuda import clear_cublas_workspaces

_GIVEN_BACK = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Have a device for the block as a fresh process has it, but for the tensors that are alive.

    On a GPU the caching allocator gives back what it has free, cuBLAS its workspaces, and every gap between tensors
    that are alive is filled. So the block gets segments of its own, and gives them all back at its end.
    """
    gc.collect()
    if device.type == "cpu":
        yield
        return
    _give_back(device)
    fillers = _in_all_gaps(device)
    try:
        yield
    finally:
        fillers.clear()
        gc.collect()
        _give_back(device)


def _give_back(device: torch.device) -> None:
    torch.cuda.synchronize(device)
    # None in a build of torch for the CPU, where the GPU is a virtual one.
    if clear_cublas_workspaces is not None:
        clear_cublas_workspaces()
    torch.cuda.empty_cache()


def _in_all_gaps(device: torch.device) -> list[torch.Tensor]:
    """Tensors in all free blocks that requests on the current stream could get."""
    fillers: list[torch.Tensor] = []
    # Requests up to 1 MiB go to small segments, which are larger: those are cut first.
    for small, size in _gaps(device):
        if small and size > SMALL:
            _fill(device, SMALL, fillers)
    # A request of exactly the size of the smallest gap gets that gap.
    for small, size in sorted(_gaps(device), key=lambda gap: gap[1]):
        if small or size > SMALL:
            _fill(device, size, fillers)
    torch.cuda.empty_cache()
    return fillers


def _gaps(device: torch.device) -> list[tuple[bool, int]]:
    """Whether it is in a small segment, and size, of each free block."""
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
        # Settings that round requests up can make one too large for its gap: then it got a new segment.
        if torch.cuda.memory_reserved(device) == before:
            fillers.append(filler)


def drop_unrelated(history: Tape, noted: Tape) -> tuple[Tape, int]:
    """An allocator's history without the blocks that were there before and that the run did not use.

    `noted` tells what it used. Segments in which the run used nothing that was there go as well; their bytes in all are
    the second answer. Memory that others free meanwhile is not followed.
    """
    used = set(_places(noted, np.flatnonzero(noted.action == Action.PREEXISTING)))
    life = lifetimes(history)
    was_there = history.action[life.born] == Action.PREEXISTING
    mine = np.array([place in used for place in _places(history, life.born)], dtype=bool)
    others = was_there & ~mine
    dropped = np.zeros(len(history) + 1, dtype=bool)
    for rows in (life.born, life.requested, life.completed):
        dropped[rows[others]] = True
    kept = history.address[life.born[was_there & mine]]
    held = 0
    gone: dict[int, int] = {}
    for row in range(len(history) - snapshot.event_count(history)):
        start, size = int(history.address[row]), int(history.size[row])
        is_segment = history.action[row] in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
        if is_segment and not np.any((kept >= start) & (kept < start + size)):
            dropped[row] = True
            gone[start] = start + size
            held += size
    for row in np.flatnonzero(np.isin(history.action, _GIVEN_BACK)).tolist():
        start = int(history.address[row])
        if any(begin <= start < end for begin, end in gone.items()):
            dropped[row] = True
            # The address may come again, in a segment of the run.
            gone.pop(start, None)
    kept_rows = ~dropped[:-1]
    return history.replace(**{name: getattr(history, name)[kept_rows] for name in COLUMNS}), held


def _places(tape: Tape, rows: Any) -> list[tuple[int, int]]:
    return list(zip(tape.address[rows].tolist(), tape.size[rows].tolist(), strict=True))
