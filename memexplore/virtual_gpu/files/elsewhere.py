"""Copy files that another rank has written, and that this rank does not find, to the overlay.

A checkpoint that rank 0 alone saves is read by all ranks, and the part that each rank saves by others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from memexplore.virtual_gpu.files import paths, policy
from memexplore.virtual_gpu.files.overlay import Overlay

Fetch = Callable[[str], "os.PathLike[str] | None"]
"""Returns a copy of the file that another rank has at a path, None without one."""
Give = Callable[[str], object]
"""Copies the file that this rank has at a path for other ranks."""


_SECONDS, _LOOKS, _BUSY = 5.0, 3, 0.2
"""A program waits for a file that it has looked for so long and so often, if it used less of the processor's time."""


class _Looks(NamedTuple):
    """When a program began to look for a file that is missing, and how often it has looked since then."""

    began: float
    processor: float
    times: int


class _State:
    fetch: Fetch | None = None
    give: Give | None = None


_looks: dict[str, _Looks] = {}


@contextlib.contextmanager
def fetched_by(fetch: Fetch, give: Give | None = None) -> Iterator[None]:
    """Get files that the block opens and that are missing from another rank; give those that the block removes."""
    before = _State.fetch, _State.give
    _State.fetch, _State.give = fetch, give
    try:
        yield
    finally:
        _State.fetch, _State.give = before
        _looks.clear()


def removing(overlay: Overlay, logical: str) -> None:
    """Give a file that is about to be removed to the ranks that may read it."""
    if _State.give is not None and not overlay.inside and policy.is_from_another_rank(overlay, logical):
        _State.give(logical)


def fetched(overlay: Overlay, file: Any) -> str | None:
    """Return the path in the overlay of a file that only another rank has, None if none has it."""
    if _State.fetch is None or overlay.inside:
        return None
    with overlay.real():
        logical = overlay.logical(os.fsdecode(file))
        if overlay.hidden(logical) or not policy.is_from_another_rank(overlay, logical):
            return None
        copy = _State.fetch(logical)
        if copy is None:
            return None
        with overlay.lock:
            upper = overlay.make_room(logical)
            shutil.copyfile(copy, upper)
            overlay.written[logical] = paths.holds_mark(upper, overlay.mark)
    return upper


def fetched_beside_own_files(overlay: Overlay, file: Any) -> str | None:
    """Return the same as `fetched` for a file that the program looks for, and does not open yet.

    Only beside files without values that this rank has saved: before, a program looks for a checkpoint to resume from.
    """
    if _State.fetch is None or overlay.inside:
        return None
    with overlay.real():
        folder = os.path.dirname(overlay.logical(os.fsdecode(file)))
        beside = [path for path in (*overlay.written, *overlay.own) if os.path.dirname(path) == folder]
        is_beside = any(
            path in overlay.written or (paths.is_pickled(path) and paths.holds_mark(path, overlay.mark))
            for path in beside
        )
    return fetched(overlay, file) if is_beside else None


def fetched_when_awaited(overlay: Overlay, file: Any) -> str | None:
    """Return the same as `fetched` for a file that the program waits for, None if it only looks for it.

    Raises RuntimeError where no other rank has written the file when it ends.
    """
    if _State.fetch is None or overlay.inside:
        return None
    with overlay.real():
        logical = overlay.logical(os.fsdecode(file))
        if not policy.is_from_another_rank(overlay, logical) or not _is_waiting(logical):
            return None
    copy = fetched(overlay, file)
    if copy is None:
        raise RuntimeError(
            f"this rank waits for the file {os.fsdecode(file)}, and no other rank has written it when it ended: let "
            "this rank write it, or make the file before the run"
        )
    return copy


def _is_waiting(logical: str) -> bool:
    """Note that a program looks for a missing file; return whether it does nothing else."""
    now, processor = time.monotonic(), time.process_time()
    began = _looks.get(logical, _Looks(now, processor, 0))
    if processor - began.processor > max(_BUSY * (now - began.began), _BUSY):
        began = _Looks(now, processor, 0)
    _looks[logical] = looks = began._replace(times=began.times + 1)
    return looks.times >= _LOOKS and now - looks.began >= _SECONDS
