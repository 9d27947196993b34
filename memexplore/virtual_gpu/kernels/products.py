"""What matrix products request beside their outputs: copies of operands, and the workspace of a bias's epilogue.

Sources are below aten/src/ATen/native in PyTorch unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memexplore.tape import Category
from memexplore.virtual_gpu.dispatch.plans import Scratch
from memexplore.virtual_gpu.kernels import cuda_build
from memexplore.virtual_gpu.kernels.shapes import Requests, contiguous, nbytes, places

_aten = torch.ops.aten
GEMMS = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.addmm_.default,
        _aten._addmm_activation.default,
        _aten.baddbmm.default,
        _aten.baddbmm_.default,
        _aten.addbmm.default,
        _aten.addmv.default,
        _aten.mv.default,
        _aten.dot.default,
        _aten.vdot.default,
    }
)
"""Products that go through cuBLAS, which has a workspace: cuda/Blas.cpp."""


def _copies(args: Sequence[Any], outputs: list[Any]) -> Requests:
    """Copies of operands that cuBLAS cannot read as rows or columns, such as an expanded gradient.

    prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas in cuda/Blas.cpp; order as recorded with torch 2.6.
    """
    copies: Requests = []
    for tensor in args:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            continue
        rows, columns = tensor.shape[-2:]
        down, right = tensor.stride()[-2:]
        by_column = down == 1 and right >= max(1, rows)
        by_row = right == 1 and down >= max(1, columns)
        dense = tensor.is_contiguous() or (tensor.dim() == 2 and contiguous(tensor, (1, 0)))
        if not (by_column or by_row or (dense and 0 not in (down, right))):
            copies.append(Scratch(nbytes(tensor)))
    return [*places(outputs), *copies] if copies else []


def plain(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """mm and bmm: their two operands may have to be copied."""
    return _copies(args[:2], outputs) or None


def added(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """baddbmm, and addmm without an epilogue: the operands are the second and third argument."""
    return _copies(args[1:3], outputs) or None


def with_bias(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """A bias is added by cuBLASLt's epilogue, which until torch 2.7 had 1 MiB of its own for the call.

    cuda/Blas.cpp (addmm_out_cuda_impl) and ATen/cuda/CUDABlas.cpp (gemm_and_bias); the 1 MiB, and that a second matrix
    of one row or column goes another way, as recorded with torch 2.1 and 2.2: a first matrix of one row does not. Later
    releases use cuBLAS's workspace for it.
    """
    bias, first, second = args[:3]
    if cuda_build.current().release >= (2, 8) or bias.dim() != 1 or not bias.is_contiguous():
        return added(args, kwargs, outputs)
    if min(second.shape) <= 1 or kwargs.get("beta", 1) != 1:
        return added(args, kwargs, outputs)
    copies = _copies((first, second), outputs) or places(outputs)
    return [*copies, Scratch(1024**2, Category.WORKSPACE)]
