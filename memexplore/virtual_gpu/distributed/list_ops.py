"""Shardings of ops on lists of DTensors, such as those of an optimizer: found once for equal elements.

DTensor finds the sharding of each element of a list alone, which takes a few ms; a model has few different ones. In:
the schema of an op with lists. Out: the sharding that DTensor finds, without the repetitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from memexplore.torch_internals.dispatch import DisableTorchFunction

_BY_ELEMENT = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
"""Beginnings of names of ops whose results for an element depend on the elements at its place only."""


def once_for_equal_elements(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that finds shardings, whose last argument is the schema, with equal elements left out."""

    def propagate(*arguments: Any) -> Any:
        *propagator, schema = arguments
        if not schema.op.name().startswith(_BY_ELEMENT):
            return original(*propagator, schema)
        with DisableTorchFunction():
            places = equal_elements([argument for argument in schema.args_schema if isinstance(argument, list | tuple)])
            if places is None:
                return original(*propagator, schema)
            first, number = places
            found = original(*propagator, _with_lists(schema, lambda entries: [entries[place] for place in first]))
            again = found.redistribute_schema
            return dataclasses.replace(
                found,
                output_spec=_repeated(found.output_spec, number),
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
