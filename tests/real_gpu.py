"""A real GPU of which other processes have a part, stood for by the numbers that torch reads of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from memexplore import targets
from memexplore.gpu_catalogue import find

MIB = 1 << 20


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have a GPU of 1 000 MiB with 300 free, and 30 allocated of 100 reserved by this process."""
    gpu = dataclasses.replace(find("1000MiB"), outside=0)
    monkeypatch.setattr(targets, "_has_usable_gpu", lambda: True)
    monkeypatch.setattr(targets, "real_device", lambda target, release=None: torch.device("cuda", 0))
    monkeypatch.setattr(targets.cuda, "catalogue_gpu", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300 * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30 * MIB)
