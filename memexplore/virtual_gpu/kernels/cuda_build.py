"""Name the torch release and the GPU that the virtual GPU imitates; rules choose kernels and sizes by them.

`VirtualGpu.patches` replaces `_current` while a virtual GPU is on.
"""

from __future__ import annotations

from typing import NamedTuple


class Build(NamedTuple):
    """A torch release and a GPU; `release` and `compute_capability` are (major, minor)."""

    release: tuple[int, int] = (2, 13)
    compute_capability: tuple[int, int] = (8, 0)
    multiprocessors: int = 108

    @property
    def resident_threads(self) -> int:
        """Resident threads per multiprocessor: table 'Technical Specifications' of the CUDA C++ programming guide.

        >>> Build(compute_capability=(8, 9)).resident_threads, Build(compute_capability=(9, 0)).resident_threads
        (1536, 2048)
        """
        major, minor = self.compute_capability
        if (major, minor) == (7, 5):
            return 1024
        if major in (11, 12) or (major == 8 and minor):
            return 1536
        return 2048


_current = Build()
"""Replaced while a virtual GPU is on."""


def current() -> Build:
    """Return the build that the virtual GPU imitates, a default build while no virtual GPU is on."""
    return _current
