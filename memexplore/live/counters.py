"""Read the memory counters of a device at the borders of steps and of module calls.

The device is the virtual GPU that is on, else a CUDA device, else the CPU, which has no counters. The user's peak
statistics are never reset.
"""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from memexplore.recorder.cuda import memory_limit
from memexplore.recorder.driver_memory import DriverMemory, Outside
from memexplore.virtual_gpu.device import VirtualGpu, active
from memexplore.virtual_gpu.dispatch import runner

_T = TypeVar("_T")
_SHARE = 0.005
"""Share of the time that reading an `Occasional` may take."""


class PeakFrom(enum.StrEnum):
    """Origin of a step's peak."""

    COUNTER = "counter"
    """The allocator's own counter: exact."""
    SAMPLED = "sampled"
    """The highest value at the borders of the step, of forward passes and, where layers are measured, of module calls:
    the peak is at least that."""
    RECORDED = "recorded"
    """The tape of this step: exact."""
    SAME_SHAPES = "same shapes"
    """An earlier step with inputs of the same shapes, whose peak was recorded or counted."""
    UNKNOWN = ""


class Reading(NamedTuple):
    """Bytes at the end of a step, and the peaks in it; None where the device has no such counter."""

    allocated: int | None = None
    reserved: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    peak_from: PeakFrom = PeakFrom.UNKNOWN
    requested: int | None = None
    """What was requested of the bytes allocated: blocks may be larger."""


class Counters(Protocol):
    """The counters of one device."""

    device: str
    """Name of the device."""
    allocated: Callable[[], int] | None
    """Bytes allocated now; None without a counter. It is called at the borders of module calls."""

    @property
    def capacity(self) -> int | None:
        """Bytes that the allocator can reserve now, None where there is no allocator."""

    @property
    def limit(self) -> int | None:
        """The limit of the process on the bytes that the allocator reserves, None where none lowers `capacity`."""

    def begin(self) -> None:
        """Begin a step."""

    def peak(self) -> int:
        """Return the peak allocated in the step so far, as well as it can be read."""

    def read(self) -> Reading:
        """Return the counters at the end of the step."""

    def outside(self) -> Outside | None:
        """Return what is in use outside the allocator, None if the device does not say."""


class VirtualCounters:
    """Counters of a virtual GPU, which its allocator model counts exactly."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu, self._allocator = gpu, gpu.allocator
        self.device = gpu.gpu.name
        allocator = self._allocator
        self.allocated: Callable[[], int] | None = lambda: allocator.allocated

    @property
    def capacity(self) -> int:
        """Bytes that the allocator can reserve now."""
        return self._allocator.capacity if self.limit is None else self.limit

    @property
    def limit(self) -> int | None:
        """The limit of the process, None where none lowers `capacity`."""
        return _limit_below(self._allocator.capacity, self._allocator.limit)

    def begin(self) -> None:
        """Begin a step."""
        self._allocator.mark_peaks()

    def peak(self) -> int:
        """Return the peak allocated in the step so far."""
        return self._allocator.peaks_since_mark()[0]

    def read(self) -> Reading:
        """Return the counters at the end of the step."""
        with runner.lock:
            runner.free_waiting()
        allocator = self._allocator
        peaks = allocator.peaks_since_mark()
        return Reading(allocator.allocated, allocator.reserved, *peaks, PeakFrom.COUNTER, allocator.requested)

    @property
    def failed_requests(self) -> int:
        """Requests that failed so far."""
        return self._allocator.ooms

    def outside(self) -> Outside | None:
        """Return the memory outside the allocator of this GPU under this release."""
        return Outside(self._gpu.gpu.outside)


class CudaCounters:
    """Counters of a CUDA device, from `torch.cuda.memory_stats_as_nested_dict`.

    The allocator keeps one peak since its last reset, which belongs to the user. Where it rises in a step, the peak of
    the step is exact; else the highest value that was read stands for it, at the latest at the end of a forward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.device = str(device)
        self._free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        self._driver = DriverMemory(device)
        self._highest = self._highest_reserved = self._before = self._before_reserved = 0
        self._requested: int | None = None
        self.allocated: Callable[[], int] | None = self._sample

    @property
    def capacity(self) -> int:
        """Bytes that the allocator could reserve when watching began, or the limit of the process if it is less."""
        limit = self.limit
        return self._free if limit is None else limit

    @property
    def limit(self) -> int | None:
        """The limit of the process, None where none lowers `capacity`."""
        return _limit_below(self._free, memory_limit(self._device))

    def _sample(self) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        size: int = stats["allocated_bytes"]["all"]["current"] if stats else 0
        if size > self._highest:
            self._highest = size
        return size

    def _values(self) -> tuple[int, int, int, int]:
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        if not stats:  # the device was not used yet
            return 0, 0, 0, 0
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        if "requested_bytes" in stats:  # the allocator of cudaMallocAsync does not count it
            self._requested = stats["requested_bytes"]["all"]["current"]
        return allocated["current"], reserved["current"], allocated["peak"], reserved["peak"]

    def begin(self) -> None:
        """Begin a step."""
        self._highest, self._highest_reserved, self._before, self._before_reserved = self._values()

    def peak(self) -> int:
        """Return the peak allocated in the step so far."""
        allocated, _, peak, _ = self._values()
        self._highest = max(self._highest, allocated)
        return peak if peak > self._before else self._highest

    def read(self) -> Reading:
        """Return the counters at the end of the step."""
        allocated, reserved, peak, peak_reserved = self._values()
        # After a reset by the user the counter starts at a lower value: it then covers a part of the step.
        exact = peak > self._before
        own = peak if exact else max(self._highest, allocated, peak if peak < self._before else 0)
        own_reserved = max(
            self._highest_reserved, reserved, peak_reserved if peak_reserved != self._before_reserved else 0
        )
        source = PeakFrom.COUNTER if exact else PeakFrom.SAMPLED
        return Reading(allocated, reserved, own, own_reserved, source, self._requested)

    def outside(self) -> Outside | None:
        """Return what the driver counts as used, without the segments of this process's allocator."""
        return self._driver.outside()


class NoCounters:
    """The CPU: torch counts nothing there, so only recorded steps have numbers."""

    device = "cpu"
    capacity: int | None = None
    limit: int | None = None
    allocated: Callable[[], int] | None = None

    def begin(self) -> None:
        """Begin a step."""

    def peak(self) -> int:
        """Return 0."""
        return 0

    def read(self) -> Reading:
        """Return a reading without numbers."""
        return Reading()

    def outside(self) -> Outside | None:
        """Return None."""
        return None


def _limit_below(free: int, limit: int | None) -> int | None:
    return limit if limit is not None and limit < free else None


def counters_of(device: torch.device | None) -> Counters:
    """Return the counters of the virtual GPU that is on, else of `device`, by default the real GPU or the CPU."""
    virtual = active()
    if virtual is not None:
        return VirtualCounters(virtual)
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        return CudaCounters(torch.device("cuda", torch.cuda.current_device()) if device.index is None else device)
    return NoCounters()


class Occasional(Generic[_T]):
    """A value that is expensive to read: it is read at most once in `seconds`, and repeated in between.

    One that takes long to read is read less often, so that reading takes at most `_SHARE` of the time.
    """

    def __init__(self, read: Callable[[], _T | None], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._value: _T | None = None
        self._next = 0.0

    def __call__(self) -> _T | None:
        """Return the value, at most `seconds` old or as old as its cost asks for."""
        now = time.monotonic()
        if now >= self._next:
            self._value = self._read()
            spent = time.monotonic() - now
            self._next = now + max(self._seconds, spent / _SHARE)
        return self._value


_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def resident() -> int | None:
    """Return the resident memory of this process in bytes; None on a system other than Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        handle = os.open("/proc/self/statm", os.O_RDONLY)
        try:
            return int(os.read(handle, 100).split()[1]) * _PAGE
        finally:
            os.close(handle)
    return None
