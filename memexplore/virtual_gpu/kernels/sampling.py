"""grid_sample: which kernel runs, what it requests.

Source: grid_sampler in GridSampler.cpp, cond_cudnn_grid_sampler in GridSamplerUtils.h, cudnn/GridSampler.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.virtual_gpu.dispatch.plans import Plan, Scratch
from memexplore.virtual_gpu.kernels.shapes import Requests, nbytes, new, places

_aten = torch.ops.aten
_BILINEAR, _ZEROS = 0, 0
_TYPES = (torch.float16, torch.float32, torch.float64)


def _cudnn_can(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _TYPES and 0 < tensor.numel() < 2**31


def grid_sampler(
    tensor: torch.Tensor, grid: torch.Tensor, interpolation: int, padding: int, align_corners: bool
) -> torch.Tensor:
    """cuDNN's kernel knows one way alone: pictures, bilinear, zeros outside, corners aligned."""
    plain = interpolation == _BILINEAR and padding == _ZEROS and align_corners and tensor.dim() == 4
    if plain and torch.backends.cudnn.enabled and _cudnn_can(tensor) and _cudnn_can(grid) and tensor.shape[1] <= 1024:
        return _aten.cudnn_grid_sampler(tensor, grid)
    native = _aten.grid_sampler_2d if tensor.dim() == 4 else _aten.grid_sampler_3d
    return native(tensor, grid, interpolation, padding, align_corners)


def _copies(expanded: list[torch.Tensor], grid: torch.Tensor) -> Requests:
    """contiguousIfZeroInStrides of some tensors, contiguous() of the grid."""
    found: Requests = [Scratch(nbytes(tensor)) for tensor in expanded if 0 in tensor.stride()]
    return found if grid.is_contiguous() else [*found, Scratch(nbytes(grid))]


def forward(args: Any, kwargs: Any) -> Plan:
    """cudnn_grid_sampler_forward."""
    tensor, grid = args
    outputs: list[Any] = [new((*tensor.shape[:2], *grid.shape[1:3]), tensor.dtype)]
    return Plan(outputs, None, [*_copies([tensor], grid), *places(outputs)], False, None)


def backward(args: Any, kwargs: Any) -> Plan:
    """cudnn_grid_sampler_backward: both gradients, whether they are wanted or not."""
    tensor, grid, gradient = args
    outputs: list[Any] = [new(tuple(tensor.shape), tensor.dtype), new(tuple(grid.shape), grid.dtype)]
    return Plan(outputs, tuple, [*_copies([tensor, gradient], grid), *places(outputs)], False, None)


PLANS: dict[Any, Callable[[Any, Any], Plan]] = {
    _aten.cudnn_grid_sampler.default: forward,
    _aten.cudnn_grid_sampler_backward.default: backward,
}
