"""Name the largest other processes of a GPU, with their bytes, as text."""

from __future__ import annotations

from collections.abc import Iterable

from memexplore.text.units import size_text

MOST_PROCESSES = 3
"""Processes named in a sentence; of more, the number, the total and the largest ones are given."""


def named_processes(processes: Iterable[tuple[int, int]]) -> str:
    """Return the number and the bytes of the largest processes.

    >>> named_processes([(812, 9 << 30), (7, 1 << 30), (8, 3 << 30), (9, 2 << 30)])
    '812 (9.00 GiB), 8 (3.00 GiB), 9 (2.00 GiB)'
    """
    largest = sorted(processes, key=lambda process: -process[1])[:MOST_PROCESSES]
    return ", ".join(f"{process} ({size_text(size)})" for process, size in largest)
