"""Run higher-order operators by the ops of their functions: `torch.cond`, `while_loop`, `scan`, `map`, flex_attention.

Autograd works through these ops. flex_attention is fused inside a compiled function, and unfused elsewhere, as on a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.higher_order import unfused_flex_attention
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu, is_virtual


def calling(original: Callable[..., Any], in_compiled_code: Callable[[], bool]) -> Callable[..., Any]:
    """Return `HigherOrderOperator.__call__`; `in_compiled_code` says whether the user compiled the running code."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = _HANDLERS.get(self.__name__)
        if run is not None and any(is_virtual(value) for value in pytree.tree_leaves((args, kwargs))):
            return run(*args, **kwargs)
        if self.__name__ == "flex_attention" and is_on_gpu(args[0]):
            return _flex_attention(in_compiled_code(), *args, **kwargs)
        return original(self, *args, **kwargs)

    return call


def _cond(predicate: Any, if_true: Any, if_false: Any, operands: Any) -> Any:
    return if_true(*operands) if predicate else if_false(*operands)


def _while_loop(condition: Any, body: Any, carried: Any, further: Any, **_: Any) -> Any:
    while condition(*carried, *further):
        carried = body(*carried, *further)
    return carried


def _scan(combine: Any, initial: Any, rows: Any, further: Any) -> Any:
    """Return the last carried values, and the outputs of all rows along a new first dimension."""
    carried, outputs = list(initial), []
    for number in range(rows[0].shape[0]):
        result = combine(*carried, *(row[number] for row in rows), *further)
        carried, made = list(result[: len(carried)]), result[len(carried) :]
        outputs.append(made)
    return (*carried, *(torch.stack(column) for column in zip(*outputs, strict=True)))


def _map(function: Any, rows: Any, further: Any, **_: Any) -> Any:
    """Return the outputs of a function of each row, in its containers, along a new first dimension."""
    results = [function(*(row[number] for row in rows), *further) for number in range(rows[0].shape[0])]
    columns = zip(*map(pytree.tree_leaves, results), strict=True)
    return pytree.tree_unflatten([torch.stack(column) for column in columns], pytree.tree_flatten(results[0])[1])


def _call(function: Any, *operands: Any, **_: Any) -> Any:
    return function(*operands)


_HANDLERS: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    # The compiler fuses what it calls.
    "foreach_map": _call,
}


# --- flex_attention -------------------------------------------------------------------------------------------------


def _flex_attention(
    compiled: bool,
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    options: Any,
    *buffers: Any,
) -> Any:
    function = _Fused if compiled else _Unfused
    return function.apply(query, key, value, (score_mod, block_mask, scale, options), *_captured(score_mod))


def _captured(function: Any) -> list[torch.Tensor]:
    """Return the tensors that a score function closes over and that need a gradient, such as a learned bias."""
    cells = getattr(function, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells]
    return [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]


def _strided_like(shape: tuple[int, ...], query: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor whose dimensions lie in memory as those of the query."""
    strides = query.stride()
    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    return query.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


class _Fused(torch.autograd.Function):
    """The Triton kernels of torch/_inductor/kernel/flex: no scores in memory, one float32 number for each row."""

    @staticmethod
    def forward(context: Any, query: Any, key: Any, value: Any, rest: Any, *captured: Any) -> Any:
        rows = query.shape[:-1]
        output = _strided_like((*rows, value.shape[-1]), query)
        sums = query.new_empty(rows, dtype=torch.float32)
        largest = query.new_empty(rows if rest[3].get("OUTPUT_MAX") else 0, dtype=torch.float32)
        context.save_for_backward(query, key, value, output, sums, *captured)
        context.mark_non_differentiable(largest)
        context.set_materialize_grads(False)
        return output, sums, largest

    @staticmethod
    def backward(context: Any, gradient: Any, *_: Any) -> Any:  # type: ignore[override]
        query, key, value, _output, sums, *captured = context.saved_tensors
        delta = torch.empty_like(sums)
        gradients = [torch.zeros_like(tensor) for tensor in captured]
        result = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del delta
        return (*result, None, *gradients)


class _Unfused(torch.autograd.Function):
    """torch's own unfused functions, which hold all scores and compute them again in the backward pass."""

    @staticmethod
    def forward(context: Any, query: Any, key: Any, value: Any, rest: Any, *captured: Any) -> Any:
        forward, _ = unfused_flex_attention()
        output, sums, largest = forward(query, key, value, *rest)
        context.save_for_backward(query, key, value, output, sums, *captured)
        context.rest = rest
        context.mark_non_differentiable(largest)
        return output, sums, largest

    @staticmethod
    def backward(context: Any, gradient: Any, gradient_of_sums: Any, _: Any) -> Any:  # type: ignore[override]
        _, backward = unfused_flex_attention()
        query, key, value, output, sums, *captured = context.saved_tensors
        score_mod, *rest = context.rest

        def joint(score: Any, batch: Any, head: Any, row: Any, column: Any, outer: Any) -> Any:
            pull_back: Any = torch.func.vjp(lambda score: score_mod(score, batch, head, row, column), score)[1]
            return [*pull_back(outer), None, None, None, None]

        result = backward(query, key, value, output, sums, gradient, gradient_of_sums, score_mod, joint, *rest, (), ())
        gradients = [torch.zeros_like(tensor) for tensor in captured]
        return (*result[:3], None, *gradients)
