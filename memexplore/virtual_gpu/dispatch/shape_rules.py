"""Find the outputs of frequent ops in microseconds, where torch's fake kernels take milliseconds per new shape.

The outputs equal those of the fake kernels (a test compares them). A changed knob is a run with new shapes, which would
spend most of its time in fake kernels. Two kinds of rules avoid them: ops with a compiled meta kernel run on plain meta
tensors (`COMPILED`), and normalizations, which fake kernels decompose into thirty ops, have a formula (`_OUTPUTS`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import Constant, like, new
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu

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
    return func in COMPILED and all(is_on_gpu(tensor) for tensor in tensors)


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


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor has the strides of a new contiguous tensor; others can be contiguous too."""
    return bool(new(tuple(tensor.shape), tensor.dtype).stride == tensor.stride())


def _same(source: Any, *others: Any, **_: Any) -> Any:
    """Result of an elementwise op on floating-point tensors of one shape, memory format and dtype.

    TensorIterator keeps the format. Numbers among the operands do not change the dtype.
    """
    if not source.is_floating_point():
        return NotImplemented
    result = new(tuple(source.shape), source.dtype)
    if result.stride != source.stride() and source.dim() == 4:
        result = new(tuple(source.shape), source.dtype, (0, 2, 3, 1))  # channels_last
    if result.stride != source.stride():
        return NotImplemented
    for other in others:
        if isinstance(other, torch.Tensor):
            if (other.shape, other.stride(), other.dtype) != (source.shape, source.stride(), source.dtype):
                return NotImplemented
        elif isinstance(other, complex):
            return NotImplemented
    return result


def _dropout(source: Any, *_: Any) -> Any:
    """A new tensor for any probability: cuda/Dropout.cu. The fake kernel returns the input where nothing is dropped."""
    result = like(source)
    return [result, result._replace(dtype=torch.bool, size=source.numel())]


def _dropout_backward(gradient: Any, mask: Any, scale: float) -> Any:
    if not _is_plain(gradient) or not _is_plain(mask) or gradient.shape != mask.shape:
        return NotImplemented
    return like(gradient)


def _embedding(weight: Any, indices: Any, *_: Any) -> Any:
    if weight.dim() != 2 or not _is_plain(weight) or not _is_plain(indices):
        return NotImplemented
    return new((*indices.shape, weight.shape[1]), weight.dtype)


def _embedding_backward(gradient: Any, indices: Any, rows: int, *_: Any) -> Any:
    if not _is_plain(gradient) or gradient.shape[:-1] != indices.shape:
        return NotImplemented
    return new((rows, gradient.shape[-1]), gradient.dtype)


def _takes_classes(source: Any, target: Any, weight: Any) -> bool:
    """Return whether the arguments are those of a loss of rows of scores, without weights of classes."""
    classes = target.dtype is torch.int64 and source.dim() == 2 and target.shape == source.shape[:1]
    return classes and weight is None and _is_plain(source)


def _nll_loss(source: Any, target: Any, weight: Any, reduction: int, *_: Any) -> Any:
    if not _takes_classes(source, target, weight) or reduction not in (1, 2):
        return NotImplemented
    return [new((), source.dtype)] * 2


def _nll_loss_backward(gradient: Any, source: Any, target: Any, weight: Any, reduction: int, *_: Any) -> Any:
    if not _takes_classes(source, target, weight) or reduction not in (1, 2) or gradient.dim():
        return NotImplemented
    return like(source)


def _keeps_contiguous(source: Any, weight: Any, groups: int) -> bool:
    """Return whether a convolution of images has contiguous operands only, and so a contiguous result.

    A tensor with a single channel may be in channels_last at the same time, and then the result may be too.
    """
    return (
        (source.dim(), weight.dim(), source.dtype) == (4, 4, weight.dtype)
        and _is_plain(source)
        and _is_plain(weight)
        and min(source.shape[1], weight.shape[1]) > 1
        and source.shape[1] == weight.shape[1] * groups
        and source.is_floating_point()
        and source.numel() > 0
    )


def _convolution(source: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """Size of the result: conv_output_size in aten/src/ATen/native/ConvUtils.h."""
    stride, padding, dilation, transposed, _, groups = rest
    if transposed or not _keeps_contiguous(source, weight, groups):
        return NotImplemented
    if {len(stride), len(padding), len(dilation)} != {2} or (bias is not None and bias.dtype is not source.dtype):
        return NotImplemented
    extents = zip(source.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    spatial = [(size + 2 * pad - gap * (window - 1) - 1) // step + 1 for size, window, step, pad, gap in extents]
    if min(spatial) < 1 or weight.shape[0] % groups:
        return NotImplemented
    return new((source.shape[0], weight.shape[0], *spatial), source.dtype)


def _convolution_backward(gradient: Any, source: Any, weight: Any, *rest: Any) -> Any:
    bias_shape, _, _, _, transposed, _, groups, mask = rest
    if transposed or not _keeps_contiguous(source, weight, groups):
        return NotImplemented
    if not _is_plain(gradient) or gradient.shape[1] < 2 or gradient.dtype is not source.dtype:
        return NotImplemented
    gradients = [like(source), like(weight), new(tuple(bias_shape or ()), weight.dtype)]
    return [gradient if wanted else Constant(None) for gradient, wanted in zip(gradients, mask, strict=True)]


def _product(first: Any, second: Any) -> Any:
    """Matrix product, also of batches of matrices."""
    if first.dtype is not second.dtype or first.dim() != second.dim() or first.shape[:-2] != second.shape[:-2]:
        return NotImplemented
    if first.shape[-1] != second.shape[-2]:
        return NotImplemented
    return new((*first.shape[:-1], second.shape[-1]), first.dtype)


def _biased_product(bias: Any, first: Any, second: Any) -> Any:
    if bias.dtype is not first.dtype or bias.dim() != 1 or first.dim() != 2 or bias.shape != second.shape[1:]:
        return NotImplemented
    return _product(first, second)


def _softmax(source: Any, dim: int, to_float: bool) -> Any:
    if to_float or not source.is_floating_point() or not _is_plain(source) or not -source.dim() <= dim < source.dim():
        return NotImplemented
    return like(source)


def _softmax_backward(gradient: Any, result: Any, dim: int, dtype: torch.dtype) -> Any:
    if dtype is not gradient.dtype or result.shape != gradient.shape or result.dtype is not dtype:
        return NotImplemented
    return _softmax(gradient, dim, False) if _is_plain(result) else NotImplemented


def _with_gap(gradient: Any, shape: Any, *_: Any) -> Any:
    """Gradient of a part of a tensor: zeros of the whole shape."""
    return new(tuple(shape), gradient.dtype)


_OUTPUTS: dict[Any, Callable[..., Any]] = {
    _aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    _aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
    _aten.native_batch_norm.default: _native_batch_norm,
    _aten.native_batch_norm_backward.default: _native_batch_norm_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    **dict.fromkeys(
        (
            *(_aten.relu.default, _aten.neg.default, _aten.silu.default, _aten.tanh.default, _aten.sigmoid.default),
            *(_aten.rsqrt.default, _aten.cos.default, _aten.sin.default, _aten.exp.default, _aten.gelu.default),
            *(_aten.threshold_backward.default, _aten.silu_backward.default, _aten.tanh_backward.default),
            *(_aten.sigmoid_backward.default, _aten.gelu_backward.default, _aten.pow.Tensor_Scalar),
            *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor),
            *(_aten.add.Scalar, _aten.sub.Scalar, _aten.mul.Scalar, _aten.div.Scalar),
        ),
        _same,
    ),
    _aten.native_dropout.default: _dropout,
    _aten.native_dropout_backward.default: _dropout_backward,
    _aten.embedding.default: _embedding,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.nll_loss_backward.default: _nll_loss_backward,
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.mm.default: _product,
    _aten.bmm.default: _product,
    _aten.addmm.default: _biased_product,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _softmax,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _softmax_backward,
    _aten.slice_backward.default: _with_gap,
    _aten.select_backward.default: _with_gap,
}


def outputs(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> tuple[list[Any], type | None] | None:
    """Return the planned outputs of an op and their container, as `plans.describe`; None for calls without a rule."""
    rule = _OUTPUTS.get(func)
    if rule is None or not all(is_on_gpu(tensor) for tensor in tensors):
        return None
    if kwargs and rule is not _same:
        return None
    planned = rule(*args, **kwargs)
    if planned is NotImplemented:
        return None
    return (planned, tuple) if isinstance(planned, list) else ([planned], None)
