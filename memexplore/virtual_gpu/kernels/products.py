"""Memory of matrix products: copies of operands that cuBLAS cannot read, and the workspace of a bias epilogue.

In: the op's arguments. Out: `Requests`. Workspaces that are kept are in cublas_workspace.py. Sources are below
aten/src/ATen/native unless they say otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memexplore.tape import Category
from memexplore.virtual_gpu.kernels import cuda_build
from memexplore.virtual_gpu.kernels.cublas_workspace import EPILOGUE, Library, Workspaces, add_to_requests
from memexplore.virtual_gpu.kernels.plan import Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import is_contiguous, nbytes, new_outputs


def _copies(args: Sequence[Any], outputs: list[Any]) -> Requests:
    """Copies of operands that cuBLAS cannot read as row-major or column-major, such as an expanded gradient.

    Source: prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas in cuda/Blas.cpp; order as recorded with torch
    2.6.
    """
    copies: Requests = []
    for tensor in args:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            continue
        rows, columns = tensor.shape[-2:]
        down, right = tensor.stride()[-2:]
        by_column = down == 1 and right >= max(1, rows)
        by_row = right == 1 and down >= max(1, columns)
        dense = tensor.is_contiguous() or (tensor.dim() == 2 and is_contiguous(tensor, (1, 0)))
        if not (by_column or by_row or (dense and 0 not in (down, right))):
            copies.append(Scratch(nbytes(tensor)))
    return [*new_outputs(outputs), *copies] if copies else []


def two_operands(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """mm and bmm: copies of their operands."""
    return _copies(args[:2], outputs) or None


def added(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """baddbmm, and addmm without an epilogue: copies of the second and third argument."""
    return _copies(args[1:3], outputs) or None


def has_epilogue(args: Any, kwargs: Any) -> bool:
    """Return whether cuBLASLt adds the bias of an addmm (addmm_out_cuda_impl in cuda/Blas.cpp).

    Not where the second matrix has one row or column; a first matrix of one row does not matter.
    """
    bias, _, second = args[:3]
    if bias.dim() != 1 or not bias.is_contiguous():
        return False
    return min(second.shape) > 1 and kwargs.get("beta", 1) == 1


def with_bias(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """addmm with a bias, which cuBLASLt's epilogue adds: until torch 2.8 with a workspace of 1 MiB for the call.

    Source: gemm_and_bias in aten/src/ATen/cuda/CUDABlas.cpp. The 1 MiB as recorded with torch 2.1 and 2.2. Later
    releases keep a workspace (`cublas_workspace.cublaslt_size`).
    """
    if cuda_build.current().release >= (2, 9) or not has_epilogue(args, kwargs):
        return added(args, kwargs, outputs)
    copies = _copies(args[1:3], outputs) or new_outputs(outputs)
    return [*copies, Scratch(1024**2, Category.WORKSPACE)]


def triangular_solve(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Pointers to the matrices of a batch, but for few large ones: triangular_solve_kernel.

    Source: cuda/linalg/BatchLinearAlgebra.cpp.
    """
    # linalg_solve_triangular has the matrix first and `upper` by name, triangular_solve the matrix second.
    matrix = args[0] if "upper" in kwargs else args[1]
    count = math.prod(matrix.shape[:-2])
    if not matrix.numel() or (count <= 8 and matrix.shape[-1] >= 64):
        return None
    return [*new_outputs(outputs), Scratch(8 * count), Scratch(8 * count)]


def libraries_of_addmm(
    args: Any, kwargs: Any, requests: Requests | None, outputs: list[Any], workspaces: Workspaces
) -> tuple[Requests | None, tuple[Library, ...]]:
    """addmm: as `cublas_workspace.add_to_requests`; with an epilogue cuBLASLt's workspace too."""
    requests, libraries = add_to_requests(args, kwargs, requests, outputs, workspaces)
    return requests, EPILOGUE if libraries and has_epilogue(args, kwargs) else libraries
