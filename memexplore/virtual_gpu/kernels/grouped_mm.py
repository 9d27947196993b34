"""Memory of grouped matrix products, which multiply all experts of a mixture at once.

In: the op's arguments. Out: a `Plan`. Source: _grouped_mm_cuda in cuda/GroupedBlas.cpp, its checks, output and loop in
GroupedMMUtils.h, the fused kernel in cuda/GroupMM.cu. The requests do not depend on how the rows are distributed over
the groups.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.tape import Category
from memexplore.virtual_gpu.kernels import cuda_build
from memexplore.virtual_gpu.kernels.cublas_workspace import PRODUCT, cublas_size
from memexplore.virtual_gpu.kernels.plan import Free, NewTensor, Output, Plan, Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import argument
from memexplore.virtual_gpu.tensors import values

NOTE = "the workspace of a fused grouped matrix product is an estimate: 640 bytes for each multiprocessor"
_TYPES = (torch.bfloat16, torch.float32, torch.float16)


def _check(matrix: torch.Tensor) -> None:
    """Raise RuntimeError unless rows or columns start at multiples of 16 bytes.

    Source: check_valid_strides_and_return_transposed.
    """
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    if down == 1 and right >= max(1, rows):
        leading = right
    elif right == 1 and down >= max(1, columns):
        leading = down
    else:
        raise RuntimeError(
            f"Invalid strides/sizes, got {list(matrix.stride())} for strides and {list(matrix.shape)} for sizes"
        )
    if leading * matrix.dtype.itemsize % 16:
        raise RuntimeError("strides should be multiple of 16 bytes")


def _output(first: torch.Tensor, second: torch.Tensor, groups: int) -> NewTensor:
    """Return the output, each row padded to a multiple of 16 bytes: create_grouped_gemm_output_tensor."""
    columns = second.shape[-1]
    aligned = 16 // first.dtype.itemsize
    padded = -(-columns // aligned) * aligned
    rows = first.shape[-2]
    shape: tuple[int, ...] = (rows, columns)
    stride: tuple[int, ...] = (padded, 1)
    if first.dim() == second.dim():
        shape, stride = (groups, rows, columns), (rows * padded, padded, 1)
    # empty_strided allocates up to the last element, without the padding of the last row.
    count = sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True)) + 1 if 0 not in shape else 0
    return NewTensor(shape, stride, 0, first.dtype, count * first.dtype.itemsize, False)


def product(args: Any, kwargs: Any) -> Plan:
    """_grouped_mm: one kernel for bfloat16 on Hopper and Blackwell (9.0, 10.0), else one product per group."""
    first, second = args[:2]
    offsets = argument(args, kwargs, 2, "offs")
    for matrix in (first, second):
        if matrix.dtype not in _TYPES:
            raise RuntimeError(f"Expected Float32, BFloat16 or Float16 matrix, got {matrix.dtype}")
        _check(matrix)
    if first.dtype is not second.dtype:
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {first.dtype} != {second.dtype}")
    ragged = first.dim() == 2 or second.dim() == 2
    if not (first.dim() == second.dim() == 2) and first.shape[-1] != second.shape[-2]:
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    if (offsets is not None) != ragged:
        raise RuntimeError("Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d")
    groups = offsets.shape[0] if offsets is not None else first.shape[0]
    output = _output(first, second, groups)
    rules = cuda_build.current()
    if first.dtype is torch.bfloat16 and rules.compute_capability in ((9, 0), (10, 0)):
        values.note(NOTE)
        even = -(-groups // 2) * 2
        # Per group: three pointers, three 32-bit extents, three strides of 8 bytes.
        problems = even * 3 * 8 + groups * 3 * 4 + groups * 3 * 8
        # Tensor maps of 128 bytes for two operands and the epilogue, for each multiprocessor.
        workspace = 5 * 128 * rules.multiprocessors
        fused: Requests = [Output(0), Scratch(problems), Scratch(workspace, Category.WORKSPACE)]
        return Plan([output], None, fused)
    if rules.release < (2, 15):
        return Plan([output], None, libraries=PRODUCT)
    # _grouped_mm_fallback multiplies the groups one after the other, each with a transient workspace.
    size = cublas_size(rules.compute_capability, rules.release)
    each = ((Scratch(size, Category.WORKSPACE), Free(number)) for number in range(groups))
    return Plan([output], None, [Output(0), *(request for pair in each for request in pair)])
