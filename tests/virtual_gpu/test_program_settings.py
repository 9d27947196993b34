"""Allocator settings that a program makes itself: read when PyTorch reads them, and changed at any time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import memexplore as mx
from memexplore.analysis.curves import peak
from memexplore.run.machine import machine_of
from memexplore.run.programs.script import Script
from memexplore.run.run import run
from memexplore.tape import Tape

MIB = 2**20
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        # Also what a test sets itself is gone after it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _reserved() -> int:
    return torch.cuda.memory_reserved() // MIB


def _thirty() -> torch.Tensor:
    return torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")


def _set(text: str) -> None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        torch.cuda.memory._set_allocator_settings(text)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_counts_that_is_set_before_the_first_request(name: str) -> None:
    with mx.virtual("T4"), mx.record() as recording:
        os.environ[name] = "expandable_segments:True"
        x = _thirty()
        assert _reserved() == 40  # two pages of 20 MiB, else a segment of 30 MiB
        del x
    assert (recording.tape.meta.settings, recording.tape.meta.notes) == ("expandable_segments:True", ())


def test_the_program_comes_before_the_environment_of_its_start() -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with mx.virtual("T4"):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"
        _thirty()
        assert (_reserved(), torch.cuda.memory_stats()["max_split_size"]) == (30, 64 * MIB)
    with mx.virtual("T4"):
        del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
        _thirty()
        assert torch.cuda.memory_stats()["max_split_size"] == -1


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(1, device="cuda"),
        lambda: torch.cuda.set_device(0),
        lambda: torch.cuda.get_device_properties(0),
        lambda: torch.cuda.init(),
    ],
)
def test_a_variable_is_read_once_when_cuda_is_initialised(use: Callable[[], object]) -> None:
    with mx.virtual("T4"), mx.record() as recording:
        use()
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        _thirty()
        assert _reserved() in (30, 32)  # with the segment of 2 MiB for the small tensor
    assert recording.tape.meta.settings == ""
    (note,) = recording.tape.meta.notes
    assert note.startswith("the program set PYTORCH_CUDA_ALLOC_CONF to expandable_segments:True, too late: ")


def test_a_question_that_initialises_nothing_does_not_read_the_variable() -> None:
    with mx.virtual("T4"):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        torch.manual_seed(0)
        torch.cuda.empty_cache()
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        _thirty()
        assert _reserved() == 40


def test_a_fraction_of_the_memory_is_a_limit_as_in_torch() -> None:
    with mx.virtual("8GiB"):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "per_process_memory_fraction:0.25"
        with pytest.raises(torch.OutOfMemoryError, match=r"2\.00 GiB allowed"):
            torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")
        assert torch.cuda.get_per_process_memory_fraction() == 0.25
        _set("per_process_memory_fraction:1.0")  # too late: the allocator has been made
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * 2**30, dtype=torch.uint8, device="cuda")


def test_settings_that_torch_refuses_raise_at_the_first_use() -> None:
    with mx.virtual("T4"):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:5"
        for _ in range(2):
            with pytest.raises(ValueError, match="max_split_size_mb"):
                torch.ones(1, device="cuda")
        with pytest.raises(ValueError, match="max_split_size_mb"):
            _set("max_split_size_mb:5")


def test_settings_change_at_any_time() -> None:
    with mx.virtual("T4"), mx.record() as recording:
        first = _thirty()
        _set("expandable_segments:True")
        second = _thirty()
        assert _reserved() == 30 + 40
        _set("max_split_size_mb:64")  # leaves expandable segments on
        third = _thirty()
        assert _reserved() == 30 + 60  # the second and the third have three pages of 20 MiB
        assert torch._C._accelerator_getAllocatorSettings() == "max_split_size_mb:64"
        del first, second, third
    assert recording.tape.meta.settings == "max_split_size_mb:64,expandable_segments:True"
    assert [note.split(" while it had memory")[0] for note in recording.tape.meta.notes] == [
        "the program changed the allocator settings to expandable_segments:True",
        "the program changed the allocator settings to max_split_size_mb:64",
    ]


def test_settings_from_before_the_first_request_need_no_note() -> None:
    with mx.virtual("T4"), mx.record() as recording:
        _set("expandable_segments:True")
        _thirty()
        assert _reserved() == 40
    assert (recording.tape.meta.settings, recording.tape.meta.notes) == ("expandable_segments:True", ())


def test_settings_that_the_user_asks_for_hold() -> None:
    with mx.virtual("T4", settings="large_segment_size_mb:40"), mx.record() as recording:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        _thirty()
        _set("expandable_segments:True")
        _thirty()
        assert _reserved() == 30
    assert recording.tape.meta.settings == "large_segment_size_mb:40"
    assert set(recording.tape.meta.notes) == {
        "the program's own allocator settings, expandable_segments:True, were left out: this run was asked for "
        "large_segment_size_mb:40"
    }


def test_a_search_can_try_other_settings_than_those_of_a_script(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        'import os\nos.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"\nimport torch\n'
        'x = torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")\n'
    )

    def tape(**knobs: str) -> Tape:
        return run(Script(path), mx.Knobs(**knobs), machine_of("T4")).tape

    own, other = tape(), tape(settings="max_split_size_mb:64")
    assert (own.meta.settings, other.meta.settings) == ("expandable_segments:True", "max_split_size_mb:64")
    assert (peak(own, "reserved")[0], peak(other, "reserved")[0]) == (40 * MIB, 30 * MIB)
    assert VARIABLES[0] not in os.environ


def test_a_step_that_sets_them_is_not_derived_from_another_machine() -> None:
    def loss(output: torch.Tensor) -> torch.Tensor:
        _set("expandable_segments:True")
        return output.mean()

    step = mx.Step(torch.nn.Linear(4096, 2048), torch.zeros(1024, 4096), loss=loss, optimizer=torch.optim.SGD)
    for gpu in ("T4", "A10"):
        tape = run(step, machine=machine_of(gpu)).tape
        assert tape.meta.settings == "expandable_segments:True"
