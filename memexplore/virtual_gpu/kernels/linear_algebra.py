"""Request the memory of solvers and factorizations (torch.linalg), without the workspaces of cuSOLVER and MAGMA.

Sources are below aten/src/ATen/native.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import NewTensor, OpRunner, Plan, Requests, Scratch, new, new_outputs
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu
from memexplore.virtual_gpu.values import notes

_aten = torch.ops.aten

NOTE = "workspaces of cuSOLVER and MAGMA (torch.linalg) are not counted: their sizes are not public"


@rule(
    Kind.REQUESTS,
    "cuda/linalg/BatchLinearAlgebra.cpp",
    _aten._linalg_svd.default,
    _aten._linalg_eigh.default,
    _aten._linalg_eigvals.default,
    _aten.linalg_eig.default,
    _aten.linalg_qr.default,
    _aten.linalg_cholesky_ex.default,
    _aten.linalg_inv_ex.default,
    _aten._linalg_solve_ex.default,
    _aten.linalg_lu_factor_ex.default,
    _aten.linalg_lu.default,
    _aten._linalg_det.default,
    _aten._linalg_slogdet.default,
    _aten.linalg_lu_solve.default,
    _aten.linalg_ldl_factor_ex.default,
    _aten.cholesky_solve.default,
    _aten.cholesky_inverse.default,
    _aten.linalg_householder_product.default,
    _aten.ormqr.default,
)
def solver(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """An op that cuSOLVER or MAGMA carries out: its outputs, and a note that says what is not counted."""
    notes.add(NOTE)
    return None


@rule(
    Kind.REQUESTS,
    "cuda/linalg/BatchLinearAlgebra.cpp",
    _aten.linalg_solve_triangular.default,
    _aten.triangular_solve.default,
)
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


def _column_major(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    return new(shape, dtype, order)


@rule(Kind.PLAN, "cuda/linalg/BatchLinearAlgebraLib.cpp", _aten.geqrf.default)
def geqrf(args: Any, kwargs: Any) -> Plan:
    """The factors in column-major order and their scales: linalg/BatchLinearAlgebraLib.cpp."""
    notes.add(NOTE)
    source = args[0]
    *batch, rows, columns = source.shape
    scales = new((*batch, min(rows, columns)), source.dtype)
    return Plan([_column_major(tuple(source.shape), source.dtype), scales], tuple)


@rule(Kind.PLAN, "BatchLinearAlgebra.cpp", _aten.linalg_lstsq.default)
def least_squares(args: Any, kwargs: Any) -> Plan:
    """linalg_lstsq with driver gels, the only one on CUDA: BatchLinearAlgebra.cpp.

    The solution, the residuals of a system with more rows than columns, and no rank or singular values.
    """
    notes.add(NOTE)
    source, right = args[:2]
    *batch, rows, columns = source.shape
    vector = right.dim() == 1 or (right.dim() == source.dim() - 1 and right.shape == source.shape[:-1])
    shape = (columns,) if vector else (columns, right.shape[-1])
    batch = list(torch.broadcast_shapes(tuple(batch), right.shape[: right.dim() - (1 if vector else 2)]))
    # The first rows of a tensor that also held the right-hand sides.
    full = _column_major((*batch, max(rows, columns), 1 if vector else right.shape[-1]), source.dtype)
    stride = full.stride[:-1] if vector else full.stride
    solution = NewTensor((*batch, *shape), stride, 0, source.dtype, full.size, False)
    residuals = new((*batch, *shape[1:]) if rows > columns else (0,), source.dtype)
    return Plan([solution, residuals, new((0,), torch.int64), new((0,), source.dtype)], tuple)


@rule(Kind.OPS, "LinearAlgebra.cpp", _aten._linalg_check_errors.default)
def check_errors(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_linalg_check_errors: whether any matrix of a solver failed (LinearAlgebra.cpp)."""
    if is_on_gpu(args[0]):
        with runner:
            _aten.any.default(args[0])
    return NotImplemented
