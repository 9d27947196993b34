"""cuBLAS workspaces: size by compute capability and torch release, lifetime by release."""

from __future__ import annotations

import gc

import pytest
import torch

import memexplore as mx
from memexplore.tape import Action, Category
from memexplore.virtual_gpu.kernels.cublas_workspace import cublas_size
from tests.threads import at_once, in_thread

MIB = 1024**2
DEFAULT = 2 * 4 * MIB + 8 * 16 * 1024  # :4096:2:16:8


@pytest.mark.parametrize(
    ("capability", "release", "size"),
    [
        ((7, 5), (2, 15), DEFAULT),
        ((8, 9), (2, 15), DEFAULT),
        ((9, 0), (2, 6), 32 * MIB),
        ((10, 0), (2, 11), DEFAULT),
        ((10, 0), (2, 12), 32 * MIB),
        ((11, 0), (2, 13), DEFAULT),
        ((11, 0), (2, 14), 32 * MIB),
        ((12, 1), (2, 11), DEFAULT),
        ((12, 1), (2, 12), 32 * MIB),
    ],
)
def test_size_depends_on_capability_and_release(
    capability: tuple[int, int], release: tuple[int, int], size: int
) -> None:
    assert cublas_size(capability, release, "") == size


def kept_by_layer(release: str) -> list[int]:
    """Return the workspaces that a linear layer keeps on an H100, in the order of their requests."""

    def run() -> None:
        torch.nn.Linear(64, 32, device="cuda")(torch.ones(8, 64, device="cuda"))

    tape = mx.simulate(run, gpu="H100", release=release)
    made = (tape.action == Action.ALLOC) & (tape.category == Category.WORKSPACE)
    freed = tape.address[tape.action == Action.FREE_REQUESTED].tolist()
    return [int(tape.size[row]) for row in made.nonzero()[0] if int(tape.address[row]) not in freed]


@pytest.mark.parametrize(
    ("release", "sizes"),
    [("2.8", [32 * MIB]), ("2.9", [32 * MIB, MIB]), ("2.11", [32 * MIB, MIB]), ("2.12", [32 * MIB])],
)
def test_a_layer_with_a_bias_keeps_a_workspace_of_cublaslt_from_torch_2_9_to_2_11(
    release: str, sizes: list[int]
) -> None:
    assert kept_by_layer(release) == sizes


def test_environment_can_share_the_workspace_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
    assert kept_by_layer("2.11") == [32 * MIB]


def test_environment_overrides_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:1:16:2")
    assert cublas_size((12, 0), (2, 13)) == 4 * MIB + 2 * 16 * 1024


@pytest.mark.parametrize(("release", "alive"), [("2.14", 1), ("2.15", 0)])
def test_workspace_is_kept_up_to_torch_2_14(monkeypatch: pytest.MonkeyPatch, release: str, alive: int) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with mx.virtual("RTX 5090", release=release):
        matrix = torch.ones(8, 8, device="cuda")
        with mx.record() as recording:
            matrix @ matrix
            matrix @ matrix
    tape = recording.tape
    workspaces = tape.category == Category.WORKSPACE
    allocated = tape.size[workspaces & (tape.action == Action.ALLOC)].tolist()
    freed = tape.size[workspaces & (tape.action == Action.FREE_COMPLETED)].tolist()
    # One allocation that stays, or one for each of two products.
    assert allocated == [32 * MIB] * (1 if alive else 2)
    assert len(allocated) - len(freed) == alive


# Threads.


def _product() -> None:
    x = torch.ones(16, 16, device="cuda")
    x @ x


def test_each_thread_has_a_workspace_of_its_own():
    with mx.virtual("T4", release="2.13"):
        _product()
        assert torch.cuda.memory_allocated() == DEFAULT
        at_once(3, _product)
        assert torch.cuda.memory_allocated() == 4 * DEFAULT


def test_a_thread_takes_over_the_workspace_of_one_that_ended():
    with mx.virtual("T4", release="2.13"):
        for _ in range(3):
            in_thread(_product)
        assert torch.cuda.memory_allocated() == DEFAULT


def test_backward_passes_of_all_threads_share_a_workspace():
    # The autograd engine has one thread for each device.
    def train() -> None:
        x = torch.ones(16, 16, device="cuda", requires_grad=True)
        (x @ x).sum().backward()

    with mx.virtual("T4", release="2.13"):
        at_once(2, train)
        gc.collect()
        # Two forward passes, one autograd thread.
        assert torch.cuda.memory_allocated() == 3 * DEFAULT
