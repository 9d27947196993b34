"""Read the facts about an op that the dispatch mode needs, from its schema and from the table of kernels."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from memexplore.torch_internals.dispatch import is_composite, numbers_are_tensors, schema_or_none
from memexplore.virtual_gpu.dispatch import value_lane
from memexplore.virtual_gpu.kernels import composite_dispatch, table
from memexplore.virtual_gpu.kernels.autograd_in_place import MAKES_ZEROS
from memexplore.virtual_gpu.kernels.table import Kind

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


def _count_to_scalars(schema: Any) -> int:
    """Return the number of positional arguments if the last one is a scalar or a list of scalars, else 0."""
    arguments = schema.arguments
    is_scalar = str(arguments[-1].type) in ("number", "List[number]") and not arguments[-1].kwarg_only
    return len(arguments) if is_scalar else 0


def _count_of_tensors(schema: Any) -> int:
    """Return the number of arguments before the first one that is no tensor."""
    return sum(1 for _ in itertools.takewhile(lambda argument: str(argument.type) == "Tensor", schema.arguments))


def _place_of_device(schema: Any) -> int:
    """Return the position of the argument `device`, 0 for an op without one or with one that is given by its name."""
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only] if schema is not None else []
    return names.index("device") if "device" in names else 0


class OpTraits:
    """Facts about an op that the dispatch mode needs."""

    __slots__ = (
        "cached",
        "composite",
        "data_dependent",
        "device_place",
        "factory",
        "handler",
        "in_place",
        "lane",
        "makes_zeros",
        "op",
        "reads_engine",
        "refusal",
        "scalars_last",
        "settings",
        "tensors_only",
        "writes_out",
    )

    def __init__(self, func: Any) -> None:
        self.op = func
        tags = getattr(func, "tags", ())
        schema = schema_or_none(func)
        name = schema.name.split("::")[-1] if schema is not None else ""
        returns_out = schema is not None and any(argument.is_out for argument in schema.arguments)
        self.cached = not (torch.Tag.inplace_view in tags or returns_out or name in _UNCACHED_NAMES)
        """Whether a plan depends on the metadata of the arguments only."""
        self.writes_out = returns_out and not (torch.Tag.inplace_view in tags or name in _UNCACHED_NAMES)
        """Whether the op has an `out` argument, which it resizes if it has another shape than the result."""
        # Ops of the namespace prim have no kernels.
        composite = schema is not None and func.namespace != "prim" and is_composite(func)
        composite = composite and not composite_dispatch.has_cuda_kernel(name)
        self.composite = composite_dispatch.kernel_of(func) if composite else None
        """Runs a composite op by other ops; None for ops that are none."""
        self.tensors_only = 0 if schema is None or numbers_are_tensors(name) else _count_of_tensors(schema)
        """Number of first arguments that are tensors, in place of which Python can pass no number."""
        self.device_place = _place_of_device(schema)
        """Position of a device among the arguments, 0 if it is given by its name. `to` has one."""
        self.factory = func in _FACTORIES
        """Whether the op makes a tensor from a shape, its first argument."""
        self.data_dependent = table.find(func, Kind.DATA_DEPENDENT) is not None
        """Whether shape or result depend on values."""
        self.lane = value_lane.lane_traits(func)
        """Facts for the value lane."""
        self.handler = table.find(func, Kind.DATA_DEPENDENT) or table.find(func, Kind.OPS)
        """A rule that runs the op by other ops or plans, or None."""
        self.refusal = table.find(func, Kind.REFUSAL)
        """Raises the error of arguments that the kernel refuses, or None."""
        self.in_place = table.find(func, Kind.IN_PLACE)
        """The op that a formula of autograd runs instead on a real GPU, or None."""
        self.reads_engine = func is _aten.add.Tensor or self.in_place is not None
        """Whether the op behaves differently when the autograd engine calls it."""
        self.settings = table.find(func, Kind.SETTINGS) or table.find(func, Kind.TF32)
        """A function that returns the global settings of torch on which a plan depends, or None."""
        self.makes_zeros = func in MAKES_ZEROS
        self.scalars_last = _count_to_scalars(schema) if name.startswith("_foreach_") and name.endswith("_") else 0
        """Number of arguments if the op writes to lists of tensors and the last one is a scalar, or a list of them.

        The plan depends on their types only: an optimizer passes other step sizes in each step.
        """
