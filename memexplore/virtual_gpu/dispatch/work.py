"""Work of one op: floating-point operations and bytes moved.

In: the op, its arguments and planned outputs. Out: `Work`. FLOPs follow `torch.utils.flop_counter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from memexplore.gpu_catalogue import Gpu
from memexplore.torch_internals.dispatch import packet_or_none, schema_of
from memexplore.virtual_gpu.kernels.plan import Argument, Constant, NewTensor, View
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor


class Work(NamedTuple):
    """FLOPs and bytes of an op; `dtype` is that of its first tensor, `host` is true for a copy from or to the CPU."""

    flops: int
    bytes: int
    dtype: torch.dtype
    host: bool


NONE = Work(0, 0, torch.float32, False)
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
    # A GPU without units for bf16 computes it in fp32.
    rates = {torch.float16: gpu.flops.fp16 or fp32, torch.bfloat16: gpu.flops.bf16 or fp32}

    def seconds(work: Work) -> float:
        if work.host:
            return work.bytes / PCIE
        return max(work.flops / rates.get(work.dtype, fp32), work.bytes / bandwidth, LAUNCH) if work.bytes else 0.0

    return seconds


def of(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], outputs: list[Any]) -> Work:
    """Return the work of an op."""
    if all(type(output) in (View, Constant) for output in outputs):
        return NONE
    if any(type(output) is Argument for output in outputs) and not schema_of(func).is_mutable:
        return NONE
    made = [output for output in outputs if type(output) is NewTensor]
    moved = sum(_bytes(tensor.numel(), tensor.dtype) for tensor in tensors)
    moved += sum(_bytes(torch.Size(output.shape).numel(), output.dtype) for output in made)
    packet = packet_or_none(func)
    formula = flop_registry.get(packet) if packet not in _ATTENTION else None
    flops = 0
    if formula is not None:
        shapes = tuple(torch.Size(output.shape) if isinstance(output, NewTensor | View) else None for output in outputs)
        out = shapes[0] if len(shapes) == 1 else shapes
        # A formula on shapes, without the function around it that finds them in any structure of arguments.
        plain = getattr(formula, "__wrapped__", None)
        if plain is not None and not kwargs:
            flops = int(plain(*map(_shape, args), out_shape=out))
        else:
            flops = int(formula(*args, **kwargs, out_val=out))
    elif packet in _ATTENTION:
        flops = _ATTENTION[packet](*args)
    hosts = {isinstance(tensor, VirtualTensor) and not tensor.host for tensor in tensors} | {
        not new.host for new in made
    }
    return Work(flops, moved, tensors[0].dtype if tensors else torch.float32, hosts == {True, False})


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


_aten = torch.ops.aten
# The formulas of torch 2.11 refuse heads that share a key.
_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_efficient_attention: _attention,
    _aten._scaled_dot_product_cudnn_attention: _attention,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
}


def _bytes(count: int, dtype: torch.dtype) -> int:
    return count * dtype.itemsize
