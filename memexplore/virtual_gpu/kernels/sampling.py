"""grid_sample: which kernel runs, and the memory of cuDNN's.

In: the op's arguments. Out: the op, run as on CUDA, or `Plan`s. Source: grid_sampler in GridSampler.cpp,
cond_cudnn_grid_sampler in GridSamplerUtils.h, cudnn/GridSampler.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import Plan, Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import nbytes, new, new_outputs

_aten = torch.ops.aten
_BILINEAR, _ZEROS = 0, 0
_TYPES = (torch.float16, torch.float32, torch.float64)


def _cudnn_supports(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _TYPES and 0 < tensor.numel() < 2**31


def grid_sampler(
    tensor: torch.Tensor, grid: torch.Tensor, interpolation: int, padding: int, align_corners: bool
) -> torch.Tensor:
    """cuDNN's kernel for 2-d images, bilinear, with zeros outside and aligned corners; else torch's own kernels."""
    cudnn_mode = interpolation == _BILINEAR and padding == _ZEROS and align_corners and tensor.dim() == 4
    if (
        cudnn_mode
        and torch.backends.cudnn.enabled
        and _cudnn_supports(tensor)
        and _cudnn_supports(grid)
        and tensor.shape[1] <= 1024
    ):
        return _aten.cudnn_grid_sampler(tensor, grid)
    native = _aten.grid_sampler_2d if tensor.dim() == 4 else _aten.grid_sampler_3d
    return native(tensor, grid, interpolation, padding, align_corners)


def _copies(expanded: list[torch.Tensor], grid: torch.Tensor) -> Requests:
    """Copies of expanded tensors (contiguousIfZeroInStrides) and of a non-contiguous grid."""
    copies: Requests = [Scratch(nbytes(tensor)) for tensor in expanded if 0 in tensor.stride()]
    return copies if grid.is_contiguous() else [*copies, Scratch(nbytes(grid))]


def forward(args: Any, kwargs: Any) -> Plan:
    """cudnn_grid_sampler_forward: copies, result."""
    tensor, grid = args
    outputs: list[Any] = [new((*tensor.shape[:2], *grid.shape[1:3]), tensor.dtype)]
    return Plan(outputs, None, [*_copies([tensor], grid), *new_outputs(outputs)])


def backward(args: Any, kwargs: Any) -> Plan:
    """cudnn_grid_sampler_backward: copies, then both gradients, whether or not both are needed."""
    tensor, grid, gradient = args
    outputs: list[Any] = [new(tuple(tensor.shape), tensor.dtype), new(tuple(grid.shape), grid.dtype)]
    return Plan(outputs, tuple, [*_copies([tensor, gradient], grid), *new_outputs(outputs)])
