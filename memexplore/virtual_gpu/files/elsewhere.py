"""Files that another rank has written: a path that this rank does not find goes in, its copy in the overlay comes out.

A checkpoint that rank 0 alone saves is read by all ranks. Only files below the current folder are asked for, where a
program writes its own: libraries look for files that may be missing in their caches.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from memexplore.virtual_gpu.files import paths
from memexplore.virtual_gpu.files.overlay import Overlay

Fetch = Callable[[str], "os.PathLike[str] | None"]
"""Returns a copy of the file that another rank has at a path, None without one."""


class _State:
    fetch: Fetch | None = None


@contextlib.contextmanager
def fetched_by(fetch: Fetch) -> Iterator[None]:
    """Get files that the block opens and that are missing from another rank."""
    before, _State.fetch = _State.fetch, fetch
    try:
        yield
    finally:
        _State.fetch = before


def found(overlay: Overlay, file: Any) -> str | None:
    """Return the path in the overlay of a file that only another rank has, None if none has it."""
    if _State.fetch is None or overlay.inside:
        return None
    with overlay.real():
        logical = overlay.logical(os.fsdecode(file))
        if overlay.hidden(logical) or not logical.startswith(os.getcwd() + os.sep):
            return None
        copy = _State.fetch(logical)
        if copy is None:
            return None
        with overlay.lock:
            upper = overlay.make_room(logical)
            shutil.copyfile(copy, upper)
            overlay.written[logical] = paths.holds_mark(upper, overlay.mark)
    return upper
