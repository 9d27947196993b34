"""`mx.load`: tapes by device from a file, or the ranks of a run from a folder."""

from __future__ import annotations

import os
from typing import Any

from memexplore import snapshot
from memexplore.ranks.ranks import Ranks


def load(path: str | os.PathLike[str]) -> Any:
    """Load a PyTorch snapshot, plain or gzip, a tape that `Tape.save` wrote, or a folder of ranks.

    Returns tapes by device for a file, `ranks.Ranks` for a folder.

    Raises ValueError with one sentence if it is none of these or is damaged. A file that refers to code is refused, and
    nothing of it runs.
    """
    return Ranks(path) if os.path.isdir(path) else snapshot.load(path)
