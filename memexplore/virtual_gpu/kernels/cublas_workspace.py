"""Library scratch: cuBLAS workspaces, one for each thread that multiplies matrices."""

from __future__ import annotations

import enum
import os
import re

MIB = 1024**2


def cublas_size(compute_capability: tuple[int, int], release: tuple[int, int], environment: str | None = None) -> int:
    """Bytes of one cuBLAS workspace, by the card and the torch release.

    `CUBLAS_WORKSPACE_CONFIG=:KiB:count…` overrides the default. Source: aten/src/ATen/cuda/CublasHandlePool.cpp,
    pull requests 175344 (Blackwell) and 189312.

    >>> cublas_size((7, 5), (2, 13)), cublas_size((9, 0), (2, 11)), cublas_size((12, 0), (2, 11))
    (8519680, 33554432, 8519680)
    >>> cublas_size((8, 0), (2, 13), ":16:8")
    131072
    """
    configured = os.environ.get("CUBLAS_WORKSPACE_CONFIG") if environment is None else environment
    if configured:
        pairs = re.findall(r":(\d+):(\d+)", configured)
        if pairs:
            return sum(int(kib) * int(count) for kib, count in pairs) * 1024
    major = compute_capability[0]
    if major == 9 or (major in (10, 12) and release > (2, 11)) or (major == 11 and release > (2, 13)):
        return 32 * MIB
    return 2 * 4 * MIB + 8 * 16 * 1024


class Thread(enum.Enum):
    """The threads of a training process that multiply matrices: each has a cuBLAS handle and workspace of its own."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Workspaces:
    """cuBLAS workspaces: until torch 2.14 kept for each thread, from 2.15 taken and freed by each call."""

    def __init__(self, size: int, release: tuple[int, int]) -> None:
        self.size = size
        self.transient = release >= (2, 15)
        self.kept: dict[Thread, int] = {}
        """Thread -> address of its workspace."""

    def needed(self, thread: Thread) -> int:
        """Bytes that a matrix product in this thread has to ask for and keep; 0 where its workspace is there."""
        return 0 if self.transient or thread in self.kept else self.size

    def keep(self, thread: Thread, address: int) -> None:
        """Note a thread's workspace."""
        self.kept[thread] = address
