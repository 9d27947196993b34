"""Keep value hints: facts about the values of a virtual tensor that are known where the values are not.

`rule` returns the function that sets the hints of an op's results. Two facts are kept: the value itself, where an op's
result does not count as 1 (`isnan` gives 0), and the share of a mask that is true. Indices that come from a choice
among n, such as the experts that a router picks, are spread evenly: a mask of the elements that chose one of them is
true for 1/n of its elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memexplore.torch_internals.tensors import has_python_key, storage_key, untyped_storage
from memexplore.virtual_gpu.values import known_values

_aten = torch.ops.aten


class ValueHints(NamedTuple):
    """Known facts about the values of a virtual tensor."""

    value: float = 1
    """The value of each element."""
    choices: int = 0
    """Number of candidates from which the elements, indices, were chosen; 0 for tensors that are not indices."""
    share: float = 1.0
    """The share of the elements that are true."""


_DEFAULT = ValueHints()
_hints: dict[int, dict[Any, ValueHints]] = {}
"""Key of a storage -> layout of a tensor in it -> hints; removed when the storage dies."""
SetHints = Callable[[list[torch.Tensor], list[Any]], None]
"""Sets the hints of an op's results, given its tensor arguments and its results."""


def of(tensor: torch.Tensor) -> ValueHints:
    """Return the hints of a tensor: those of its values if they are known, by default those of a tensor of ones."""
    if not has_python_key(tensor):
        return _of_known(tensor)
    known = known_values.of(tensor)
    if known is not None:
        return _of_known(known)
    return _given(tensor) or _DEFAULT


def _given(tensor: torch.Tensor) -> ValueHints | None:
    layouts = _hints.get(storage_key(untyped_storage(tensor))) if _hints else None
    return None if layouts is None else layouts.get(_layout(tensor))


def _layout(tensor: torch.Tensor) -> Any:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _of_known(known: torch.Tensor) -> ValueHints:
    if known.dtype is torch.bool:
        share = known.float().mean().item() if known.numel() else 1.0
        return ValueHints(int(share > 0), share=share or 1.0)
    if known.dtype.is_complex or not known.numel():
        return _DEFAULT
    low, high = known.min().item(), known.max().item()
    return ValueHints(low) if low == high else _DEFAULT


def put(tensors: list[Any], hints: ValueHints) -> None:
    """Set the hints of the virtual tensors among values."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and has_python_key(tensor):
            _hints.setdefault(storage_key(untyped_storage(tensor)), {})[_layout(tensor)] = hints


def forget_storage(key: int) -> None:
    """Forget the hints of the tensors in a storage that has died."""
    _hints.pop(key, None)


def rule(op: Any, args: Any) -> SetHints | None:
    """Return what sets the hints of an op's results, None for an op whose results count as 1.

    It holds no tensor of `args`: the plan that it becomes a part of outlives them.
    """
    make = RULES.get(op)
    return make(args) if make is not None else None


def _constant(value: int) -> Callable[[Any], SetHints]:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        if value != 1:
            put(results, ValueHints(value))

    return lambda args: set_hints


def _copy_hints(args: Any) -> SetHints:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        hints = _given(tensors[0]) if tensors else None
        if hints is not None:
            put(results, hints)

    return set_hints


def _copy_value(args: Any) -> SetHints:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        hints = _given(tensors[0])
        if hints is not None and hints.value != 1:
            put(results, ValueHints(hints.value))

    return set_hints


def _copy_hints_of_unknown(args: Any) -> SetHints:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        for tensor in tensors:
            hints = _given(tensor)
            if hints is not None:
                put(results, hints)
                return

    return set_hints


def _count(args: Any) -> SetHints:
    """The number of true elements of a mask; of other tensors a value that differs from 1."""

    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        mask, hints = tensors[0], of(tensors[0])
        if mask.dtype is torch.bool and results[0].numel():
            summed = mask.numel() // results[0].numel()
            put(results, ValueHints(math.ceil(hints.value * hints.share * summed)))
        elif hints.value != 1:
            put(results, ValueHints(hints.value))

    return set_hints


def _integers(function: Callable[[Any, Any], Any]) -> Callable[[Any], SetHints | None]:
    """Arithmetic of an integer tensor, such as a count, whose value is not 1."""

    def make(args: Any) -> SetHints | None:
        if len(args) != 2 or not isinstance(args[1], int) or args[0].dtype.is_floating_point:
            return None
        number = args[1]

        def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
            hints = _given(tensors[0])
            if hints is not None and hints.value != 1:
                put(results, ValueHints(function(hints.value, number)))

        return set_hints

    return make


def _where(args: Any) -> SetHints:
    """The values of the branch that the condition's value takes."""

    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        if len(tensors) == 3:
            chosen = tensors[1] if of(tensors[0]).value else tensors[2]
            hints = of(chosen)
            if hints is not _DEFAULT:
                put(results, hints)

    return set_hints


def _any(args: Any) -> SetHints:
    """True if the share of true elements is one element at least."""

    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        hints = _given(tensors[0])
        if hints is not None and (hints.value != 1 or hints.share < 1):
            put(results, ValueHints(int(bool(hints.value) and hints.share * tensors[0].numel() >= 1)))

    return set_hints


def _all(args: Any) -> SetHints:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        hints = _given(tensors[0])
        if hints is not None and (hints.value != 1 or hints.share < 1):
            put(results, ValueHints(0))

    return set_hints


def _invert(args: Any) -> SetHints:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        hints = of(tensors[0])
        put(results, ValueHints(1 - hints.value, share=1 - hints.share if hints.share < 1 else 1.0))

    return set_hints


def _combine(function: Callable[[Any, Any], Any]) -> Callable[[Any], SetHints]:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        first, second = of(tensors[0]), of(tensors[-1])
        put(results, ValueHints(function(first.value, second.value), share=function(first.share, second.share)))

    return lambda args: set_hints


def _compare(compare: Callable[[Any, Any], bool]) -> Callable[[Any], SetHints]:
    def make(args: Any) -> SetHints:
        # Of a tensor only its number of dimensions: a plan must not hold a tensor.
        dims, number = (args[1].dim(), None) if isinstance(args[1], torch.Tensor) else (None, args[1])

        def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
            first = of(tensors[0])
            if dims is not None:
                value = compare(first.value, of(tensors[-1]).value)
                # one_hot compares the choices with a row of all candidates.
                selects_choice = compare is operator.eq and first.choices > 0 and dims == 1
            else:
                value = compare(first.value, number)
                selects_choice = compare is operator.eq and first.choices > 0
            if selects_choice:
                put(results, ValueHints(share=1 / first.choices))
            elif not value or first.share < 1:
                put(results, ValueHints(int(value), share=first.share))

        return set_hints

    return make


def _choose(result: int, dim_position: int) -> Callable[[Any], SetHints]:
    """An op that chooses along a dimension: `dim_position` of that argument, `result` is the index of the indices."""

    def make(args: Any) -> SetHints:
        dim = args[dim_position] if len(args) > dim_position and args[dim_position] is not None else -1

        def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
            if tensors[0].dim():
                put(results[result : result + 1], ValueHints(choices=tensors[0].shape[dim]))

        return set_hints

    return make


def _add_zero(args: Any) -> SetHints | None:
    """A count in place, such as of gradients that are not finite, to which 0 is added."""
    if not isinstance(args[1], torch.Tensor):
        return None

    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        added = _given(tensors[1]) if len(tensors) > 1 else None
        if added is not None and added.value == 0 and of(tensors[0]).value == 0:
            put(results, ValueHints(0))
        else:
            _hints.get(storage_key(untyped_storage(tensors[0])), {}).pop(_layout(tensors[0]), None)

    return set_hints


def _scatter(args: Any) -> SetHints:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        choices = of(tensors[1]).choices
        if choices:
            put(results, ValueHints(share=1 / choices))

    return set_hints


def _no_error(result: int) -> Callable[[Any], SetHints]:
    """A factorization that succeeds: its result of this number counts as 0."""
    return lambda args: lambda tensors, results: put(results[result : result + 1], ValueHints(0))


def _found_inf(args: Any) -> SetHints:
    # The op writes into its argument found_inf, the second last tensor: no virtual gradient is infinite.
    return lambda tensors, results: put(tensors[-2:-1], ValueHints(0))


RULES: dict[Any, Callable[[Any], SetHints | None]] = {
    _aten.isnan.default: _constant(0),
    _aten.isinf.default: _constant(0),
    # torch.distributions checks its arguments with it: they count as valid.
    _aten._is_all_true.default: _constant(1),
    _aten.logical_not.default: _invert,
    _aten.bitwise_not.default: _invert,
    _aten.logical_or.default: _combine(max),
    _aten.bitwise_or.Tensor: _combine(max),
    _aten.logical_and.default: _combine(min),
    _aten.bitwise_and.Tensor: _combine(min),
    # An unknown token is none of given ones, such as the end token.
    _aten.linalg_cholesky_ex.default: _no_error(1),
    _aten.linalg_inv_ex.default: _no_error(1),
    _aten.linalg_lu_factor_ex.default: _no_error(2),
    _aten.linalg_ldl_factor_ex.default: _no_error(2),
    _aten._linalg_solve_ex.default: _no_error(3),
    _aten.where.self: _where,
    _aten.isin.Tensor_Tensor: _constant(0),
    _aten.isin.Tensor_Scalar: _constant(0),
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _found_inf,
    _aten.add_.Tensor: _add_zero,
    _aten.topk.default: _choose(1, 2),
    _aten.argmax.default: _choose(0, 1),
    _aten.max.dim: _choose(1, 1),
    _aten.multinomial.default: _choose(0, 9),
    _aten.scatter_.value: _scatter,
    _aten.scatter.value: _scatter,
}
"""Op -> function of its arguments that returns what sets the hints of its results."""
for _name in ("gt", "ge", "lt", "le", "eq", "ne"):
    for _overload in ("Scalar", "Tensor"):
        RULES[getattr(getattr(_aten, _name), _overload)] = _compare(getattr(operator, _name))
for _op in (
    _aten.max.default,
    _aten.mean.default,
):
    RULES[_op] = _copy_value
for _op in (_aten.sum.default, _aten.sum.dim_IntList, _aten.count_nonzero.default, _aten.count_nonzero.dim_IntList):
    RULES[_op] = _count
for _op, _function in (
    (_aten.add.Tensor, operator.add),
    (_aten.sub.Tensor, operator.sub),
    (_aten.mul.Tensor, operator.mul),
):
    RULES[_op] = _integers(_function)
for _op in (_aten._is_any_true.default, _aten.any.default, _aten.any.dim, _aten.any.dims):
    RULES[_op] = _any
for _op in (_aten.all.default, _aten.all.dim, _aten.all.dims):
    RULES[_op] = _all
for _op in (_aten.stack.default, _aten.cat.default):
    RULES[_op] = _copy_hints_of_unknown
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
    _aten.gather.default,
    _aten.index_select.default,
):
    RULES[_op] = _copy_hints
