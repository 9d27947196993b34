"""CUDA ops for which torch has no fake kernel: shapes of their outputs.

In: the op's arguments. Out: `Plan`. Sources are below aten/src/ATen/native. The list is made by looking up, in a CUDA
build, the ops that have a CUDA kernel and neither a meta kernel nor a decomposition.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import Constant, NewTensor, Output, Plan, Requests, Scratch
from memexplore.virtual_gpu.kernels.shapes import like, new
from memexplore.virtual_gpu.tensors import values

_aten = torch.ops.aten
SOLVER_NOTE = "workspaces of cuSOLVER and MAGMA (torch.linalg) are not counted: their sizes are not public"


def like_first(args: Any, kwargs: Any) -> Plan:
    """One output with the metadata of the first argument."""
    return Plan([like(args[0])], None)


def like_second(args: Any, kwargs: Any) -> Plan:
    """One output with the metadata of the second argument, the input of the forward op."""
    return Plan([like(args[1])], None)


def fake_quantized(args: Any, kwargs: Any) -> Plan:
    """The quantized values and the mask of those in range: quantized/cuda/FakeQuantizeCore.cu."""
    mask = like(args[0])
    return Plan([like(args[0]), mask._replace(dtype=torch.bool, size=mask.size // args[0].element_size())], tuple)


def learned_fake_quantize_backward(args: Any, kwargs: Any) -> Plan:
    """Gradients of values, scale and zero point: quantized/FakeQuantPerTensorAffine.cpp."""
    source, scale, zero_point = args[1:4]
    return Plan([like(source), like(scale), like(zero_point)], tuple)


def nothing(args: Any, kwargs: Any) -> Plan:
    """An op that writes into its arguments and returns nothing."""
    return Plan([Constant(None)], None)


def batch_norm_stats(args: Any, kwargs: Any) -> Plan:
    """Mean and inverse deviation of each channel: batch_norm_stats_cuda in cuda/Normalization.cu."""
    source = args[0]
    dtype = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    return Plan([new((source.shape[1],), dtype)] * 2, tuple)


def batch_norm_gather_stats(args: Any, kwargs: Any) -> Plan:
    """Mean and inverse deviation over the batches of all processes: batch_norm_gather_stats_with_counts_cuda."""
    mean = args[1]
    return Plan([new((mean.shape[1],), mean.dtype)] * 2, tuple)


def batch_norm_backward_reduce(args: Any, kwargs: Any) -> Plan:
    """Two sums for each channel and the gradients of weight and bias: batch_norm_backward_reduce_cuda."""
    mean, weight = args[2], args[4]
    wanted = [new(tuple(mean.shape), mean.dtype) if args[5] else new((0,), mean.dtype)] * 2
    parameter = mean.dtype if weight is None else weight.dtype
    wanted += [new(tuple(mean.shape) if needed else (0,), parameter) for needed in args[6:8]]
    return Plan(wanted, tuple)


def sample(args: Any, kwargs: Any) -> Plan:
    """binomial: a contiguous sample of the first argument's shape, _s_binomial_cuda in cuda/Distributions.cpp."""
    return Plan([new(tuple(args[0].shape), args[0].dtype)], None)


def sample_dirichlet(args: Any, kwargs: Any) -> Plan:
    """Gamma variates, divided in place by their sums: _s_dirichlet_cuda in cuda/Distributions.cpp."""
    *rows, width = args[0].shape
    sums = math.prod(rows) * args[0].element_size()
    return Plan([new((*rows, width), args[0].dtype)], None, [Output(0), Scratch(sums)])


def masked_softmax_backward(args: Any, kwargs: Any) -> Plan:
    """A contiguous gradient: masked_softmax_backward_cuda in cuda/SoftMax.cu."""
    return Plan([new(tuple(args[0].shape), args[0].dtype)], None)


def _column_major(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    return new(shape, dtype, order)


def geqrf(args: Any, kwargs: Any) -> Plan:
    """The factors in column-major order and their scales: linalg/BatchLinearAlgebraLib.cpp."""
    values.note(SOLVER_NOTE)
    source = args[0]
    *batch, rows, columns = source.shape
    scales = new((*batch, min(rows, columns)), source.dtype)
    return Plan([_column_major(tuple(source.shape), source.dtype), scales], tuple)


def least_squares(args: Any, kwargs: Any) -> Plan:
    """linalg_lstsq with driver gels, the only one on CUDA: BatchLinearAlgebra.cpp.

    The solution, the residuals of a system with more rows than columns, and no rank or singular values.
    """
    values.note(SOLVER_NOTE)
    source, right = args[:2]
    *batch, rows, columns = source.shape
    vector = right.dim() == 1 or (right.dim() == source.dim() - 1 and right.shape == source.shape[:-1])
    shape = (columns,) if vector else (columns, right.shape[-1])
    batch = list(torch.broadcast_shapes(tuple(batch), right.shape[: right.dim() - (1 if vector else 2)]))
    # The first rows of a tensor that also held the right-hand sides.
    whole = _column_major((*batch, max(rows, columns), 1 if vector else right.shape[-1]), source.dtype)
    stride = whole.stride[:-1] if vector else whole.stride
    solution = NewTensor((*batch, *shape), stride, 0, source.dtype, whole.size, False)
    residuals = new((*batch, *shape[1:]) if rows > columns else (0,), source.dtype)
    return Plan([solution, residuals, new((0,), torch.int64), new((0,), source.dtype)], tuple)


def solver(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """An op that cuSOLVER or MAGMA carries out: its outputs, and a note that says what is not counted."""
    values.note(SOLVER_NOTE)
    return None


_QUANTIZE = "quantized/cuda/FakeQuantizeCore.cu"
_NORMALIZATION = "cuda/Normalization.cu"
_losses = [_aten.multi_margin_loss_backward.default, _aten.multilabel_margin_loss_backward.default]
PLANS: list[tuple[Any, str, list[Any]]] = [
    (like_second, "cuda/MultiMarginLoss.cu", _losses),
    (like_second, "cuda/FractionalMaxPool3d.cu", [_aten.fractional_max_pool3d_backward.default]),
    (
        fake_quantized,
        _QUANTIZE,
        [
            _aten.fake_quantize_per_tensor_affine_cachemask.default,
            _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
            _aten.fake_quantize_per_channel_affine_cachemask.default,
        ],
    ),
    (
        like_first,
        _QUANTIZE,
        [
            _aten._fake_quantize_learnable_per_tensor_affine.default,
            _aten._fake_quantize_learnable_per_channel_affine.default,
        ],
    ),
    (
        learned_fake_quantize_backward,
        "quantized/FakeQuantPerTensorAffine.cpp",
        [
            _aten._fake_quantize_learnable_per_tensor_affine_backward.default,
            _aten._fake_quantize_learnable_per_channel_affine_backward.default,
        ],
    ),
    (nothing, "cuda/FusedAdagradKernel.cu", [_aten._fused_adagrad_.default, _aten._fused_adagrad_.tensor_lr]),
    (batch_norm_stats, _NORMALIZATION, [_aten.batch_norm_stats.default]),
    (like_first, _NORMALIZATION, [_aten.batch_norm_elemt.default]),
    (batch_norm_gather_stats, _NORMALIZATION, [_aten.batch_norm_gather_stats_with_counts.default]),
    (batch_norm_backward_reduce, _NORMALIZATION, [_aten.batch_norm_backward_reduce.default]),
    (like_second, _NORMALIZATION, [_aten.batch_norm_backward_elemt.default]),
    (like_first, "cuda/SoftMax.cu", [_aten._masked_softmax.default]),
    (masked_softmax_backward, "cuda/SoftMax.cu", [_aten._masked_softmax_backward.default]),
    (like_first, "cuda/ActivationGluKernel.cu", [_aten.glu_jvp.default]),
    (like_first, "cuda/ActivationGluKernel.cu", [_aten.glu_backward_jvp.default]),
    (like_first, "cuda/Distributions.cu", [_aten._standard_gamma_grad.default, _aten._dirichlet_grad.default]),
    (sample, "cuda/Distributions.cpp", [_aten.binomial.default]),
    (sample_dirichlet, "cuda/Distributions.cpp", [_aten._sample_dirichlet.default]),
    (geqrf, "cuda/linalg/BatchLinearAlgebraLib.cpp", [_aten.geqrf.default]),
    (least_squares, "BatchLinearAlgebra.cpp", [_aten.linalg_lstsq.default]),
]
"""Rows of kind PLAN for the table of kernels."""

REQUESTS: list[tuple[Any, str, list[Any]]] = [
    (
        solver,
        "cuda/linalg/BatchLinearAlgebra.cpp",
        [
            *(_aten._linalg_svd.default, _aten._linalg_eigh.default, _aten._linalg_eigvals.default),
            *(_aten.linalg_eig.default, _aten.linalg_qr.default, _aten.linalg_cholesky_ex.default),
            *(_aten.linalg_inv_ex.default, _aten._linalg_solve_ex.default, _aten.linalg_lu_factor_ex.default),
            *(_aten.linalg_lu.default, _aten._linalg_det.default, _aten._linalg_slogdet.default),
            *(_aten.linalg_lu_solve.default, _aten.linalg_ldl_factor_ex.default, _aten.cholesky_solve.default),
            *(_aten.cholesky_inverse.default, _aten.linalg_householder_product.default, _aten.ormqr.default),
        ],
    ),
]
"""Rows of kind REQUESTS."""
