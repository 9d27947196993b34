"""What the dispatch mode has to know of an op, read off its schema and off the tables of kernels."""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.dispatch import can_decompose, schema_or_none
from memexplore.virtual_gpu.dispatch import autograd_engine
from memexplore.virtual_gpu.kernels import data_dependent, table

_aten = torch.ops.aten

_FACTORIES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.zeros.default,
    _aten.ones.default,
    _aten.full.default,
    _aten.rand.default,
    _aten.randn.default,
}
_UNCACHED_NAMES = ("resize_", "set_", "resize_as_", "_resize_output_", "rename_", "swap_tensors")


class Known:
    """What has to be known of an op, worked out once."""

    __slots__ = ("assumed", "cached", "composite", "factory", "restored", "zeros")

    def __init__(self, func: Any) -> None:
        tags = getattr(func, "tags", ())
        schema = schema_or_none(func)
        name = schema.name.split("::")[-1] if schema is not None else ""
        returned_out = schema is not None and any(argument.is_out for argument in schema.arguments)
        self.cached = not (torch.Tag.inplace_view in tags or returned_out or name in _UNCACHED_NAMES)
        self.composite = schema is not None and can_decompose(func)
        self.factory = func in _FACTORIES
        self.assumed = data_dependent.HANDLERS.get(func) or table.HANDLERS.get(func)
        self.restored = func in autograd_engine.RESTORED
        self.zeros = func in autograd_engine.ZEROS
