"""Count the floating-point operations and bytes of one op, as `torch.utils.flop_counter` does, and its seconds."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from memexplore.hardware.catalogue import Gpu
from memexplore.torch_internals.dispatch import packet_or_none, schema_of
from memexplore.virtual_gpu.kernels import table
from memexplore.virtual_gpu.kernels.plan import Argument, Constant, NewTensor, View
from memexplore.virtual_gpu.kernels.table import Kind
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu


class Rate(enum.Enum):
    """Rate of a GPU by which the time of an op is computed: arithmetic in a precision, or the link to the CPU."""

    FP32 = enum.auto()
    TF32 = enum.auto()
    FP16 = enum.auto()
    BF16 = enum.auto()
    LINK = enum.auto()


class Work(NamedTuple):
    """FLOPs of an op, and bytes that it reads and writes in the memory of the GPU, or sends over the link."""

    flops: int
    bytes: int
    rate: Rate


NONE = Work(0, 0, Rate.FP32)
"""The work of a view."""


class CheckedWorks(list[Work]):
    """Work of ops, with a function that is called before each append; an exception that it raises ends the run."""

    def __init__(self, check: Callable[[], object]) -> None:
        super().__init__()
        self._check = check

    def append(self, work: Work) -> None:
        """Append the work of an op."""
        self._check()
        super().append(work)


LAUNCH = 5e-6
"""Least seconds of a kernel that is launched from Python, as in eager PyTorch."""
PCIE = 24e9
"""Bytes per second between GPU and CPU: PCIe 4.0 x16, measured with pinned memory."""


def seconds_on(gpu: Gpu) -> Callable[[Work], float]:
    """Return a function of an op's work, its seconds on a GPU by the roofline model.

    Arithmetic, memory or the launch bounds each kernel. Source: Williams, Waterman and Patterson 2009.
    """
    bandwidth = gpu.bandwidth or 500e9
    fp32 = gpu.flops.fp32 or 1e13
    # A GPU without units for a precision computes it in fp32.
    rates = {
        Rate.FP32: fp32,
        Rate.TF32: gpu.flops.tf32 or fp32,
        Rate.FP16: gpu.flops.fp16 or fp32,
        Rate.BF16: gpu.flops.bf16 or fp32,
    }

    def seconds(work: Work) -> float:
        if not work.bytes:
            return 0.0
        if work.rate is Rate.LINK:
            return max(work.bytes / PCIE, LAUNCH)
        return max(work.flops / rates[work.rate], work.bytes / bandwidth, LAUNCH)

    return seconds


def of(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], outputs: list[Any]) -> Work:
    """Return the work of an op."""
    if all(type(output) in (View, Constant) for output in outputs):
        return NONE
    if any(type(output) is Argument for output in outputs) and not schema_of(func).is_mutable:
        return NONE
    made = [output for output in outputs if type(output) is NewTensor]
    on_gpu = on_host = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.dtype.itemsize
        if is_on_gpu(tensor):
            on_gpu += size
        else:
            on_host += size
    for new in made:
        size = math.prod(new.shape) * new.dtype.itemsize
        if new.host:
            on_host += size
        else:
            on_gpu += size
    packet = packet_or_none(func)
    # A number on the CPU among tensors on the GPU is an argument, not a copy.
    if packet in _COPIES and on_gpu and on_host:
        return Work(0, on_host, Rate.LINK)
    return Work(_flops(packet, args, kwargs, outputs), on_gpu or on_host, _rate(func, tensors))


def of_handled(func: Any, args: Any, outputs: list[Any]) -> Work | None:
    """Return the work of an op that a rule runs by plans of its own, None without a formula for it."""
    if packet_or_none(func) not in _FORMULAS:
        return None
    values = [value for entry in args for value in (entry if isinstance(entry, list | tuple) else (entry,))]
    return of(func, args, {}, [value for value in values if isinstance(value, torch.Tensor)], outputs)


def _flops(packet: Any, args: Any, kwargs: Any, outputs: list[Any]) -> int:
    if packet in _FORMULAS:
        return _FORMULAS[packet](*args)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    shapes = tuple(torch.Size(output.shape) if isinstance(output, NewTensor | View) else None for output in outputs)
    out = shapes[0] if len(shapes) == 1 else shapes
    # A formula on shapes, without the function around it that finds them in any structure of arguments.
    plain = getattr(formula, "__wrapped__", None)
    if plain is not None and not kwargs:
        return int(plain(*map(_shape, args), out_shape=out))
    return int(formula(*args, **kwargs, out_val=out))


def _rate(func: Any, tensors: list[torch.Tensor]) -> Rate:
    """Return what does the arithmetic of an op, by the data type of its first tensor."""
    dtype = tensors[0].dtype if tensors else torch.float32
    if dtype is not torch.float32:
        return {torch.float16: Rate.FP16, torch.bfloat16: Rate.BF16}.get(dtype, Rate.FP32)
    allowed = table.find(func, Kind.TF32)
    return Rate.TF32 if allowed is not None and allowed() else Rate.FP32


def _shape(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_shape, value))
    return value.shape if isinstance(value, torch.Tensor) else value


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    """Two products, scores and weighted values (Dao et al. 2022); several heads may share a key."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> int:
    """Five products: scores computed again, gradients of scores, values, keys and queries."""
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (3 * width + 2 * value.shape[-1])


def _recurrent(source: torch.Tensor, weights: list[torch.Tensor], *_: Any) -> int:
    """A multiply-add for each weight, sequence and time step; biases count as weights."""
    return 2 * sum(weight.numel() for weight in weights) * (source.numel() // source.shape[-1])


def _recurrent_backward(source: torch.Tensor, weights: list[torch.Tensor], *_: Any) -> int:
    """As many for the gradient of the input as for that of the weights."""
    return 2 * _recurrent(source, weights)


_aten = torch.ops.aten
_COPIES = {_aten.copy_, _aten._to_copy, _aten._foreach_copy_}
# The formulas of torch 2.11 refuse heads that share a key.
_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_efficient_attention: _attention,
    _aten._scaled_dot_product_cudnn_attention: _attention,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
    _aten._cudnn_rnn: _recurrent,
    _aten._cudnn_rnn_backward: _recurrent_backward,
}
