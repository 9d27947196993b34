"""Memory of checkpointing on the virtual GPU: bytes after forward, tapes of plain checkpoints, growth with depth."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memexplore as mx
from memexplore.analysis.curves import by_category
from memexplore.figures.scaling import exponent, scaling
from memexplore.run.knobs.checkpoints.checkpointing import checkpointed
from memexplore.run.knobs.checkpoints.setting import Checkpoint
from memexplore.tape import Category
from tests.knobs.test_checkpointing import KINDS, on, vgg
from tests.models import MODELS

# --- memory on the virtual GPU --------------------------------------------------------------------------------------

UNIT = 64 * 128 * 4
"""Bytes of one activation of the models below: a batch of 64 of 128 float32 numbers."""


def blocks_of_three(depth):
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(128, 128), nn.GELU(), nn.SiLU())))


@pytest.mark.parametrize(
    ("kind", "units"),
    [
        # A block saves the inputs of Linear, GELU and SiLU; the first input is no activation, but the result is one.
        ("none", 16 * 3),
        # Only the input of each block, and the result of the last.
        ("every 1", 16),
        # Of two blocks the first keeps its input and the second three tensors.
        ("every 2", 8 * (1 + 3)),
        # Four segments of four blocks: three inputs and the result.
        ("sqrt", 4),
        # The input of each block but the first, the result, and the result of each Linear.
        ("keep matmuls", 16 + 16),
        # The result of each Linear, and the last: GELU's result is SiLU's input, and is recomputed with it.
        ("norms", 16 + 1),
    ],
)
def test_bytes_alive_after_forward(kind, units):
    alive = []

    def step():
        model, x = blocks_of_three(16).cuda(), torch.randn(64, 128).cuda()
        with checkpointed(model, on(kind)):
            torch.nn.functional.linear(x, model[0].weight, model[0].bias)  # the workspaces of matrix products
            before = torch.cuda.memory_allocated()
            y = model(x)
            alive.append(torch.cuda.memory_allocated() - before)
            y.sum().backward()

    mx.simulate(step, gpu="T4")
    assert alive == [units * UNIT]


class Stack(nn.Module):
    def __init__(self, depth=9):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 128))  # noqa: E731
        self.layers = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def _in_turn(layers, x):
    for layer in layers:
        x = layer(x)
    return x


class Written(Stack):
    """The same with `torch.utils.checkpoint` written in forward, around every `length` layers."""

    length = 1

    def forward(self, x):
        for start in range(0, len(self.layers), self.length):
            x = checkpoint(_in_turn, self.layers[start : start + self.length], x, use_reentrant=False)
        return x


def _rows(model_class, setting, length=1):
    def step():
        model, x = model_class().cuda(), torch.randn(64, 128).cuda()
        model.length = length
        with checkpointed(model, setting):
            for _ in range(2):
                model(x).sum().backward()

    tape = mx.simulate(step, gpu="T4")
    return list(
        zip(tape.action.tolist(), tape.size.tolist(), tape.address.tolist(), tape.category.tolist(), strict=True)
    )


@pytest.mark.parametrize(("kind", "length"), [("every 1", 1), ("sqrt", 3)])
def test_tape_equals_that_of_checkpoints_written_in_forward(kind, length):
    # 9 blocks in 3 segments of 3
    assert _rows(Stack, on(kind)) == _rows(Written, Checkpoint(), length)


def _peak(name, kind):
    build, batch, loss_of = MODELS[name]

    def step():
        model, x = build().cuda().train(), batch("cuda")
        with checkpointed(model, on(kind)):
            loss_of(model, x).backward()

    return int(by_category(mx.simulate(step, gpu="A100"))[Category.ACTIVATION].max())


@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_more_recomputation_lowers_the_peak_of_activations(name):
    peaks = {kind: _peak(name, kind) for kind in ("as written", "none", *KINDS[1:])}
    assert peaks["none"] == peaks["as written"]
    assert peaks["every 1"] < peaks["every 2"] < peaks["none"]
    assert peaks["sqrt"] < peaks["every 2"]
    assert peaks["every 1"] < peaks["keep matmuls"] < peaks["none"]
    assert peaks["every 1"] < peaks["norms"] < peaks["none"]


def test_in_place_modules_on_kept_results_run_on_the_virtual_gpu():
    def step():
        model, x = vgg().cuda(), torch.randn(2, 3, 8, 8).cuda()
        with checkpointed(model, on("keep matmuls")):
            model(x).sum().backward()

    assert len(mx.simulate(step, gpu="T4"))


# --- growth with depth ----------------------------------------------------------------------------------------------

DEPTHS = (16, 64, 256, 1024)


@functools.cache
def activation_peaks(kind):
    """Return for each depth: depth, and highest bytes of activations, recomputation included."""

    def step(depth):
        model, x = (
            nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(depth))),
            torch.randn(64, 32),
        )
        model, x = model.cuda(), x.cuda()
        with checkpointed(model, on(kind)):
            model(x).sum().backward()

    tapes = {depth: mx.simulate(functools.partial(step, depth), gpu="T4") for depth in DEPTHS}
    return [(depth, int(by_category(tape)[Category.ACTIVATION].max())) for depth, tape in tapes.items()]


def test_sqrt_checkpoints_make_activations_grow_with_the_square_root_of_depth():
    # Chen et al. 2016: √N segments of √N blocks, N = 1024 being 64 times 16 and √1024 8 times √16.
    assert 0.45 <= exponent(activation_peaks("sqrt")) <= 0.55
    # While the last segment is recomputed: √N - 1 inputs of segments (the first is no activation), and two saved
    # tensors of each of √N blocks, less the input of the first. 3√N - 2 for √N = 4, 8, 16, 32.
    assert [size // (64 * 32 * 4) for _, size in activation_peaks("sqrt")] == [10, 22, 46, 94]


def test_without_checkpoints_activations_grow_with_depth():
    # Two activations per block, the inputs of Linear and GELU; the first input is none and the result is one.
    # The loss is another one, of the allocator's smallest block, 512 bytes.
    assert activation_peaks("none") == [(depth, 2 * depth * 64 * 32 * 4 + 512) for depth in DEPTHS]
    assert exponent(activation_peaks("none")) == pytest.approx(1, abs=1e-3)


def test_scaling_figure_names_the_exponents():
    figure = scaling({"no checkpoints": activation_peaks("none"), "√N segments": activation_peaks("sqrt")})
    plain_line, root_line = figure.data
    assert plain_line.name == "no checkpoints: depth^1.00"
    assert root_line.name == f"√N segments: depth^{exponent(activation_peaks('sqrt')):.2f}"
    assert list(zip(root_line.x, root_line.y, strict=True)) == activation_peaks("sqrt")
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"


def test_an_exponent_needs_two_sizes():
    with pytest.raises(ValueError, match="two different sizes"):
        exponent([(4, 10), (4, 12)])
