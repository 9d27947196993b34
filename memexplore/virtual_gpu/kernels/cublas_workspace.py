"""cuBLAS workspaces: their size by card and torch release, and how long each is kept.

In: compute capability, torch release, CUBLAS_WORKSPACE_CONFIG. Out: bytes of one workspace, and the request of an op
that needs one. Until torch 2.14 each thread that multiplies matrices keeps a workspace from its first product on; from
2.15 on each call takes and frees one (`Workspaces.transient`).

table.py lists the ops that go through cuBLAS (`Kind.CUBLAS`).
"""

from __future__ import annotations

import enum
import os
import re
from typing import Any

from memexplore.tape import Category
from memexplore.virtual_gpu.kernels.plan import Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import new_outputs

MIB = 1024**2


def cublas_size(compute_capability: tuple[int, int], release: tuple[int, int], environment: str | None = None) -> int:
    """Return the bytes of one cuBLAS workspace for a card and a torch release.

    `CUBLAS_WORKSPACE_CONFIG=:KiB:count…` overrides the default (`environment` stands for the variable). Source:
    aten/src/ATen/cuda/CublasHandlePool.cpp, pull requests 175344 (Blackwell) and 189312.

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
    """Threads of a training process that multiply matrices; each has its own cuBLAS handle and workspace."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Workspaces:
    """The cuBLAS workspaces of a process: their size and, until torch 2.14, the one that each thread keeps."""

    def __init__(self, size: int, release: tuple[int, int]) -> None:
        self.size = size
        self.transient = release >= (2, 15)
        self.kept: dict[Thread, int] = {}
        """Thread -> address of its workspace."""

    def needed(self, thread: Thread) -> int:
        """Return the bytes that a matrix product in a thread allocates and keeps, 0 if the thread has a workspace."""
        return 0 if self.transient or thread in self.kept else self.size

    def keep(self, thread: Thread, address: int) -> None:
        """Record the address of a thread's workspace."""
        self.kept[thread] = address


def add_to_requests(
    requests: Requests | None, outputs: list[Any], workspaces: Workspaces
) -> tuple[Requests | None, bool]:
    """Return an op's requests with a transient workspace, and whether its thread must have a kept workspace."""
    if not workspaces.transient:
        return requests, True
    return [*(requests or new_outputs(outputs)), Scratch(workspaces.size, Category.WORKSPACE)], False
