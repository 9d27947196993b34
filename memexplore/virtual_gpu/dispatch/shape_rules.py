"""Shape rules: outputs of frequent ops in microseconds, where torch's fake kernels take milliseconds per new shape.

In: an op and its arguments. Out: its planned outputs, equal to those of the fake kernels (a test compares them). A
changed knob is a run with new shapes, which would spend most of its time in fake kernels. Two kinds of rules avoid
them: ops with a compiled meta kernel run on plain meta tensors (`COMPILED`), and normalizations, which fake kernels
decompose into thirty ops, have a formula (`_OUTPUTS`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.tensors import set_conj, set_neg, untyped_storage
from memexplore.virtual_gpu.kernels.shapes import like, new
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor

_aten = torch.ops.aten

COMPILED = frozenset(
    {
        # Views: TensorShape.cpp.
        *(_aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.transpose.int, _aten.permute.default),
        *(_aten.slice.Tensor, _aten.select.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.expand.default),
        *(_aten.detach.default, _aten.alias.default),
        # Elementwise, through TensorIterator.
        *(_aten.relu.default, _aten.relu_.default, _aten.threshold_backward.default, _aten.neg.default),
        *(_aten.gelu.default, _aten.gelu_backward.default, _aten.silu.default, _aten.silu_backward.default),
        *(_aten.tanh.default, _aten.tanh_backward.default, _aten.sigmoid.default, _aten.sigmoid_backward.default),
        *(_aten.rsqrt.default, _aten.pow.Tensor_Scalar, _aten.cos.default, _aten.sin.default, _aten.exp.default),
        *(_aten.add.Tensor, _aten.add_.Tensor, _aten.mul.Tensor, _aten.mul_.Tensor, _aten.sub.Tensor, _aten.div.Tensor),
        # Matrix products: LinearAlgebra.cpp.
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        # SoftMax.cpp
        *(_aten._log_softmax.default, _aten._log_softmax_backward_data.default),
        *(_aten._softmax.default, _aten._softmax_backward_data.default),
        *(_aten.cat.default, _aten.sum.dim_IntList, _aten.mean.dim),
    }
)
"""Ops with a compiled meta kernel that does not depend on the device."""


def runs_on_meta(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Return whether an op can run on meta tensors: it has a compiled meta kernel, and its tensors are virtual."""
    return func in COMPILED and all(isinstance(tensor, VirtualTensor) and not tensor.host for tensor in tensors)


def meta_stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain meta tensor that shares the storage of a virtual one."""
    meta = torch.empty(0, dtype=tensor.dtype, device="meta")
    meta.set_(untyped_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    if tensor.dtype.is_complex and tensor.is_conj():
        set_conj(meta, True)
    if tensor.is_neg():
        set_neg(meta, True)
    return meta


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor with a dimension of channels is contiguous, channels_last included."""
    if tensor.dim() < 2:
        return False
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _accumulator_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _cudnn_batch_norm(source: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *_: Any) -> Any:
    """Result, mean and inverse deviation of the batch, an empty reserve; in eval mode all but the result are empty."""
    if not _is_dense(source):
        return NotImplemented
    channels = (source.shape[1],) if training else (0,)
    statistics = new(channels, weight.dtype if training else source.dtype)
    return [like(source), statistics, statistics, new((0,), torch.uint8)]


def _cudnn_batch_norm_backward(source: Any, gradient: Any, weight: Any, *_: Any) -> Any:
    if not _is_dense(source) or source.stride() != gradient.stride():
        return NotImplemented
    return [like(source), *[new(tuple(weight.shape), weight.dtype)] * 2]


def _native_batch_norm(source: Any, weight: Any, *_: Any) -> Any:
    if not _is_dense(source):
        return NotImplemented
    return [like(source), *[new((source.shape[1],), _accumulator_dtype(source))] * 2]


def _native_batch_norm_backward(gradient: Any, source: Any, weight: Any, *rest: Any) -> Any:
    if not source.is_contiguous() or not gradient.is_contiguous() or weight is None or not all(rest[-1]):
        return NotImplemented
    return [like(source), *[new(tuple(weight.shape), weight.dtype)] * 2]


def _layer_norm(source: Any, shape: Any, *_: Any) -> Any:
    if not source.is_contiguous():
        return NotImplemented
    rows = (*source.shape[: source.dim() - len(shape)], *(1 for _ in shape))
    return [like(source), *[new(rows, _accumulator_dtype(source))] * 2]


def _layer_norm_backward(gradient: Any, source: Any, shape: Any, mean: Any, rstd: Any, *rest: Any) -> Any:
    weight, bias, mask = rest
    if not source.is_contiguous() or not gradient.is_contiguous() or weight is None or bias is None or not all(mask):
        return NotImplemented
    return [like(source), new(tuple(weight.shape), weight.dtype), new(tuple(bias.shape), bias.dtype)]


_OUTPUTS: dict[Any, Callable[..., Any]] = {
    _aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    _aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    _aten.native_batch_norm.default: _native_batch_norm,
    _aten.native_batch_norm_backward.default: _native_batch_norm_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
}


def outputs(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> list[Any] | None:
    """Return the planned outputs of an op, None for ops and memory formats without a rule."""
    rule = _OUTPUTS.get(func)
    if rule is None or kwargs or not all(isinstance(tensor, VirtualTensor) and not tensor.host for tensor in tensors):
        return None
    planned = rule(*args)
    return None if planned is NotImplemented else planned
