"""Ask the driver of a CUDA device for its version, and how much memory each process has outside the allocator.

`torch.cuda.mem_get_info` says what all processes use together. NVML, the driver's library for management, says what
each process uses; its Python binding `pynvml` (package nvidia-ml-py) is used where it is installed and answers:

- Inside a container the driver may list no processes, or the host's processes by other numbers: an entry counts as this
  process only if it is at least as large as its segments.
- Under WDDM (Windows) the driver gives no sizes of processes.
- A process can use one part of a divided GPU (MIG): its entry is that part, also in the list of the whole GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_MOST_FAILURES = 3
"""Readings in a row without an entry of this process after which NVML is not asked again."""
_LISTS = "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses"
"""Functions of NVML that list the processes of a device: usual ones, and clients of the Multi-Process Service."""


class Outside(NamedTuple):
    """Bytes of a device in use outside the allocator of this process."""

    size: int
    """By this process where `others` is known, else by any process."""
    others: int | None = None
    """By other processes; None where the driver does not say."""


def driver_version() -> str | None:
    """Return the version of the driver, such as ``570.86.15``; None where NVML does not say."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # as in `DriverMemory`
        return None


class DriverMemory:
    """What the driver says of one CUDA device and this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._failures = 0
        self._handle: Any = None
        self._made_in = 0
        """The process that made the handle: a forked process needs its own."""

    def outside(self) -> Outside:
        """Return what is in use outside the allocator of this process."""
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        used = total - free
        own = self._used_by_process()
        if own is None or own < reserved:
            return Outside(max(used - reserved, 0))
        # The two are not read in the same moment.
        return Outside(own - reserved, max(used - own, 0))

    def _used_by_process(self) -> int | None:
        """Return the bytes of this process on the device, None where NVML does not say."""
        if self._failures >= _MOST_FAILURES:
            return None
        try:
            size = self._read()
        except Exception:
            # Of any kind: no binding, no driver, no permission, a function that the driver lacks, a lost GPU.
            self._handle, size = None, None
        self._failures = 0 if size is not None else self._failures + 1
        return size

    def _read(self) -> int | None:
        # Installed or not, and torch imports it as well.
        pynvml: Any = importlib.import_module("pynvml")
        if self._handle is None or self._made_in != os.getpid():
            pynvml.nvmlInit()
            self._handle, self._made_in = _handle(pynvml, self._device), os.getpid()
        own = os.getpid()
        sizes = [process.usedGpuMemory for process in _processes(pynvml, self._handle) if process.pid == own]
        # Of a process that computes and draws there are two entries with the same size.
        return max((size for size in sizes if size is not None), default=None)


def _handle(pynvml: Any, device: torch.device) -> Any:
    """Return NVML's handle of a device, by its UUID: NVML knows nothing of `CUDA_VISIBLE_DEVICES`."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _processes(pynvml: Any, handle: Any) -> Iterator[Any]:
    for name in _LISTS:
        with contextlib.suppress(pynvml.NVMLError, AttributeError):
            yield from getattr(pynvml, name)(handle)
