"""Keep value hints: facts and guesses about the values of a virtual tensor where the values are not known.

`rule` returns the function that sets the hints of an op's results. They are few: the value of each element where it
does not count as 1 (`isnan` gives 0), among how many candidates indices were chosen, the share of a mask that is true.
Indices that come from a choice among n, such as the experts that a router picks, are spread evenly: a mask of the
elements that chose one of them is true for 1/n of its elements. (Small ones have values: choices.py.)

A comparison with an unknown value may only guess that a mask is false. What the program does first then decides about
the whole mask: what it counts or tests (`any`, `sum`) is false, what it selects (`nonzero`, `x[mask]`) is all elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memexplore.torch_internals.tensors import has_python_key, storage_key, untyped_storage
from memexplore.virtual_gpu.values import choices, known_values

_aten = torch.ops.aten


class ValueHints(NamedTuple):
    """What is known or guessed about the values of a virtual tensor."""

    value: float = 1
    """The value of each element."""
    choices: int = 0
    """Number of candidates from which the elements, indices, were chosen; 0 for tensors that are not indices."""
    share: float = 1.0
    """The share of the elements that are true."""
    is_fact: bool = False
    """Whether the value follows from a rule, such as that no value is NaN, and not from what others count as."""
    is_open: bool = False
    """Whether a mask is only guessed to be false, and its first use decides."""

    def count(self, elements: int) -> int:
        """Return how many of so many elements are true."""
        return math.ceil(self.share * elements) if self.value else 0


_DEFAULT = ValueHints()
_hints: dict[int, dict[Any, ValueHints]] = {}
"""Key of a storage -> layout of a tensor in it -> hints; removed when the storage dies."""
SetHints = Callable[[list[torch.Tensor], list[Any]], None]
"""Sets the hints of an op's results, given its tensor arguments and its results."""


def of(tensor: torch.Tensor) -> ValueHints:
    """Return the hints of a tensor: those of its values if they are known, by default those of a tensor of ones."""
    if not has_python_key(tensor):
        return _of_known(tensor)
    known, given = known_values.of(tensor), _given(tensor) or _DEFAULT
    # What is made of known choices may be too large to have values.
    return given if known is None else _of_known(known)._replace(choices=given.choices)


def _given(tensor: torch.Tensor) -> ValueHints | None:
    layouts = _hints.get(storage_key(untyped_storage(tensor))) if _hints else None
    return None if layouts is None else layouts.get(_layout(tensor))


def _layout(tensor: torch.Tensor) -> Any:
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _of_known(known: torch.Tensor) -> ValueHints:
    if known.dtype is torch.bool:
        share = known.float().mean().item() if known.numel() else 1.0
        return ValueHints(int(share > 0), share=share or 1.0, is_fact=True)
    if known.dtype.is_complex or not known.numel():
        return _DEFAULT
    low, high = known.min().item(), known.max().item()
    return ValueHints(low, is_fact=True) if low == high else _DEFAULT


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


def selected(mask: torch.Tensor) -> ValueHints:
    """Return the hints of a mask by which elements are selected: all of them where it was only guessed to be false."""
    hints = of(mask)
    if hints.is_open:
        hints = ValueHints()
        put([mask], hints)
    return hints


def _counted(mask: torch.Tensor) -> ValueHints:
    """Return the hints of a mask whose true elements are counted: none where it was only guessed to be false."""
    hints = of(mask)
    if hints.is_open:
        hints = hints._replace(is_open=False)
        put([mask], hints)
    return hints


def _constant(value: int) -> Callable[[Any], SetHints]:
    return lambda args: lambda tensors, results: put(results, ValueHints(value, is_fact=True))


def _copy_hints(args: Any) -> SetHints:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        hints = _given(tensors[0]) if tensors else None
        if hints is not None:
            put(results, hints)

    return set_hints


def _copy_value(args: Any) -> SetHints:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        hints = _given(tensors[0])
        if hints is not None and (hints.value != 1 or hints.is_fact):
            put(results, ValueHints(hints.value, is_fact=hints.is_fact))

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
        mask = tensors[0]
        if mask.dtype is torch.bool and results[0].numel():
            hints = _counted(mask)
            put(results, ValueHints(hints.count(mask.numel() // results[0].numel()), is_fact=hints.is_fact))
            return
        hints = of(mask)
        if hints.value != 1:
            put(results, ValueHints(hints.value, is_fact=hints.is_fact))

    return set_hints


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Any], SetHints | None]:
    """Arithmetic of an integer tensor, such as a count, whose value is not 1, with a number."""

    def make(args: Any) -> SetHints | None:
        if len(args) != 2 or not isinstance(args[1], int) or args[0].dtype.is_floating_point:
            return None
        number = args[1]

        def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
            hints = _given(tensors[0])
            if hints is not None and hints.value != 1:
                put(results, ValueHints(function(hints.value, number), is_fact=hints.is_fact))

        return set_hints

    return make


def _multiply(args: Any) -> SetHints | None:
    """A product of masks, as in `isfinite`, or of a count and a number."""
    if isinstance(args[1], torch.Tensor):
        return _combine(min)(args) if args[0].dtype is args[1].dtype is torch.bool else None
    return _arithmetic(operator.mul)(args)


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
    """True where at least one element is; along a dimension each result takes in several elements."""

    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        mask, result = tensors[0], results[0]
        if _given(mask) is None or not result.numel():
            return
        if result.numel() == 1:
            hints = _counted(mask)
            put(results, ValueHints(int(hints.count(mask.numel()) > 0), is_fact=hints.is_fact))
        else:
            hints = of(mask)
            put(results, hints._replace(share=min(1.0, hints.share * mask.numel() / result.numel())))

    return set_hints


def _all(args: Any) -> SetHints:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        mask = tensors[0]
        if _given(mask) is None or not results[0].numel():
            return
        hints = _counted(mask) if results[0].numel() == 1 else of(mask)
        put(results, ValueHints(int(hints.share == 1 and bool(hints.value)), is_fact=hints.is_fact))

    return set_hints


def _invert(args: Any) -> SetHints:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        hints = of(tensors[0])
        share = 1 - hints.share if hints.value else 1.0
        guessed = hints is _DEFAULT and not known_values.is_known(tensors[0])
        put(results, ValueHints(int(share > 0), share=share or 1.0, is_fact=hints.is_fact, is_open=guessed))

    return set_hints


def _combine(function: Callable[[Any, Any], Any]) -> Callable[[Any], SetHints]:
    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        first, second = of(tensors[0]), of(tensors[-1])
        value, share = function(first.value, second.value), function(first.share, second.share)
        guessed = not value and (first.is_open or second.is_open)
        is_fact = first.is_fact and second.is_fact
        put(results, ValueHints(value, share=share, is_fact=is_fact, is_open=guessed))

    return lambda args: set_hints


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    mine, other = untyped_storage(first), untyped_storage(second)
    return storage_key(mine) == storage_key(other) and _layout(first) == _layout(second)


def _compare(compare: Callable[[Any, Any], bool]) -> Callable[[Any], SetHints]:
    def make(args: Any) -> SetHints:
        # Of a tensor only its number of dimensions: a plan must not hold a tensor.
        dims, number = (args[1].dim(), None) if isinstance(args[1], torch.Tensor) else (None, args[1])
        is_infinite = isinstance(number, float) and not math.isfinite(number)

        def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
            first = of(tensors[0])
            second = of(tensors[-1]) if number is None else ValueHints(number, is_fact=True)
            value = compare(first.value, second.value)
            # one_hot compares the choices with a row of all candidates.
            is_choice = compare is operator.eq and first.choices > 0 and results[0].numel() > 1
            if is_choice and (dims is None or dims == 1):
                put(results, ValueHints(share=1 / first.choices))
                return
            is_fact = is_infinite or (first.is_fact and second.is_fact) or (dims is not None and _is_same(*tensors[:2]))
            if is_fact or not value or first.share < 1:
                is_open = not value and not is_fact
                put(results, ValueHints(int(value), share=first.share, is_fact=is_fact, is_open=is_open))

        return set_hints

    return make


def _choose(choosing: choices.Choosing) -> Callable[[Any], SetHints]:
    """An op that chooses along a dimension: the middle candidate, where the indices have no values."""

    def make(args: Any) -> SetHints:
        number = choices.candidates(args[0], choosing.dimension(args, {}))
        hints = ValueHints(number // 2, choices=number)
        return lambda tensors, results: put(results[choosing.result : choosing.result + 1], hints)

    return make


def _add_zero(args: Any) -> SetHints | None:
    """A count in place, such as of gradients that are not finite, to which 0 is added."""
    if not isinstance(args[1], torch.Tensor):
        return None

    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        added = _given(tensors[1]) if len(tensors) > 1 else None
        if added is not None and added.value == 0 and of(tensors[0]).value == 0:
            put(results, ValueHints(0, is_fact=added.is_fact))
        else:
            _hints.get(storage_key(untyped_storage(tensors[0])), {}).pop(_layout(tensors[0]), None)

    return set_hints


def _scatter(args: Any) -> SetHints:
    """A mask of the candidates that were chosen: of all elements as many are true as there are choices."""

    def set_hints(tensors: list[torch.Tensor], results: list[Any]) -> None:
        if of(tensors[1]).choices and results[0].numel():
            put(results, ValueHints(share=min(1.0, tensors[1].numel() / results[0].numel())))

    return set_hints


def _no_error(result: int) -> Callable[[Any], SetHints]:
    """A factorization that succeeds: its result of this number counts as 0."""
    return lambda args: lambda tensors, results: put(results[result : result + 1], ValueHints(0, is_fact=True))


def _found_inf(args: Any) -> SetHints:
    # The op writes into its argument found_inf, the second last tensor: no virtual gradient is infinite.
    return lambda tensors, results: put(tensors[-2:-1], ValueHints(0, is_fact=True))


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
    _aten.linalg_cholesky_ex.default: _no_error(1),
    _aten.linalg_inv_ex.default: _no_error(1),
    _aten.linalg_lu_factor_ex.default: _no_error(2),
    _aten.linalg_ldl_factor_ex.default: _no_error(2),
    _aten._linalg_solve_ex.default: _no_error(3),
    _aten.where.self: _where,
    # An unknown token is none of given ones, such as the end token.
    _aten.isin.Tensor_Tensor: _constant(0),
    _aten.isin.Tensor_Scalar: _constant(0),
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _found_inf,
    _aten.add_.Tensor: _add_zero,
    _aten.mul.Tensor: _multiply,
    # A position among sorted values: the first one is always valid.
    _aten.searchsorted.Tensor: _constant(0),
    _aten.searchsorted.Scalar: _constant(0),
    _aten.bucketize.Tensor: _constant(0),
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
):
    RULES[_op] = _arithmetic(_function)
for _op, _choosing in choices.OPS.items():
    RULES[_op] = _choose(_choosing)
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
