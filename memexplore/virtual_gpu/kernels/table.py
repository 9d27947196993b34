"""What a CUDA build would have run: what each kernel requests beside its outputs, and in which order.

One table, one place. Each entry names its source in PyTorch (below aten/src/ATen/native unless it says otherwise). An
op that is not here requests the memory of its outputs, in order, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memexplore.tape import Category
from memexplore.virtual_gpu.dispatch.plans import Constant, Free, New, Output, Plan, Scratch
from memexplore.virtual_gpu.kernels import (
    attention_memory,
    convolutions,
    ctc,
    cuda_build,
    encoder,
    grouped_mm,
    indexing,
    losses,
    products,
    reductions,
    rnn,
    sampling,
    transfers,
)
from memexplore.virtual_gpu.kernels.shapes import Requests, accumulator, given, nbytes, new, places

if TYPE_CHECKING:
    from memexplore.virtual_gpu.kernels.cublas_workspace import Workspaces

_aten = torch.ops.aten

# Ops whose fake result on CUDA differs from what torch's fake kernels say for another device.
FAKE: dict[Any, Callable[..., Any]] = {
    # torch's own refuses indices on the CPU, which CUDA takes.
    _aten._index_put_impl_.default: lambda target, *_: target,
}


def requests(
    func: Any, args: Any, kwargs: Any, outputs: list[Any], workspaces: Workspaces
) -> tuple[Requests | None, bool]:
    """The memory requests of an op in order (None: its outputs, nothing else), and whether it needs cuBLAS."""
    device = any(type(output) is New and not output.host for output in outputs)
    gemm = func in products.GEMMS and device
    scratch = SCRATCH.get(func)
    if gemm and workspaces.transient:
        before = scratch(args, kwargs, outputs) if scratch is not None else None
        return [*(before or places(outputs)), Scratch(workspaces.size, Category.WORKSPACE)], False
    if scratch is None or not (device or any(_on_device(value) for value in (*args, *kwargs.values()))):
        return None, gemm
    return scratch(args, kwargs, outputs), gemm


def _on_device(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not getattr(value, "host", True)
    return isinstance(value, list | tuple) and any(_on_device(entry) for entry in value)


# --- reductions -----------------------------------------------------------------------------------------------------


def _reduced(
    source: torch.Tensor, dims: Sequence[int] | None, accumulator: int, dtype: torch.dtype | None = None
) -> Requests:
    """The scratch of one reduction: a cast copy where CUDA needs one (ReduceOpsUtils.h), buffer and semaphores."""
    found: Requests = []
    cast = dtype is not None and dtype is not source.dtype
    if cast and not (source.dtype in (torch.float16, torch.bfloat16) and dtype is torch.float32):
        # The copy has the source's strides where it is dense.
        found.append(Scratch(nbytes(source, dtype)))
    buffer = reductions.scratch(
        source.shape, source.stride(), dims or (), accumulator, cuda_build.current(), int(source.storage_offset())
    )
    if buffer is not None:
        found += [Scratch(size) for size in buffer]
    return found


def _sum(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else None
    dtype = outputs[0].dtype
    return _after(outputs, _reduced(args[0], dims, accumulator(dtype), dtype))


def _after(outputs: list[Any], scratch: Requests) -> Requests | None:
    return [*places(outputs), *scratch] if scratch else None


def _extreme(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """amax, amin, max, min, any, all: a thread keeps one element."""
    dims = args[1] if len(args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    return _after(outputs, _reduced(args[0], dims, outputs[0].dtype.itemsize))


def _with_index(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """max and min along a dimension, argmax, argmin: a thread keeps a value and its place, 16 bytes (ReduceOps.cuh)."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return _after(outputs, _reduced(args[0], None if dim is None else [dim], 16))


def _variance(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """std, var and their means: Welford's mean, squared distance and two counts, 16 bytes (SharedReduceOps.h)."""
    return _after(outputs, _reduced(args[0], given(args, kwargs, 1, "dim"), 16))


def _vector_norm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    return _after(outputs, _reduced(args[0], given(args, kwargs, 2, "dim"), accumulator(outputs[0].dtype)))


def _cumulative(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """cumsum and cumprod work on a copy of the result's type: impl_func_cum_ops in ReduceOps.cpp."""
    source = args[0]
    if source.dtype is outputs[0].dtype:
        return None
    return [*places(outputs), Scratch(nbytes(source, outputs[0].dtype))]


def _safe_softmax(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """softmax, then zeros where a whole row is -inf: _safe_softmax in transformers/attention.cpp."""
    source, dim = args[:2]
    size, item = outputs[0].size, outputs[0].dtype.itemsize
    rows = source.numel() // max(source.shape[dim], 1)
    return [Scratch(size), Scratch(item), Scratch(source.numel()), Scratch(rows), Scratch(item), Output(0)]


# --- normalisation and dropout --------------------------------------------------------------------------------------


def _dropout(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """The mask, then the result: dropout_cuda in cuda/Dropout.cu, order as recorded with torch 2.1."""
    return [Output(1), Output(0)]


def _group_norm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Two factors for each sample and channel: GroupNormKernelImplInternal in cuda/group_norm_kernel.cu."""
    source, weight, bias, samples, channels, area = args[:6]
    if area == 1 or (weight is None and bias is None):
        return None
    size = samples * channels * accumulator(source.dtype)
    return [*places(outputs), Scratch(size), Scratch(size)]


def _group_norm_backward(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """GroupNormBackwardKernelImplInternal in cuda/group_norm_kernel.cu: sums a channel, factors a group."""
    source, weight = args[1], args[4]
    samples, channels, area, groups = args[5:9]
    mask = given(args, kwargs, 9, "output_mask", (True, True, True))
    if area == 1:
        return None
    item = accumulator(source.dtype)
    channel, group = samples * channels * item, samples * groups * item
    found: Requests = [*places(outputs), Scratch(channel), Scratch(channel)]
    if mask[0]:
        found += [Scratch(channel)] if weight is not None else []
        found += [Scratch(group), Scratch(group)]
    return found


def _batch_norm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """native_batch_norm in training: mean and variance of contiguous input, one reduction (cuda/Normalization.cu)."""
    source = args[0]
    training = given(args, kwargs, 5, "training")
    if not training or not source.is_contiguous():
        return None
    others = [number for number in range(source.dim()) if number != 1]
    return _after(outputs, _reduced(source, others, 16))


# --- elementwise ----------------------------------------------------------------------------------------------------


def _power_of_number(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """A number to the power of a tensor: the number becomes a tensor on the device (pow_Scalar_out in Pow.cpp).

    8 bytes for an int as recorded with torch 2.6; c10's scalar_to_tensor (ATen/ScalarOps.h) makes int64, float64,
    complex128 or bool of it.
    """
    base = args[0]
    return None if base == 1 else [*places(outputs), Scratch({bool: 1, complex: 16}.get(type(base), 8))]


def _padded_by_reflection(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """A copy of what is not contiguous, behind the result: cuda/ReflectionPad.cu, as recorded with 2.3 and 2.5."""
    return None if args[0].is_contiguous() else [*places(outputs), Scratch(nbytes(args[0]))]


def _nearest(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """In three dimensions the kernel knows no channels_last: it works on copies (cuda/UpSampleNearest3d.cu).

    As recorded with torch 2.3.
    """
    source, result = args[0], outputs[0]
    last = result.stride[1] == 1 and result.shape[1] != 1
    copies: Requests = [Scratch(result.size)] if last else []
    if not source.is_contiguous():
        copies.append(Scratch(nbytes(source)))
    return [*places(outputs), *copies] if copies else None


# --- many tensors at once -------------------------------------------------------------------------------------------

_CHUNK = 65536


def _foreach_norm(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """One number for each chunk of each tensor, then the results: cuda/ForeachReduceOp.cu."""
    tensors = args[0]
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    return [Scratch(len(tensors) * chunks * accumulator(tensors[0].dtype)), *places(outputs)]


# --- random numbers -------------------------------------------------------------------------------------------------


def _multinomial(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """One sample, or some without replacement: exponential noise of the input's size (Distributions.cpp)."""
    weights, samples = args[:2]
    if samples != 1 and given(args, kwargs, 2, "replacement", False):
        return None
    # The three checks of the weights each make masks and one flag; the noise takes part in the division in place.
    size = weights.numel()
    found: Requests = [Scratch(size), Scratch(size), Free(0), Free(1)]
    return [*found, Scratch(nbytes(weights)), Output(0)]


# --- the table ------------------------------------------------------------------------------------------------------

SCRATCH: dict[Any, Callable[[Any, Any, list[Any]], Requests | None]] = {
    _aten.mm.default: products.plain,
    _aten.bmm.default: products.plain,
    _aten.addmm.default: products.with_bias,
    _aten._addmm_activation.default: products.with_bias,
    _aten.baddbmm.default: products.added,
    _aten.sum.default: _sum,
    _aten.sum.dim_IntList: _sum,
    _aten.nansum.default: _sum,
    _aten.prod.default: _sum,
    _aten.mean.default: _sum,
    _aten.mean.dim: _sum,
    _aten.amax.default: _extreme,
    _aten.amin.default: _extreme,
    _aten.max.default: _extreme,
    _aten.min.default: _extreme,
    _aten.any.default: _extreme,
    _aten.any.dim: _extreme,
    _aten.all.default: _extreme,
    _aten.all.dim: _extreme,
    _aten._is_any_true.default: _extreme,
    _aten._is_all_true.default: _extreme,
    _aten.max.dim: _with_index,
    _aten.min.dim: _with_index,
    _aten.argmax.default: _with_index,
    _aten.argmin.default: _with_index,
    _aten.var.correction: _variance,
    _aten.std.correction: _variance,
    _aten.var_mean.correction: _variance,
    _aten.std_mean.correction: _variance,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.cumsum.default: _cumulative,
    _aten.cumprod.default: _cumulative,
    _aten._safe_softmax.default: _safe_softmax,
    _aten.pow.Scalar: _power_of_number,
    _aten.upsample_nearest3d.default: _nearest,
    _aten._upsample_nearest_exact3d.default: _nearest,
    _aten.reflection_pad1d.default: _padded_by_reflection,
    _aten.reflection_pad2d.default: _padded_by_reflection,
    _aten.reflection_pad3d.default: _padded_by_reflection,
    _aten.reflection_pad1d_backward.default: _padded_by_reflection,
    _aten.reflection_pad2d_backward.default: _padded_by_reflection,
    _aten.reflection_pad3d_backward.default: _padded_by_reflection,
    _aten.copy_.default: transfers.into,
    _aten._to_copy.default: transfers.to,
    _aten.mse_loss.default: losses.pointwise,
    _aten.smooth_l1_loss.default: losses.pointwise,
    _aten.huber_loss.default: losses.huber,
    _aten.binary_cross_entropy_with_logits.default: losses.binary_with_logits,
    _aten.nll_loss2d_forward.default: losses.negative_log_likelihood_2d,
    _aten.native_dropout.default: _dropout,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
    _aten.native_batch_norm.default: _batch_norm,
    _aten.index.Tensor: indexing.read,
    _aten.index_put.default: indexing.put,
    _aten.index_put_.default: indexing.put,
    _aten._index_put_impl_.default: indexing.put,
    _aten.embedding_dense_backward.default: indexing.embedding_backward,
    _aten._embedding_bag.default: indexing.bag,
    _aten._embedding_bag_forward_only.default: indexing.bag,
    _aten._embedding_bag_backward.default: indexing.bag_backward,
    _aten._foreach_norm.Scalar: _foreach_norm,
    _aten.multinomial.default: _multinomial,
    _aten.convolution.default: convolutions.forward,
    _aten.convolution_backward.default: convolutions.backward,
}


def _rms_norm(args: Any, kwargs: Any) -> Plan:
    """_fused_rms_norm_cuda in cuda/layer_norm_kernel.cu: a copy where the input is not contiguous, result, roots."""
    source, shape = args[:2]
    rows = source.shape[: source.dim() - len(shape)]
    outputs: list[Any] = [new(tuple(source.shape), source.dtype)]
    dtype = torch.float32 if source.dtype in (torch.float16, torch.bfloat16) else source.dtype
    outputs.append(new((*rows, *(1 for _ in shape)), dtype))
    copy: Requests = [] if source.is_contiguous() else [Scratch(nbytes(source))]
    return Plan(outputs, tuple, [*copy, Output(0), Output(1)], False, None)


def _rms_norm_backward(args: Any, kwargs: Any) -> Plan:
    """_fused_rms_norm_backward_cuda in cuda/layer_norm_kernel.cu."""
    gradient, source, _, _, weight, mask = args
    outputs: list[Any] = [
        new(tuple(source.shape), source.dtype) if mask[0] else Constant(None),
        new(tuple(weight.shape), weight.dtype) if mask[1] and weight is not None else Constant(None),
    ]
    copies: Requests = [Scratch(nbytes(tensor)) for tensor in (gradient, source) if not tensor.is_contiguous()]
    return Plan(outputs, tuple, [*copies, *places(outputs)], False, None)


def _nothing(args: Any, kwargs: Any) -> Plan:
    """An op that overwrites its arguments and asks for no memory."""
    return Plan([Constant(None)], None, None, False, None)


PLANS: dict[Any, Callable[[Any, Any], Plan]] = {
    # FusedSgdKernel.cu asks for nothing; torch has no fake kernel for it.
    _aten._fused_sgd_.default: _nothing,
    _aten._fused_sgd_.tensor_lr: _nothing,
    _aten.binary_cross_entropy.default: losses.binary,
    _aten._grouped_mm.default: grouped_mm.product,
    _aten._fused_rms_norm.default: _rms_norm,
    _aten._fused_rms_norm_backward.default: _rms_norm_backward,
    _aten._ctc_loss.default: ctc.forward,
    _aten._ctc_loss_backward.default: ctc.backward,
    _aten._cudnn_ctc_loss.default: ctc.cudnn,
    _aten._cudnn_ctc_loss.Tensor: ctc.cudnn,
    **attention_memory.PLANS,
    **rnn.PLANS,
    **sampling.PLANS,
}
"""Ops whose whole plan is written down: torch's fake kernels do not know what they return on CUDA."""

HANDLERS: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    _aten._use_cudnn_ctc_loss.default: lambda mode, func, args, kwargs: ctc.uses_cudnn(*args),
    _aten._use_cudnn_ctc_loss.Tensor: lambda mode, func, args, kwargs: ctc.uses_cudnn(*args),
    _aten._ctc_loss.Tensor: ctc.with_lengths,
    _aten._ctc_loss_backward.Tensor: ctc.with_lengths,
    **encoder.HANDLERS,
    **rnn.HANDLERS,
}
"""Ops that are carried out by other ops: called with the mode, the op and its arguments."""
