"""Memory of embedding bags, grid_sample, and dropout between recurrent layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore.tape import Action
from tests.virtual_gpu.test_encoder import allocations

ROWS, WIDTH, COUNT, BAGS = 500, 16, 192, 64


def bags(mode, **options):
    def make():
        layer = nn.EmbeddingBag(ROWS, WIDTH, mode=mode, **options).cuda()
        indices = torch.zeros(COUNT, dtype=torch.int64, device="cuda")
        offsets = torch.arange(0, COUNT, 3, device="cuda")

        def run():
            result = layer(indices, offsets)
            result.backward(torch.ones_like(result))
            return result

        return run

    requests = allocations(make)
    return [[size for op, size in requests if op == name] for name in ("_embedding_bag", "_embedding_bag_backward")]


def test_a_bag_keeps_its_size_and_the_bag_of_each_index():
    # cuda/EmbeddingBag.cu: bag_size, offset2bag, output; 64 and 192 indices of 8 bytes
    assert bags("sum")[0] == [BAGS * 8, COUNT * 8, BAGS * WIDTH * 4]


def test_a_maximum_keeps_its_indices():
    assert bags("max")[0] == [BAGS * 8, COUNT * 8, BAGS * WIDTH * 4, BAGS * WIDTH * 8]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_of_sums_are_sorted_and_summed_in_segments(mode):
    backward = bags(mode)[1]
    # sorted and original indices and a range; the gradient; at the end one row per segment, 192 / 10 + 192 rows
    assert backward[:3] == 3 * [COUNT * 8]
    assert backward[4] == ROWS * WIDTH * 4
    assert backward[-2:] == [(COUNT // 10 + COUNT) * 8, (COUNT // 10 + COUNT) * WIDTH * 4]


def test_gradients_scaled_by_frequency_count_the_indices():
    assert bags("sum", scale_grad_by_freq=True)[1].count(COUNT * 8) == bags("sum")[1].count(COUNT * 8) + 1


def test_gradients_of_a_maximum_need_no_sort():
    assert bags("max")[1] == [ROWS * WIDTH * 4]


# --- grid_sample ----------------------------------------------------------------------------------------------------

PICTURE, GRID, SAMPLED = 2 * 3 * 16 * 16 * 4, 2 * 8 * 8 * 2 * 4, 2 * 3 * 8 * 8 * 4


def sampled(dtype=torch.float32, shape=(2, 3, 16, 16), grid=(2, 8, 8, 2), **options):
    def make():
        picture = torch.ones(shape, device="cuda", dtype=dtype, requires_grad=True)
        points = torch.zeros(grid, device="cuda", dtype=dtype)

        def run():
            result = functional.grid_sample(picture, points, **options)
            result.backward(torch.ones_like(result))
            return result

        return run

    return [entry for entry in allocations(make) if "grid_sampler" in entry[0]]


def test_cudnn_computes_both_gradients_if_one_is_required():
    forward, *backward = sampled(align_corners=True)
    assert forward == ("cudnn_grid_sampler", SAMPLED)
    assert backward == [("cudnn_grid_sampler_backward", PICTURE), ("cudnn_grid_sampler_backward", GRID)]


def test_the_native_kernel_has_the_same_sizes():
    # grid_sampler_2d_backward_cuda in cuda/GridSampler.cpp: grad_input if it is needed, grad_grid always
    forward, *backward = sampled(align_corners=False)
    assert forward == ("grid_sampler_2d", SAMPLED)
    assert backward == [("grid_sampler_2d_backward", PICTURE), ("grid_sampler_2d_backward", GRID)]


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({"mode": "nearest"}, "grid_sampler_2d"),
        ({"padding_mode": "border"}, "grid_sampler_2d"),
        ({"dtype": torch.bfloat16}, "grid_sampler_2d"),
        ({"dtype": torch.float16}, "cudnn_grid_sampler"),
        ({"shape": (1, 1025, 4, 4), "grid": (1, 4, 4, 2)}, "grid_sampler_2d"),
        ({"shape": (1, 2, 4, 4, 4), "grid": (1, 2, 2, 2, 3)}, "grid_sampler_3d"),
    ],
)
def test_the_kernel_of_grid_sample_follows_its_arguments(changes, kernel):
    # cond_cudnn_grid_sampler in GridSamplerUtils.h
    assert sampled(align_corners=True, **changes)[0][0] == kernel


# --- dropout between recurrent layers -------------------------------------------------------------------------------


def recurrent(dropout):
    def run():
        layer = nn.LSTM(32, 32, 2, dropout=dropout).cuda()
        layer(torch.ones(10, 4, 32, device="cuda"))[0].sum().backward()

    return mx.simulate(run, gpu="A100", release="2.13")


def reserved(dropout):
    tape = recurrent(dropout)
    forward = (tape.action == Action.ALLOC) & (tape.op == tape.ops.index("aten::_cudnn_rnn"))
    return int(tape.size[np.flatnonzero(forward)[-1]])


def test_dropout_keeps_a_bit_for_each_value_between_layers():
    # 10 steps, 4 sequences, 32 numbers, once between two layers: 1280 bits
    assert reserved(0.2) - reserved(0.0) == 10 * 4 * 32 // 8


def test_the_random_state_of_cudnn_is_allocated_once():
    def run():
        layer = nn.LSTM(32, 32, 2, dropout=0.2).cuda()
        for _ in range(2):
            layer(torch.ones(10, 4, 32, device="cuda"))

    tape = mx.simulate(run, gpu="H100")
    # As measured on an H100: 132 multiprocessors of 2048 threads, 24 bytes each
    assert np.count_nonzero((tape.action == Action.ALLOC) & (tape.size == 132 * 2048 * 24)) == 1
