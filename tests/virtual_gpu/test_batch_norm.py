"""Requests of batch normalization, as measured with torch 2.11 on an H100."""

import pytest
import torch
import torch.nn.functional as F

from tests.virtual_gpu.kernel_requests import requests

LAST = torch.channels_last
SHAPE = (2, 320, 64, 64)
"""8192 values for each of 320 channels."""


def forward(dtype, weights=torch.float32, shape=SHAPE, memory_format=LAST):
    def make():
        x = torch.ones(shape, dtype=dtype, device="cuda").contiguous(memory_format=memory_format)
        running = [torch.ones(shape[1], dtype=weights, device="cuda") for _ in range(4)]
        return lambda: F.batch_norm(x, *running, training=True)

    return requests(make, gpu="H100", release="2.11")


def backward(dtype, training, shape=SHAPE, memory_format=LAST):
    def make():
        x = torch.ones(shape, dtype=dtype, device="cuda").contiguous(memory_format=memory_format).requires_grad_()
        mean, deviation, *weights = [torch.ones(shape[1], device="cuda") for _ in range(4)]
        weights = [each.requires_grad_() for each in weights]
        y = F.batch_norm(x, mean, deviation, *weights, training=training)
        gradient = torch.ones_like(y)
        return lambda: torch.autograd.grad(y, [x, *weights], gradient)

    return [entry if isinstance(entry, int) else entry[1] for entry in requests(make, gpu="H100", release="2.11")]


def sizes(entries):
    return [entry[1] for entry in entries if not isinstance(entry, int)]


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        # 5 blocks of 64 channels, 128 of 64 values (float16: 52 of 160): 1072 + 4·5·129 + 512·5·128
        (torch.float32, SHAPE, 331_332),
        (torch.float16, SHAPE, 1072 + 4 * 5 * 53 + 512 * 5 * 52),
        # 1 block of 32 channels, 4096 of 64 values, 1639 of 160
        (torch.float32, (16, 32, 128, 128), 2_114_612),
        (torch.float16, (16, 32, 128, 128), 846_800),
    ],
)
def test_cudnn_in_channels_last_has_a_workspace(dtype, shape, size):
    entries = forward(dtype, shape=shape)
    assert sizes(entries)[-1] == size
    assert entries[3] == ("cudnn_batch_norm", size)


def test_cudnn_without_channels_last_has_no_workspace():
    assert sizes(forward(torch.float32, memory_format=torch.contiguous_format)) == [2 * 320 * 4096 * 4, 1280, 1280]


def test_cudnn_backward_in_channels_last_has_a_workspace():
    # 5 blocks of 64 channels, 86 of 96 values: 1056 + 4·5 + 512·5·86
    assert [size for size in backward(torch.float32, True) if size > 0] == [10_485_760, 1280, 1280, 221_236]


def test_half_precision_weights_run_in_the_native_kernel():
    entries = forward(torch.float16, torch.float16)
    # result, mean and deviation in float32; 16 blocks of 320 channels with 4·4 bytes, 10 semaphores
    blocks = (320 // 32, -(-8192 // (16 * 16)))
    assert {entry[0] for entry in entries if not isinstance(entry, int)} == {"native_batch_norm"}
    assert sizes(entries) == [5_242_880, 1280, 1280, 16 * 320 * blocks[1], 4 * blocks[0]]
    assert sizes(entries)[3:] == [163_840, 40]


def test_contiguous_input_needs_no_buffer_in_the_native_kernel():
    entries = forward(torch.bfloat16, shape=(16, 32, 128, 128), memory_format=torch.contiguous_format)
    assert sizes(entries) == [16_777_216, 128, 128]


def test_native_backward_in_channels_last_sums_for_each_channel_first():
    found = [size for size in backward(torch.bfloat16, True) if size > 0]
    # two sums, gradients of weight and bias, 2·4 bytes for each channel and block, semaphores, gradient of the input
    assert found == [1280, 1280, 1280, 1280, 8 * 320 * 32, 40, 5_242_880]


def test_evaluation_in_cudnn_computes_the_deviation_again():
    found = [size for size in backward(torch.float32, False) if size > 0]
    assert found == [1280, 1280, 1280, 1280, 1280, 81_920, 40, 10_485_760]


def test_rows_of_features_run_in_the_native_kernel():
    def make():
        x, parameters = torch.ones(3, 8, device="cuda"), [torch.ones(8, device="cuda") for _ in range(4)]
        return lambda: F.batch_norm(x, *parameters, training=True)

    assert {entry[0] for entry in requests(make) if not isinstance(entry, int)} == {"native_batch_norm"}
