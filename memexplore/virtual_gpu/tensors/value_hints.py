"""What little is known of a virtual tensor's values: the outcome of a question, and the share of a mask that holds.

A value counts as 1, but for the outcomes of questions such as `isnan`. Indices that came out of a choice among n, such
as the experts that a router picks, are spread evenly: a mask of those that chose one holds 1/n of its elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memexplore.torch_internals.dispatch import FakeTensor

_aten = torch.ops.aten


class Marks(NamedTuple):
    """What is known of a virtual tensor."""

    value: int = 1
    choices: int = 0
    """Its elements are choices among so many, 0 for anything else."""
    share: float = 1.0
    """The share of its elements that are true."""


_NOTHING = Marks()
After = Callable[[list[torch.Tensor], list[Any]], None]
"""Writes what is known of an op's results, given its tensor arguments."""


def of(tensor: torch.Tensor) -> Marks:
    """What is known of a tensor."""
    return tensor.__dict__.get("marks", _NOTHING)


def put(tensors: list[Any], marks: Marks) -> None:
    """Write down what is known of tensors."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            tensor.__dict__["marks"] = marks


def _constant(value: int) -> Callable[[Any], After]:
    def after(tensors: list[torch.Tensor], results: list[Any]) -> None:
        if value != 1:
            put(results, Marks(value))

    return lambda args: after


def _copied(args: Any) -> After:
    def after(tensors: list[torch.Tensor], results: list[Any]) -> None:
        marks = tensors[0].__dict__.get("marks") if tensors else None
        if marks is not None:
            put(results, marks)

    return after


def _counted(args: Any) -> After:
    def after(tensors: list[torch.Tensor], results: list[Any]) -> None:
        marks = tensors[0].__dict__.get("marks")
        if marks is not None and marks.value != 1:
            put(results, Marks(marks.value))

    return after


def _inverted(args: Any) -> After:
    def after(tensors: list[torch.Tensor], results: list[Any]) -> None:
        marks = of(tensors[0])
        put(results, Marks(1 - marks.value, share=1 - marks.share if marks.share < 1 else 1.0))

    return after


def _joined(junction: Callable[[Any, Any], Any]) -> Callable[[Any], After]:
    def after(tensors: list[torch.Tensor], results: list[Any]) -> None:
        one, other = of(tensors[0]), of(tensors[-1])
        put(results, Marks(junction(one.value, other.value), share=junction(one.share, other.share)))

    return lambda args: after


def _compared(compare: Callable[[Any, Any], bool]) -> Callable[[Any], After]:
    def make(args: Any) -> After:
        # A plan outlives the tensors that it was made for: it must not hold one.
        dims, number = (args[1].dim(), None) if isinstance(args[1], torch.Tensor) else (None, args[1])

        def after(tensors: list[torch.Tensor], results: list[Any]) -> None:
            one = of(tensors[0])
            if dims is not None:
                value = compare(one.value, of(tensors[-1]).value)
                # one_hot compares choices with all that there are to choose from
                choice = compare is operator.eq and one.choices > 0 and dims == 1
            else:
                value = compare(one.value, number)
                choice = compare is operator.eq and one.choices > 0
            if choice:
                put(results, Marks(share=1 / one.choices))
            elif not value or one.share < 1:
                put(results, Marks(int(value), share=one.share))

        return after

    return make


def _choice(index: int, position: int) -> Callable[[Any], After]:
    """An op that chooses along a dimension, its `position`-th argument, and returns where as result `index`."""

    def make(args: Any) -> After:
        dim = args[position] if len(args) > position and args[position] is not None else -1

        def after(tensors: list[torch.Tensor], results: list[Any]) -> None:
            if tensors[0].dim():
                put(results[index : index + 1], Marks(choices=tensors[0].shape[dim]))

        return after

    return make


def _scattered(args: Any) -> After:
    def after(tensors: list[torch.Tensor], results: list[Any]) -> None:
        choices = of(tensors[1]).choices
        if choices:
            put(results, Marks(share=1 / choices))

    return after


def _found_inf(args: Any) -> After:
    # The op writes into its found_inf argument, the second last tensor: no gradient is ever infinite here.
    return lambda tensors, results: put(tensors[-2:-1], Marks(0))


AFTER: dict[Any, Callable[[Any], After]] = {
    _aten.isnan.default: _constant(0),
    _aten.isinf.default: _constant(0),
    # Asked by torch.distributions of its arguments, which are taken to be as they should.
    _aten._is_all_true.default: _constant(1),
    _aten.logical_not.default: _inverted,
    _aten.bitwise_not.default: _inverted,
    _aten.logical_or.default: _joined(max),
    _aten.bitwise_or.Tensor: _joined(max),
    _aten.logical_and.default: _joined(min),
    _aten.bitwise_and.Tensor: _joined(min),
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _found_inf,
    _aten.topk.default: _choice(1, 2),
    _aten.argmax.default: _choice(0, 1),
    _aten.max.dim: _choice(1, 1),
    _aten.multinomial.default: _choice(0, 9),
    _aten.scatter_.value: _scattered,
    _aten.scatter.value: _scattered,
}
"""Ops after which something is known of their results, given their arguments."""
for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    for _overload in ("Scalar", "Tensor"):
        AFTER[getattr(getattr(_aten, _name), _overload)] = _compared(getattr(operator, _name))
for _op in (
    _aten._is_any_true.default,
    _aten.any.default,
    _aten.any.dim,
    _aten.any.dims,
    _aten.all.default,
    _aten.all.dim,
    _aten.all.dims,
    _aten.sum.default,
    _aten.sum.dim_IntList,
    _aten.count_nonzero.default,
    _aten.max.default,
    _aten.mean.default,
):
    AFTER[_op] = _counted
for _op in (
    _aten.clone.default,
    _aten.detach.default,
    _aten._to_copy.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.index.Tensor,
    _aten.expand.default,
    _aten.permute.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.unbind.int,
    _aten.stack.default,
    _aten.cat.default,
):
    AFTER[_op] = _copied
