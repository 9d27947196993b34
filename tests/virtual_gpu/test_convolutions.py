"""Convolutions: their workspaces, and a run in which the workspace does not fit."""

import pytest
import torch
from torch import nn

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.run.simulate import simulate
from memexplore.tape import Action, Category, Phase

MIB = 1024**2


def workspaces(layer: nn.Module, *shape: int, gpu: str = "A100", dtype: torch.dtype = torch.float32) -> list[int]:
    """Return the bytes of the workspaces of a forward pass."""
    with virtual(gpu):
        layer, x = layer.to("cuda", dtype), torch.ones(shape, device="cuda", dtype=dtype)
        with record() as recording:
            layer(x)
    tape = recording.tape
    return tape.size[(tape.action == Action.ALLOC) & (tape.category == Category.WORKSPACE)].tolist()


def test_a_window_of_one_pixel_is_a_product_without_a_workspace():
    assert workspaces(nn.Conv2d(32, 64, 1), 1, 32, 100, 100) == []
    assert workspaces(nn.Conv2d(32, 64, 1), 1, 32, 100, 100, dtype=torch.bfloat16) == []
    # With a stride it reads a copy: input and result (50 x 50 pixels) are converted, and there are 16 bytes beside.
    converted = 4 * (32 * 100 * 100 + 64 * 50 * 50) + 16
    assert workspaces(nn.Conv2d(32, 64, 1, stride=2), 1, 32, 100, 100) == [converted]


def test_tensor_cores_of_turing_convert_operands_of_half_precision():
    # 2 bytes an element, and 16 beside them.
    converted = 2 * (8 * 64 * 56 * 56 + 64 * 64 * 9 + 8 * 64 * 56 * 56) + 16
    layer, shape = nn.Conv2d(64, 64, 3, padding=1), (8, 64, 56, 56)
    assert workspaces(layer, *shape, gpu="T4", dtype=torch.float16) == [converted]
    assert workspaces(layer, *shape, gpu="GTX 1080 Ti", dtype=torch.float16) != [converted]


def test_ampere_computes_aligned_results_of_few_channels_without_conversion():
    # Hopper converts input and weight: 4 bytes each, and 16 beside.
    converted = 4 * (8 * 64 * 56 * 56 + 64 * 64 * 9) + 16
    layer, shape = nn.Conv2d(64, 64, 3, padding=1), (8, 64, 56, 56)
    assert workspaces(layer, *shape) == []
    assert workspaces(layer, *shape, gpu="H100") == [converted + 4 * 8 * 64 * 56 * 56]
    assert len(workspaces(nn.Conv2d(63, 64, 3, padding=1), 8, 63, 56, 56)) == 1
    assert len(workspaces(nn.Conv2d(256, 64, 3, padding=1), 8, 256, 56, 56)) == 1


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_depthwise_convolution_has_no_cudnn_workspace(layer, dtype):
    space = (20, 20) if layer is nn.Conv2d else (20, 20, 20)
    assert workspaces(layer(16, 16, 3, groups=16), 1, 16, *space, dtype=dtype) == []


def test_a_convolution_runs_without_a_workspace_that_does_not_fit():
    # 64 MiB each for input and result, and a workspace that holds both: no 200 MiB do.
    def run() -> None:
        layer = nn.Conv2d(16, 16, 3, padding=1).to("cuda", torch.float16)
        layer(torch.empty(1, 16, 1448, 1448, device="cuda", dtype=torch.float16))

    tape = simulate(run, gpu="200MiB", release="2.13")
    assert not (tape.action == Action.OOM).any()
    assert tape.size[tape.category == Category.WORKSPACE].tolist() == []
    tape = simulate(run, gpu="400MiB", release="2.13")
    assert (tape.size[tape.category == Category.WORKSPACE] > 120 * MIB).any()


def test_a_backward_runs_without_a_workspace_that_does_not_fit():
    # 64 MiB each for input, result and two gradients; the workspace of each gradient holds 128 MiB.
    def run() -> None:
        layer = nn.Conv2d(16, 16, 3, padding=1).to("cuda", torch.float16)
        images = torch.empty(1, 16, 1448, 1448, device="cuda", dtype=torch.float16, requires_grad=True)
        result = layer(images)
        result.backward(torch.empty_like(result))

    tape = simulate(run, gpu="300MiB", release="2.13")
    assert not (tape.action == Action.OOM).any()
    backward = tape.phase == Phase.BACKWARD
    assert tape.size[backward & (tape.category == Category.WORKSPACE)].tolist() == []
    tape = simulate(run, gpu="600MiB", release="2.13")
    backward = tape.phase == Phase.BACKWARD
    assert (tape.size[backward & (tape.category == Category.WORKSPACE)] > 120 * MIB).any()


def test_settings_that_change_while_the_gpu_is_on_decide_the_next_convolution():
    # 3 x 16 x 64 x 64 pixels and 16 x 16 x 5 x 5 weights of 4 bytes: on tensor cores input, weight and result, and 16
    # bytes, which fill a block of 512.
    weight, images = 16 * 16 * 5 * 5 * 4, 3 * 16 * 64 * 64 * 4
    layer, cudnn = nn.Conv2d(16, 16, 5, padding=2), torch.backends.cudnn
    before = cudnn.conv.fp32_precision
    with virtual("H100"), torch.no_grad():
        layer, x = layer.cuda(), torch.ones(3, 16, 64, 64, device="cuda")

        def workspace() -> int:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            layer(x)
            return torch.cuda.max_memory_allocated() - held - images

        assert workspace() == images + weight + images + 512
        with cudnn.flags(enabled=False, allow_tf32=True):
            assert workspace() == 0
        try:
            # From then on `cudnn.allow_tf32` raises an error.
            cudnn.conv.fp32_precision = "ieee"
            assert workspace() == 0
        finally:
            cudnn.conv.fp32_precision = before
