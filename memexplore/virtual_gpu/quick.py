"""Shortcuts to a plan: what takes torch's fake kernels milliseconds for each new shape, found in microseconds.

A turned knob is a run with new shapes, and most of it would be spent in fake kernels. Two ways lead around them: ops
whose outputs are those of a compiled meta kernel are run on plain meta tensors, and batch norm, which torch's fake
kernels take apart into thirty ops, is written down. A test holds that both say what the fake kernels say.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.virtual_gpu.plans import New, Plan
from memexplore.virtual_gpu.shapes import like, new
from memexplore.virtual_gpu.tensor import VirtualTensor

_aten = torch.ops.aten
_untyped_storage = torch._C.TensorBase.untyped_storage

COMPILED = frozenset(
    {
        # Views and the like: TensorShape.cpp.
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
"""Ops with a compiled meta kernel that does not look at the device."""


def applies(func: Any, tensors: list[torch.Tensor]) -> bool:
    """Whether an op can be run on meta tensors: all its tensors are on the virtual device."""
    return func in COMPILED and all(type(tensor) is VirtualTensor and not tensor.host for tensor in tensors)


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A plain meta tensor in the memory of a virtual one."""
    made = torch.empty(0, dtype=tensor.dtype, device="meta")
    made.set_(_untyped_storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
    if tensor.dtype.is_complex and tensor.is_conj():
        torch._C._set_conj(made, True)
    return made


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def batch_norm(args: Any, kwargs: Any) -> Plan:
    """cudnn_batch_norm: the result, mean and deviation of the batch in fp32, and a reserve that has no bytes."""
    source, weight, training = args[0], args[1], args[5]
    if kwargs or not training or not _is_dense(source) or source.host:
        return NotImplemented
    channels = (source.shape[1],)
    outputs: list[Any] = [like(source), new(channels, weight.dtype), new(channels, weight.dtype)]
    return Plan([*outputs, New((0,), (1,), 0, torch.uint8, 0, False)], tuple, None, False, None)


def batch_norm_backward(args: Any, kwargs: Any) -> Plan:
    """cudnn_batch_norm_backward: gradients of input, weight and bias."""
    source, gradient, weight = args[:3]
    if kwargs or not _is_dense(source) or source.stride() != gradient.stride() or source.host:
        return NotImplemented
    outputs: list[Any] = [like(source), new(tuple(weight.shape), weight.dtype), new(tuple(weight.shape), weight.dtype)]
    return Plan(outputs, tuple, None, False, None)


PLANS = {_aten.cudnn_batch_norm.default: batch_norm, _aten.cudnn_batch_norm_backward.default: batch_norm_backward}
"""Plans written down, NotImplemented where the shapes are unusual."""
