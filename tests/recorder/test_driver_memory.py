"""Memory outside the allocator by process: a binding of NVML and a GPU that are played."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memexplore.live.counters import CudaCounters, Occasional
from memexplore.recorder.driver_memory import DriverMemory, Outside

MIB = 1024**2
UUID = "8c7b2f10-0000-4d5e-9f00-1234567890ab"
TOTAL, FREE, RESERVED = 16_000 * MIB, 9_000 * MIB, 5_000 * MIB
# 16 000 - 9 000 MiB are used, 5 000 of them by the segments of this process.
BY_ANY = Outside(2_000 * MIB)


class NVMLError(Exception):
    pass


def entry(size: int | None, pid: int | None = None) -> Any:
    return SimpleNamespace(pid=os.getpid() if pid is None else pid, usedGpuMemory=size)


class Binding:
    """A `pynvml` with one GPU."""

    NVMLError = NVMLError

    def __init__(self, *processes: Any, prefix: str = "GPU-") -> None:
        self.processes, self.prefix = list(processes), prefix
        self.inits = self.lists = 0
        self.fails = False

    def nvmlInit(self) -> None:
        self.inits += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.prefix + UUID:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        self.lists += 1
        if self.fails:
            raise NVMLError("Insufficient Permissions")
        assert handle == self.prefix + UUID
        return self.processes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: RESERVED)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))


def memory_with(binding: Any, monkeypatch: pytest.MonkeyPatch) -> DriverMemory:
    monkeypatch.setitem(sys.modules, "pynvml", binding)
    return DriverMemory(torch.device("cuda", 0))


def test_this_process_and_others_are_told_apart(gpu, monkeypatch):
    memory = memory_with(Binding(entry(5_400 * MIB), entry(1_500 * MIB, pid=1)), monkeypatch)
    # Of 7 000 MiB used this process has 5 400, 5 000 of them in segments; the driver itself may use some as well.
    assert memory.outside() == Outside(400 * MIB, 1_600 * MIB)


def test_without_the_binding_all_processes_count(gpu, monkeypatch):
    assert memory_with(None, monkeypatch).outside() == BY_ANY


def test_a_process_that_is_not_listed_is_not_told_apart_from_others(gpu, monkeypatch):
    assert memory_with(Binding(entry(1_500 * MIB, pid=1)), monkeypatch).outside() == BY_ANY
    assert memory_with(Binding(), monkeypatch).outside() == BY_ANY


def test_a_process_without_a_size_is_not_told_apart_from_others(gpu, monkeypatch):
    assert memory_with(Binding(entry(None)), monkeypatch).outside() == BY_ANY


def test_an_entry_smaller_than_the_segments_is_that_of_another_process(gpu, monkeypatch):
    # As in a container, where the numbers are those of the host.
    assert memory_with(Binding(entry(300 * MIB)), monkeypatch).outside() == BY_ANY


def test_a_part_of_a_gpu_is_found_by_its_own_uuid(gpu, monkeypatch):
    memory = memory_with(Binding(entry(5_100 * MIB), prefix="MIG-"), monkeypatch)
    assert memory.outside() == Outside(100 * MIB, 1_900 * MIB)


def test_a_client_of_the_multi_process_service_is_found_in_its_list(gpu, monkeypatch):
    binding = Binding()
    binding.nvmlDeviceGetMPSComputeRunningProcesses = lambda handle: [entry(5_200 * MIB)]  # type: ignore[attr-defined]
    assert memory_with(binding, monkeypatch).outside() == Outside(200 * MIB, 1_800 * MIB)


def test_after_three_failures_in_a_row_the_driver_is_not_asked_again(gpu, monkeypatch):
    binding = Binding(entry(5_400 * MIB))
    memory = memory_with(binding, monkeypatch)
    binding.fails = True
    assert [memory.outside() for _ in range(2)] == [BY_ANY] * 2
    binding.fails = False
    assert memory.outside().others is not None
    binding.fails = True
    assert [memory.outside() for _ in range(5)] == [BY_ANY] * 5
    assert binding.lists == 2 + 1 + 3


def test_the_library_is_begun_once_and_again_in_another_process(gpu, monkeypatch):
    binding = Binding(entry(5_400 * MIB))
    memory = memory_with(binding, monkeypatch)
    for _ in range(3):
        memory.outside()
    assert binding.inits == 1
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    binding.processes = [entry(5_300 * MIB, pid=child)]
    assert memory.outside() == Outside(300 * MIB, 1_700 * MIB)
    assert binding.inits == 2


def test_the_counters_of_a_device_have_both_numbers(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Binding(entry(5_400 * MIB)))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
    counters = CudaCounters(torch.device("cuda", 0))
    assert counters.outside() == Outside(400 * MIB, 1_600 * MIB)


def test_what_takes_long_to_read_is_read_less_often(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    reads = []

    def read() -> int:
        reads.append(now[0])
        now[0] += 0.02
        return len(reads)

    value = Occasional(read, seconds=1.0)
    for _ in range(90):
        value()
        now[0] += 0.1
    # Reading takes 20 ms, so it may happen once in 4 s: 0.5 % of the time.
    assert reads == pytest.approx([100.0, 104.0 + 0.02, 108.0 + 0.04], abs=0.15)
