"""A real GPU, stood for by the numbers that torch reads of it, or by a virtual GPU that is recorded as a real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memexplore as mx
from memexplore.hardware.catalogue import find
from memexplore.recorder import cuda
from memexplore.recorder import recording as recorder
from memexplore.run import machine
from memexplore.tape import Meta, Source, Tape

MIB = 1 << 20


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have a GPU of 1 000 MiB with 300 free, and 30 allocated of 100 reserved by this process."""
    gpu = dataclasses.replace(find("1000MiB"), outside=0)
    monkeypatch.setattr(machine, "default_name", lambda: "cuda")
    monkeypatch.setattr(machine, "real_device", lambda target, release=None: torch.device("cuda", 0))
    monkeypatch.setattr(machine.cuda, "catalogue_gpu", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300 * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30 * MIB)


def recorded(monkeypatch: pytest.MonkeyPatch, function: Callable[[], Any], gpu: str = "T4") -> Tape:
    """The tape of a function that `mx.record` makes of a virtual GPU as of a real one.

    Its dispatch mode sees the ops, and the allocator's history has the requests.
    """
    with mx.virtual(gpu), monkeypatch.context() as patched:
        take_for_real(patched, gpu)
        with mx.record() as recording:
            function()
    return recording.tape


def take_for_real(monkeypatch: pytest.MonkeyPatch, gpu: str = "T4") -> None:
    """Let `mx.record` take the running virtual GPU for a real one."""
    monkeypatch.setattr(recorder, "active", lambda: None)
    monkeypatch.setattr(cuda, "meta", lambda device, versions: Meta(Source.MEASURED, str(device), gpu=find(gpu).key))
