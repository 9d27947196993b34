"""Run DTensor on a virtual GPU: the device of its wrappers, shapes of results in a fake mode, and composite ops.

The dispatch mode of the virtual GPU leaves an op on a DTensor to DTensor, which calls ops on the local tensors.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memexplore.torch_internals.dispatch import DisableTorchFunction, disable_current_modes, schema_of
from memexplore.torch_internals.dtensor import (
    DETECT_FAKE_MODE,
    PROPAGATE,
    PROPAGATE_SHARDING,
    RANDOM_STATE,
    WAIT_TENSOR,
    WRAP_TENSOR,
    AsyncCollectiveTensor,
    DTensor,
    OwnRandomState,
    forget_shardings,
)
from memexplore.virtual_gpu.kernels import composite_dispatch, table
from memexplore.virtual_gpu.patches.install import Call, Insert, Patch, Replace
from memexplore.virtual_gpu.tensors.fake_tensors import plain_fake_mode

_DEVICE_NAMES = ("device", "is_cuda", "is_cpu", "is_meta")
_INNER = ((DTensor, "_local_tensor"), (AsyncCollectiveTensor, "elem"))
"""Wrappers, and the attribute that holds the tensor inside."""


def patches() -> list[Patch]:
    """Return the patches of DTensor."""
    fake = plain_fake_mode()
    return [
        # Outermost: only torch's own caches can be cleared.
        Call(forget_shardings, forget_shardings),
        Replace(PROPAGATE.owner, PROPAGATE.name, _without_modes(PROPAGATE.value)),
        *(Replace(rule.owner, rule.name, once_for_equal_elements(rule.value)) for rule in PROPAGATE_SHARDING),
        Replace(DETECT_FAKE_MODE.owner, DETECT_FAKE_MODE.name, lambda *inputs: fake),
        Replace(RANDOM_STATE.owner, RANDOM_STATE.name, OwnRandomState()),
        Call(composite_dispatch.register_for_distributed, composite_dispatch.unregister_for_distributed),
        *(Insert(table.TABLE, op, {table.Kind.OPS: _WRAPPING}) for op in WRAP_TENSOR),
        *(Insert(table.TABLE, op, {table.Kind.OPS: _WAITING}) for op in WAIT_TENSOR),
        *(
            Replace(wrapper, name, property(operator.attrgetter(f"{inner}.{name}")))
            for wrapper, inner in _INNER
            for name in _DEVICE_NAMES
        ),
    ]


def _wrap(runner: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the op that wraps the output of a collective: a wrapper has no memory of its own."""
    return AsyncCollectiveTensor(args[0])


def _wait(runner: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the op that waits for the output of a collective: it returns this output, although its schema says a copy."""
    return args[0]


_WAITING = table.Entry(table.Kind.OPS, _wait, "torch/csrc/distributed/c10d/Functional.cpp")
_WRAPPING = table.Entry(table.Kind.OPS, _wrap, "torch/distributed/_functional_collectives.py")


def _without_modes(original: Callable[..., Any]) -> Callable[..., Any]:
    def propagate(propagator: Any, schema: Any) -> Any:
        if torch.Tag.nondeterministic_seeded in schema.op.tags and schema_of(schema.op).is_mutable:
            # Of the shape of its first argument. torch's fake mode would ask the GPU for its random state.
            return schema.args_schema[0].tensor_meta
        with disable_current_modes(), DisableTorchFunction():
            return original(propagator, schema)

    return propagate


# --- ops on lists, such as those of an optimizer ------------------------------------------------------------------

_BY_ELEMENT = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
"""Beginnings of names of ops whose results for an element depend on the elements at its place only."""


def once_for_equal_elements(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that finds shardings, whose last argument is the schema, with equal elements left out.

    DTensor finds the sharding of each element of a list alone, which takes a few ms; a model has few different ones.
    """

    def propagate(*arguments: Any) -> Any:
        *propagator, schema = arguments
        if not schema.op.name().startswith(_BY_ELEMENT):
            return original(*propagator, schema)
        with DisableTorchFunction():
            places = equal_elements([argument for argument in schema.args_schema if isinstance(argument, list | tuple)])
            if places is None:
                return original(*propagator, schema)
            first, number = places
            sharding = original(*propagator, _with_lists(schema, lambda entries: [entries[place] for place in first]))
            again = sharding.redistribute_schema
            return dataclasses.replace(
                sharding,
                output_spec=_repeated(sharding.output_spec, number),
                redistribute_schema=again and _with_lists(again, lambda entries: _repeated(entries, number)),
            )

    return propagate


def equal_elements(lists: Sequence[Sequence[Any]]) -> tuple[list[int], list[int]] | None:
    """Return the place of the first of each set of equal elements, and for each place the number of its set.

    An element is what lists of one length have at a place; empty lists do not count. None where the lists are of
    different lengths, or no elements are equal.

    >>> equal_elements(["aabab", (1, 1, 2, 1, 2)])
    ([0, 2], [0, 0, 1, 0, 1])
    """
    lists = [entries for entries in lists if len(entries)]
    if not lists or any(len(entries) != len(lists[0]) for entries in lists):
        return None
    numbers: dict[Any, int] = {}
    first: list[int] = []
    number: list[int] = []
    for place, entries in enumerate(zip(*lists, strict=True)):
        # 1, 1.0 and True are equal and give results of different dtypes.
        key = tuple((type(entry), entry) for entry in entries)
        if key not in numbers:
            numbers[key] = len(first)
            first.append(place)
        number.append(numbers[key])
    return (first, number) if len(first) < len(number) else None


def _with_lists(schema: Any, change: Callable[[Sequence[Any]], Any]) -> Any:
    """Return the schema of an op with each list of its arguments changed."""
    arguments = [
        type(argument)(change(argument)) if isinstance(argument, list | tuple) and len(argument) else argument
        for argument in schema.args_schema
    ]
    return type(schema)(schema.op, tuple(arguments), schema.kwargs_schema, schema.schema_info)


def _repeated(entries: Any, number: list[int]) -> Any:
    """Return a list or tuple with its entry for each place; anything else as it is."""
    return type(entries)(entries[index] for index in number) if isinstance(entries, list | tuple) else entries
