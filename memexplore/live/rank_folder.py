"""Make the folder of this process's rank inside the folder of a run, with its `Writer`."""

from __future__ import annotations

import os

import torch

from memexplore.live.counters import Counters
from memexplore.ranks.writer import Writer, rank_of_environment
from memexplore.recorder.recording import versions


def writer_of(folder: str | os.PathLike[str], counters: Counters) -> Writer:
    """Return the writer of the folder of this process's rank.

    Raises FileExistsError if the rank has a folder there already.
    """
    rank, ranks = rank_of_environment()
    release = versions(torch.__version__)
    about = {"ranks": ranks, "device": counters.device, "capacity": counters.capacity, "versions": release}
    return Writer(folder, rank, about)
