"""Estimated workspaces beside those that cuDNN 9.19 took on an H100 with torch 2.11 (tests/data/h100_cudnn.json.gz)."""

from __future__ import annotations

import gzip
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch

from memexplore.virtual_gpu.kernels import recurrent
from memexplore.virtual_gpu.kernels.tensor_core_convolutions import Convolution, Pass, Precision, workspace

MEASURED = json.loads(gzip.decompress((pathlib.Path(__file__).parents[1] / "data" / "h100_cudnn.json.gz").read_bytes()))
PRECISIONS = {"tf32": Precision.TF32, "fp32": Precision.FP32, "fp16": Precision.FP16, "bf16": Precision.BF16}
DTYPES = {"tf32": torch.float32, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MODES = {"RNN": recurrent.TANH, "LSTM": recurrent.LSTM, "GRU": recurrent.GRU}


def convolution(row: list[Any]) -> Convolution:
    images, inputs, outputs, window, stride, side, result, dims, precision, last = row[:10]
    return Convolution(
        (images, inputs) + (side,) * dims,
        (outputs, inputs) + (window,) * dims,
        (images, outputs) + (result,) * dims,
        stride,
        PRECISIONS[precision],
        last and inputs > 1,  # one channel is in both formats
    )


def measured_and_predicted(of: Pass) -> np.ndarray:
    column = {Pass.RESULT: 10, Pass.INPUT_GRADIENT: 11, Pass.WEIGHT_GRADIENT: 12}[of]
    return np.array([(row[column], workspace(convolution(row), of)) for row in MEASURED["convolutions"]], float).T


@pytest.mark.parametrize(
    ("of", "share", "error"),
    [(Pass.RESULT, 0.87, 0.1), (Pass.INPUT_GRADIENT, 0.87, 0.06), (Pass.WEIGHT_GRADIENT, 0.55, 0.105)],
)
def test_most_workspaces_are_the_measured_ones(of: Pass, share: float, error: float) -> None:
    measured, predicted = measured_and_predicted(of)
    # A block of the allocator has a multiple of 512 bytes.
    assert np.mean(abs(predicted - measured) <= 600) >= share
    assert abs(predicted - measured).sum() / measured.sum() <= error


def test_aligned_channels_last_need_no_conversion() -> None:
    shapes = (8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56)
    assert workspace(Convolution(*shapes, 1, Precision.FP16, channels_last=True), Pass.RESULT) == 0


def test_windows_that_do_not_overlap_are_converted() -> None:
    # The gradient of the input is the transposed convolution: 2 x 2 pixels for each one.
    shapes = (4, 32, 64, 64), (64, 32, 2, 2), (4, 64, 32, 32)
    made = workspace(Convolution(*shapes, 2, Precision.TF32, channels_last=False), Pass.INPUT_GRADIENT)
    assert made == 4 * (4 * 32 * 64**2 + 64 * 32 * 2**2 + 4 * 64 * 32**2) + 16


def test_small_weight_gradients_have_no_workspace() -> None:
    shapes = (1, 16, 8, 8), (16, 16, 3, 3), (1, 16, 8, 8)
    assert workspace(Convolution(*shapes, 1, Precision.TF32, channels_last=False), Pass.WEIGHT_GRADIENT) == 0


def test_fourier_transforms_of_a_large_window_are_the_measured_ones() -> None:
    # Golden scenario cnn_sgd: nine times what the converted operands take.
    shapes = (32, 32, 32, 32), (64, 32, 5, 5), (32, 64, 32, 32)
    assert workspace(Convolution(*shapes, 1, Precision.TF32, channels_last=False), Pass.WEIGHT_GRADIENT) == 112_197_632


def test_windows_with_gaps_are_not_transformed() -> None:
    shapes = (2, 256, 28, 28), (256, 256, 3, 3), (2, 256, 28, 28)
    made = [
        workspace(Convolution(*shapes, 1, Precision.TF32, False, dilation), Pass.WEIGHT_GRADIENT) for dilation in (1, 2)
    ]
    assert made == [16_662_528, 5_570_576]


def test_an_empty_batch_has_no_workspace() -> None:
    shapes = (0, 64, 56, 56), (64, 64, 3, 3), (0, 64, 56, 56)
    for precision in Precision:
        for of in Pass:
            assert workspace(Convolution(*shapes, 1, precision, channels_last=False), of) == 0


def sizes(row: list[Any]) -> recurrent.Sizes:
    mode, hidden, inputs, layers, both, batch, length, precision, dropout = row[:9]
    source = torch.empty(batch, length, inputs, dtype=DTYPES[precision], device="meta")
    arguments = (source, None, None, None, None, None, MODES[mode], hidden, 0, layers)
    return recurrent.Sizes((*arguments, True, dropout, True, both, [], None))


def test_reserve_spaces_of_recurrent_layers_are_the_measured_ones() -> None:
    assert np.mean([sizes(row).reserve == row[9] for row in MEASURED["recurrent"]]) >= 0.99


def test_workspaces_of_recurrent_layers_are_near_the_measured_ones() -> None:
    errors = [abs(sizes(row).workspace / row[10] - 1) for row in MEASURED["recurrent"]]
    assert np.median(errors) <= 0.02
    assert np.quantile(errors, 0.9) <= 0.14
