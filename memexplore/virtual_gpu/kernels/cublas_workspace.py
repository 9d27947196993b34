"""cuBLAS workspaces: size by compute capability and torch release, and lifetime.

Up to torch 2.14, each cuBLAS handle gets a workspace at its first matrix product on a stream and keeps it; from 2.15
on, each call allocates one and frees it (`Workspaces.transient`). A thread takes a handle and returns it when it ends.
table.py lists the ops that use cuBLAS (`Kind.CUBLAS`). docs/allocator.md (section 13) states the rule with its sources:
keep it up to date. Tests: tests/virtual_gpu/test_cublas_workspace.py.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from typing import Any

from memexplore.tape import Category
from memexplore.virtual_gpu.kernels.plan import Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import new_outputs

MIB = 1024**2
DEFAULT = 2 * 4 * MIB + 8 * 16 * 1024
"""Bytes of a workspace on other GPUs: two of 4 MiB and eight of 16 KiB, `:4096:2:16:8`."""
SIZES = {
    9: ((2, 0), 32 * MIB),
    10: ((2, 12), 32 * MIB),
    11: ((2, 14), 32 * MIB),
    12: ((2, 12), 32 * MIB),
}
"""Major compute capability -> the first torch release with this workspace, and its bytes.

10 and 12 (Blackwell): pytorch pull request 175344, merged after 2.11. 11: pull request 189312, July 2026.
"""


def cublas_size(compute_capability: tuple[int, int], release: tuple[int, int], environment: str | None = None) -> int:
    """Return the bytes of one cuBLAS workspace (aten/src/ATen/cuda/CublasHandlePool.cpp).

    `environment` is the value of `CUBLAS_WORKSPACE_CONFIG`, ``:KiB:count…``, which overrides the default; an empty
    string means that it is not set. Default: read from the environment.

    >>> [cublas_size(*gpu, "") for gpu in (((7, 5), (2, 13)), ((9, 0), (2, 11)), ((12, 0), (2, 11)))]
    [8519680, 33554432, 8519680]
    >>> cublas_size((8, 0), (2, 13), ":16:8")  # eight of 16 KiB
    131072
    """
    configured = os.environ.get("CUBLAS_WORKSPACE_CONFIG") if environment is None else environment
    if configured:
        pairs = re.findall(r":(\d+):(\d+)", configured)
        if pairs:
            return sum(int(kib) * int(count) for kib, count in pairs) * 1024
    first_release, size = SIZES.get(compute_capability[0], ((2, 0), DEFAULT))
    return size if release >= first_release else DEFAULT


BACKWARD = -1
"""The handle of the autograd engine's thread, which runs the backward pass of all threads on a real GPU.

The virtual GPU runs the backward pass in the calling thread, and counts its products for that handle.
"""


class _Handle(threading.local):
    number = -1


class Workspaces:
    """The cuBLAS workspaces of a process: their size and, up to torch 2.14, the workspace that each handle keeps."""

    def __init__(self, size: int, release: tuple[int, int]) -> None:
        self.size = size
        self.transient = release >= (2, 15)
        self.kept: dict[tuple[int, int], int] = {}
        """Handle and stream -> address of their workspace."""
        self._handle = _Handle()
        self._owners: list[weakref.ref[threading.Thread]] = []
        """The thread that has each handle, or that had it last."""

    def handle(self) -> int:
        """Return the number of the calling thread's cuBLAS handle: one of a thread that ended, else a new one.

        Source: ATen/cuda/CublasHandlePool.cpp and DeviceThreadHandles.h: a `PoolWindow` of each thread, whose
        destructor makes its handles available; the workspaces are kept by handle and stream.
        """
        if self._handle.number < 0:
            owner = weakref.ref(threading.current_thread())
            for number, last in enumerate(self._owners):
                thread = last()
                if thread is None or not thread.is_alive():
                    self._owners[number], self._handle.number = owner, number
                    return number
            self._owners.append(owner)
            self._handle.number = len(self._owners) - 1
        return self._handle.number

    def needed(self, key: tuple[int, int]) -> int:
        """Return the bytes that the next product of a handle on a stream allocates and keeps, 0 for none."""
        return 0 if self.transient or key in self.kept else self.size

    def keep(self, key: tuple[int, int], address: int) -> None:
        """Record the address of the workspace of a handle and a stream."""
        self.kept[key] = address


def add_to_requests(
    requests: Requests | None, outputs: list[Any], workspaces: Workspaces
) -> tuple[Requests | None, bool]:
    """Return an op's requests with a transient workspace, and whether its thread must have a kept workspace."""
    if not workspaces.transient:
        return requests, True
    return [*(requests or new_outputs(outputs)), Scratch(workspaces.size, Category.WORKSPACE)], False
