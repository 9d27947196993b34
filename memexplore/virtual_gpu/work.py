"""The work of one op: floating-point operations and bytes, from the shapes of its arguments and outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from memexplore.virtual_gpu.plans import Constant, New, Same, View
from memexplore.virtual_gpu.tensor import VirtualTensor


class Work(NamedTuple):
    """What an op has to do; `width` is bytes of an element of its first argument, `host` a copy from or to the CPU."""

    flops: int
    bytes: int
    width: int
    host: bool


NONE = Work(0, 0, 0, False)
"""The work of a view."""


def of(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], outputs: list[Any]) -> Work:
    """The work of an op whose outputs are described; FLOPs by the formulas of `torch.utils.flop_counter`."""
    if all(type(output) in (View, Constant) for output in outputs):
        return NONE
    if any(type(output) is Same for output in outputs) and not func._schema.is_mutable:
        return NONE
    made = [output for output in outputs if type(output) is New]
    moved = sum(_bytes(tensor.numel(), tensor.dtype) for tensor in tensors)
    moved += sum(_bytes(torch.Size(output.shape).numel(), output.dtype) for output in made)
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    flops = 0
    if formula is not None:
        shapes = tuple(torch.Size(output.shape) if isinstance(output, New | View) else None for output in outputs)
        flops = int(formula(*args, **kwargs, out_val=shapes[0] if len(shapes) == 1 else shapes))
    hosts = {isinstance(tensor, VirtualTensor) and not tensor.host for tensor in tensors} | {
        not new.host for new in made
    }
    return Work(flops, moved, tensors[0].element_size() if tensors else 4, hosts == {True, False})


def _bytes(count: int, dtype: torch.dtype) -> int:
    return count * dtype.itemsize
