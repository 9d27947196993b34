"""Tell the outputs of CUDA ops for which torch has no fake kernel.

Sources are below aten/src/ATen/native. The ops are those that have a CUDA kernel and neither a meta kernel nor a
decomposition, looked up in a CUDA build.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import Constant, Output, Plan, Scratch, like, new
from memexplore.virtual_gpu.kernels.table import Kind, rule

_aten = torch.ops.aten


@rule(
    Kind.PLAN,
    "quantized/cuda/FakeQuantizeCore.cu",
    _aten._fake_quantize_learnable_per_tensor_affine.default,
    _aten._fake_quantize_learnable_per_channel_affine.default,
)
@rule(Kind.PLAN, "cuda/Normalization.cu", _aten.batch_norm_elemt.default)
@rule(Kind.PLAN, "cuda/SoftMax.cu", _aten._masked_softmax.default)
@rule(Kind.PLAN, "cuda/ActivationGluKernel.cu", _aten.glu_jvp.default)
@rule(Kind.PLAN, "cuda/ActivationGluKernel.cu", _aten.glu_backward_jvp.default)
@rule(Kind.PLAN, "cuda/Distributions.cu", _aten._standard_gamma_grad.default, _aten._dirichlet_grad.default)
def like_first(args: Any, kwargs: Any) -> Plan:
    """One output with the metadata of the first argument."""
    return Plan([like(args[0])], None)


@rule(
    Kind.PLAN,
    "cuda/MultiMarginLoss.cu",
    _aten.multi_margin_loss_backward.default,
    _aten.multilabel_margin_loss_backward.default,
)
@rule(Kind.PLAN, "cuda/FractionalMaxPool3d.cu", _aten.fractional_max_pool3d_backward.default)
@rule(Kind.PLAN, "cuda/Normalization.cu", _aten.batch_norm_backward_elemt.default)
def like_second(args: Any, kwargs: Any) -> Plan:
    """One output with the metadata of the second argument, the input of the forward op."""
    return Plan([like(args[1])], None)


@rule(
    Kind.PLAN,
    "quantized/cuda/FakeQuantizeCore.cu",
    _aten.fake_quantize_per_tensor_affine_cachemask.default,
    _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
    _aten.fake_quantize_per_channel_affine_cachemask.default,
)
def fake_quantized(args: Any, kwargs: Any) -> Plan:
    """The quantized values and the mask of those in range: quantized/cuda/FakeQuantizeCore.cu."""
    mask = like(args[0])
    return Plan([like(args[0]), mask._replace(dtype=torch.bool, size=mask.size // args[0].element_size())], tuple)


@rule(
    Kind.PLAN,
    "quantized/FakeQuantPerTensorAffine.cpp",
    _aten._fake_quantize_learnable_per_tensor_affine_backward.default,
    _aten._fake_quantize_learnable_per_channel_affine_backward.default,
)
def learned_fake_quantize_backward(args: Any, kwargs: Any) -> Plan:
    """Gradients of values, scale and zero point: quantized/FakeQuantPerTensorAffine.cpp."""
    source, scale, zero_point = args[1:4]
    return Plan([like(source), like(scale), like(zero_point)], tuple)


@rule(Kind.PLAN, "cuda/FusedAdagradKernel.cu", _aten._fused_adagrad_.default, _aten._fused_adagrad_.tensor_lr)
def nothing(args: Any, kwargs: Any) -> Plan:
    """An op that writes into its arguments and returns nothing."""
    return Plan([Constant(None)], None)


@rule(Kind.PLAN, "cuda/Normalization.cu", _aten.batch_norm_stats.default)
def batch_norm_stats(args: Any, kwargs: Any) -> Plan:
    """Mean and inverse deviation of each channel: batch_norm_stats_cuda in cuda/Normalization.cu."""
    source = args[0]
    dtype = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    return Plan([new((source.shape[1],), dtype)] * 2, tuple)


@rule(Kind.PLAN, "cuda/Normalization.cu", _aten.batch_norm_gather_stats_with_counts.default)
def batch_norm_gather_stats(args: Any, kwargs: Any) -> Plan:
    """Mean and inverse deviation over the batches of all processes: batch_norm_gather_stats_with_counts_cuda."""
    mean = args[1]
    return Plan([new((mean.shape[1],), mean.dtype)] * 2, tuple)


@rule(Kind.PLAN, "cuda/Normalization.cu", _aten.batch_norm_backward_reduce.default)
def batch_norm_backward_reduce(args: Any, kwargs: Any) -> Plan:
    """Two sums for each channel and the gradients of weight and bias: batch_norm_backward_reduce_cuda."""
    mean, weight = args[2], args[4]
    wanted = [new(tuple(mean.shape), mean.dtype) if args[5] else new((0,), mean.dtype)] * 2
    parameter = mean.dtype if weight is None else weight.dtype
    wanted += [new(tuple(mean.shape) if needed else (0,), parameter) for needed in args[6:8]]
    return Plan(wanted, tuple)


@rule(Kind.PLAN, "cuda/Distributions.cpp", _aten.binomial.default)
def sample(args: Any, kwargs: Any) -> Plan:
    """binomial: a contiguous sample of the first argument's shape, _s_binomial_cuda in cuda/Distributions.cpp."""
    return Plan([new(tuple(args[0].shape), args[0].dtype)], None)


@rule(Kind.PLAN, "cuda/Distributions.cpp", _aten._sample_dirichlet.default)
def sample_dirichlet(args: Any, kwargs: Any) -> Plan:
    """Gamma variates, divided in place by their sums: _s_dirichlet_cuda in cuda/Distributions.cpp."""
    *rows, width = args[0].shape
    sums = math.prod(rows) * args[0].element_size()
    return Plan([new((*rows, width), args[0].dtype)], None, [Output(0), Scratch(sums)])


@rule(Kind.PLAN, "cuda/SoftMax.cu", _aten._masked_softmax_backward.default)
def masked_softmax_backward(args: Any, kwargs: Any) -> Plan:
    """A contiguous gradient: masked_softmax_backward_cuda in cuda/SoftMax.cu."""
    return Plan([new(tuple(args[0].shape), args[0].dtype)], None)
