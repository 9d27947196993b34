"""Tell the size and the lifetime of the workspaces of cuBLAS and cuBLASLt.

Up to torch 2.14, each cuBLAS handle gets a workspace at its first matrix product on a stream and keeps it; from 2.15
on, each call allocates one and frees it (`Workspaces.transient`). A thread takes a handle and returns it when it ends.
cuBLASLt, which adds the bias of a linear layer, has a workspace of its own for each handle in torch 2.9 to 2.11. Their
bytes follow from compute capability and torch release; cublas.py lists the ops that use cuBLAS. docs/allocator.md
(section 13) states the rule with its sources: keep it up to date. Tests: tests/virtual_gpu/test_cublas_workspace.py.
"""

from __future__ import annotations

import enum
import os
import re
import threading
import weakref
from collections.abc import Mapping
from typing import NamedTuple

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


def cublaslt_size(release: tuple[int, int], cublas: int, environment: Mapping[str, str] | None = None) -> int:
    """Return the bytes of the workspace that cuBLASLt keeps for each handle, 0 where it has none of its own.

    `cublas` is the size of cuBLAS's workspace, `environment` the environment variables, by default those of the
    process. Source: aten/src/ATen/cuda/CublasHandlePool.cpp. Pull request 156495 (June 2025) keeps a workspace for each
    handle and stream; since 175879 (February 2026) it is that of cuBLAS, which 2.11 shares only where
    `TORCH_CUBLASLT_UNIFIED_WORKSPACE` is set. Measured with torch 2.11 on an H100.

    >>> [cublaslt_size(release, 32 * MIB, {}) for release in ((2, 8), (2, 11), (2, 12))]
    [0, 1048576, 0]
    """
    variables = os.environ if environment is None else environment
    shared = variables.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "1"
    if shared or not (2, 9) <= release <= (2, 11):
        return 0
    kib = variables.get("CUBLASLT_WORKSPACE_SIZE", "")
    return min(int(kib) * 1024 if kib.isdigit() else MIB, cublas)


class Library(enum.Enum):
    """A library that keeps workspaces."""

    CUBLAS = "cuBLAS"
    CUBLASLT = "cuBLASLt"
    DROPOUT = "cuDNN's random numbers for dropout between recurrent layers"
    """One block for each device, of 24 bytes for each thread that can be resident, as measured on an H100."""


class Key(NamedTuple):
    """What a workspace is kept for."""

    library: Library
    handle: int = 0
    stream: int = 0


BACKWARD = -1
"""The handle of the autograd engine's thread, which runs the backward pass of all threads on a real GPU.

The virtual GPU runs the backward pass in the calling thread, and counts its products for that handle.
"""


class _Handle(threading.local):
    number = -1


class Workspaces:
    """The workspaces of a process: their sizes and, up to torch 2.14, those that each handle keeps."""

    def __init__(self, size: int, release: tuple[int, int], threads: int) -> None:
        """`size` is that of cuBLAS's workspaces, `threads` the number of threads that can be resident on the GPU."""
        self.size = size
        self.sizes = {
            Library.CUBLAS: size,
            Library.CUBLASLT: cublaslt_size(release, size),
            Library.DROPOUT: 24 * threads,
        }
        """Library -> bytes of each of its workspaces, 0 where it has none."""
        self.transient = release >= (2, 15)
        self.kept: dict[Key, int] = {}
        """Key -> address of a workspace."""
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

    def needed(self, key: Key) -> int:
        """Return the bytes that the next op for a key allocates and keeps, 0 for none."""
        is_kept = key.library is Library.DROPOUT or not self.transient
        return self.sizes[key.library] if is_kept and key not in self.kept else 0

    def keep(self, key: Key, address: int) -> None:
        """Record the address of the workspace of a key."""
        self.kept[key] = address


NONE: tuple[Library, ...] = ()
PRODUCT = (Library.CUBLAS,)
EPILOGUE = (Library.CUBLAS, Library.CUBLASLT)
