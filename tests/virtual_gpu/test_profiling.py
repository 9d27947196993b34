"""`torch.profiler` on the virtual GPU times the ops on the CPU, quietly, with a note on the tape."""

from __future__ import annotations

from pathlib import Path
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


def _profiled(path: str, device: str | None, **options: bool) -> str:
    layer, data = torch.nn.Linear(4, 4, device="cuda"), torch.randn(2, 4, device="cuda")
    with profiler.profile(activities=[CPU, CUDA], **options) as measured:
        layer(data).sum().backward()
    measured.export_memory_timeline(path, device)
    return measured.key_averages().table(sort_by="self_cuda_memory_usage", row_limit=3)


ALL = {"record_shapes": True, "profile_memory": True, "with_stack": True}


@pytest.mark.parametrize("ending", ["html", "json", "json.gz", "raw.json.gz"])
@pytest.mark.parametrize("device", ["cuda:0", None])
def test_a_memory_timeline_of_the_gpu_is_one_sentence(tmp_path: Path, ending: str, device: str | None) -> None:
    path = tmp_path / f"memory.{ending}"

    def run() -> None:
        with pytest.warns(UserWarning, match="was not written: torch.profiler has neither times nor memory"):
            assert "Self CPU time total" in _profiled(str(path), device, **ALL)

    tape = mx.simulate(run, gpu="T4")
    assert not path.exists()
    assert any(f"{path} was not written" in note for note in tape.meta.notes)
    assert any("torch.profiler counts no memory of a virtual GPU" in note for note in tape.meta.notes)


def test_a_memory_timeline_without_shapes_is_refused_as_by_torch() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="record_shapes=True, with_stack=True required"):
            _profiled("memory.json", "cuda:0", profile_memory=True)

    mx.simulate(run, gpu="T4")


def test_a_memory_timeline_of_the_cpu_is_written(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    mx.simulate(lambda: _profiled(str(path), "cpu", **ALL), gpu="T4")
    assert path.exists()
