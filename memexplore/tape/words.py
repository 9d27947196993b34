"""Words in the metadata of a tape: the origin of its numbers, how its program ended, its system, its communicators."""

from __future__ import annotations

import enum

from memexplore.hardware.outside_allocator import Communicator

__all__ = ["Communicator", "Ending", "Os", "Source"]


class Source(enum.StrEnum):
    """Origin of a tape's numbers, named in every figure and sentence."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    IMPORTED = "imported"


class Ending(enum.StrEnum):
    """How a recorded program ended; `UNKNOWN` for a snapshot file, which does not say."""

    UNKNOWN = "unknown"
    COMPLETED = "completed"
    OUT_OF_MEMORY = "out of memory"
    ERROR = "error"
    INTERRUPTED = "interrupted"


class Os(enum.StrEnum):
    """Operating system of the machine, whose GPU driver chooses the addresses of new segments."""

    LINUX = "linux"
    WSL = "wsl"
    WINDOWS = "windows"
