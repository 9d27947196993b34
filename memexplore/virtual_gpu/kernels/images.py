"""Request the memory of padding, interpolation, windows, samples and boxes of images.

Sources are below aten/src/ATen/native; of grid_sample: grid_sampler in GridSampler.cpp, cond_cudnn_grid_sampler in
GridSamplerUtils.h, cudnn/GridSampler.cpp.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import (
    Free,
    NewTensor,
    OpRunner,
    Output,
    Plan,
    Requests,
    Scratch,
    nbytes,
    new,
    new_outputs,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu
from memexplore.virtual_gpu.values import notes

_aten = torch.ops.aten


@rule(
    Kind.REQUESTS,
    "cuda/ReflectionPad.cu",
    _aten.reflection_pad1d.default,
    _aten.reflection_pad1d_backward.default,
    _aten.reflection_pad2d.default,
    _aten.reflection_pad2d_backward.default,
    _aten.reflection_pad3d.default,
    _aten.reflection_pad3d_backward.default,
)
def reflection_pad(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """A copy of non-contiguous input, after the result: cuda/ReflectionPad.cu, as recorded with torch 2.3 and 2.5."""
    return None if args[0].is_contiguous() else [*new_outputs(outputs), Scratch(nbytes(args[0]))]


@rule(
    Kind.REQUESTS,
    "cuda/UpSampleNearest3d.cu",
    _aten.upsample_nearest3d.default,
    _aten._upsample_nearest_exact3d.default,
)
def upsample_nearest3d(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """The kernel does not support channels_last_3d and works on copies: cuda/UpSampleNearest3d.cu.

    As recorded with torch 2.3.
    """
    source, result = args[0], outputs[0]
    channels_last = result.stride[1] == 1 and result.shape[1] != 1
    copies: Requests = [Scratch(result.size)] if channels_last else []
    if not source.is_contiguous():
        copies.append(Scratch(nbytes(source)))
    return [*new_outputs(outputs), *copies] if copies else None


@rule(Kind.REQUESTS, "cuda/Im2Col.cu", _aten.im2col.default)
@rule(Kind.REQUESTS, "cuda/Col2Im.cu", _aten.col2im.default)
def begins_like_input(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """im2col, col2im: the result begins with the input's size and is resized, which keeps a larger storage.

    Source: im2col_cuda in cuda/Im2Col.cu and col2im_cuda in cuda/Col2Im.cu, `at::empty_like(input)`.
    """
    size = nbytes(args[0])
    if type(outputs[0]) is not NewTensor or not size:
        return None
    if outputs[0].size > size:
        return [Scratch(size), Output(0), Free(0)]
    outputs[0] = outputs[0]._replace(size=size)
    return None


@rule(Kind.DATA_DEPENDENT, "torchvision/csrc/ops/cuda/nms_kernel.cu", "torchvision.nms.default")
def non_maximum_suppression(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """torchvision's nms keeps all boxes: nms_kernel in torchvision/csrc/ops/cuda/nms_kernel.cu.

    Its temporaries: the order of the scores, the sorted boxes, a bit for each pair of boxes, and a flag for each box.
    """
    boxes = args[0]
    if not is_on_gpu(boxes):
        return NotImplemented
    notes.assume("nms keeps every box")
    count = boxes.shape[0]
    pairs = count * math.ceil(count / 64) * 8
    scratch: Requests = [Scratch(size) for size in (count * 8, count * 4 * boxes.element_size(), pairs, count) if size]
    kept = NewTensor((count,), (1,), 0, torch.int64, count * 8, False)
    return runner.run_plan(Plan([kept], None, [*scratch, Output(0)]), func, args, [])


# --- grid_sample ----------------------------------------------------------------------------------------------------

_BILINEAR, _ZEROS = 0, 0

_TYPES = (torch.float16, torch.float32, torch.float64)


def _cudnn_supports(tensor: torch.Tensor) -> bool:
    return tensor.dtype in _TYPES and 0 < tensor.numel() < 2**31


@rule(Kind.COMPOSITE, "GridSampler.cpp", _aten.grid_sampler.default)
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


@rule(Kind.PLAN, "cudnn/GridSampler.cpp", _aten.cudnn_grid_sampler.default)
def cudnn_grid_sampler(args: Any, kwargs: Any) -> Plan:
    """cudnn_grid_sampler_forward: copies, result."""
    tensor, grid = args
    outputs: list[Any] = [new((*tensor.shape[:2], *grid.shape[1:3]), tensor.dtype)]
    return Plan(outputs, None, [*_copies([tensor], grid), *new_outputs(outputs)])


@rule(Kind.PLAN, "cudnn/GridSampler.cpp", _aten.cudnn_grid_sampler_backward.default)
def cudnn_grid_sampler_backward(args: Any, kwargs: Any) -> Plan:
    """cudnn_grid_sampler_backward: copies, then both gradients, whether or not both are needed."""
    tensor, grid, gradient = args
    outputs: list[Any] = [new(tuple(tensor.shape), tensor.dtype), new(tuple(grid.shape), grid.dtype)]
    return Plan(outputs, tuple, [*_copies([tensor, gradient], grid), *new_outputs(outputs)])
