"""`torch.profiler` on the virtual GPU times the ops on the CPU, quietly, with a note on the tape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import profiler

import memexplore as mx

CPU, CUDA = profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA


@pytest.mark.parametrize(
    ("profile", "options"),
    [
        (profiler.profile, {"activities": [CPU, CUDA], "profile_memory": True}),
        (profiler.profile, {"activities": [CUDA]}),
        (torch.autograd.profiler.profile, {"use_device": "cuda"}),
    ],
    ids=["all", "gpu only", "autograd"],
)
def test_profilers_time_the_cpu(capfd: pytest.CaptureFixture[str], profile: Any, options: dict[str, Any]) -> None:
    tables = []

    def run() -> None:
        layer, data = torch.nn.Linear(4, 4).cuda(), torch.randn(2, 4, device="cuda")
        with profile(**options) as measured:
            layer(data)
        tables.append(measured.key_averages().table(sort_by="cpu_time_total"))

    tape = mx.simulate(run, gpu="T4")
    assert "aten::linear" in tables[0]
    assert "Failed to record CUDA event" not in capfd.readouterr().err
    assert "torch.profiler times the CPU only: a virtual GPU runs no kernels" in tape.meta.notes
