"""Find the weights that the optimizers of a failed program update, their state, and gradients that nobody uses.

A graph that leads only to weights of no optimizer is kept for nothing, and so are the gradients of these weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from memexplore.out_of_memory.evidence_types import Holder, State, VariableUse
from memexplore.out_of_memory.reach import Block, address_of, is_node, models_of, reached_from
from memexplore.torch_internals.tensors import saved_values

_SHARDED = ("FSDP", "FullyShardedDataParallel")
"""Classes of modules whose weights in the graph are not the optimizer's."""
_MOST_NAMES = 4
"""Names of parts that are listed."""


def optimizers_in(objects: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers among objects, without wrappers of another optimizer."""
    optimizers = [value for value in objects if isinstance(value, torch.optim.Optimizer)]
    return [value for value in optimizers if not isinstance(vars(value).get("optimizer"), torch.optim.Optimizer)]


def state_of(optimizers: list[torch.optim.Optimizer]) -> State:
    """Return whether optimizers keep tensors from step to step, or will after their first step.

    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> [state_of(each).value for each in ([], [torch.optim.SGD([weight])], [torch.optim.Adam([weight])])]
    ['none', 'none', 'kept']
    """
    return State.KEPT if any(_keeps_state(optimizer) for optimizer in optimizers) else State.NONE


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return momentum or not isinstance(optimizer, torch.optim.SGD)


def without_update(
    objects: list[Any], blocks: Iterable[Mapping[int, Block]], variables: Iterable[tuple[str, Any]], end: float
) -> Holder | None:
    """Return the memory that graphs and gradients take for weights that no optimizer updates.

    `objects` were reached, with these blocks; `variables` name models. None where every weight is updated, where no
    optimizer has weights of a model, where weights are sharded, as the graph then has other tensors, and after the time
    `end`. Inputs that require a gradient are no weights: their gradient may be used.
    """
    updated = {
        id(weight)
        for optimizer in optimizers_in(objects)
        for group in optimizer.param_groups
        for weight in group["params"]
    }
    modules = [value for value in objects if isinstance(value, torch.nn.Module)]
    weights = {id(weight): weight for module in modules for weight in module.parameters(recurse=False)}
    sharded = any(kind.__name__.startswith(_SHARDED) for module in modules for kind in type(module).__mro__)
    if updated.isdisjoint(weights) or sharded:
        return None
    nodes = {id(value): value for value in objects if is_node(value)}
    idle = {number: weight for number, weight in weights.items() if number not in updated and weight.requires_grad}
    leads = _leads_to_update(nodes, idle)
    in_use = {address for reached_blocks in blocks for address, block in reached_blocks.items() if not block.in_graph}
    saved: dict[bool, dict[int, int]] = {True: {}, False: {}}
    reached: set[int] = set()
    for number, node in nodes.items():
        if time.thread_time() > end:
            return None
        saved_blocks = reached_from(saved_values(node), end, nodes.keys()).blocks
        saved[leads[number]].update((address, block.size) for address, block in saved_blocks.items())
        if not leads[number] and id(getattr(node, "variable", None)) in idle:
            reached.add(id(node.variable))
    sizes = {
        address: size for address, size in saved[False].items() if address not in in_use and address not in saved[True]
    }
    in_graph = frozenset(sizes)
    gradients = [idle[number].grad for number in reached]
    sizes.update(address_of(gradient) for gradient in gradients if gradient is not None)
    sizes.pop(0, None)
    if not sizes:
        return None
    names = _names(set(idle), reached, variables)
    name = ", ".join(names) if len(names) <= _MOST_NAMES else ""
    return Holder(
        name, VariableUse.NO_UPDATE, frozenset(sizes), in_graph, sum(sizes.values()), len(sizes) - len(in_graph), False
    )


def _leads_to_update(nodes: Mapping[int, Any], idle: Mapping[int, Any]) -> dict[int, bool]:
    """Return for each node of a graph whether another leaf than an idle weight is behind it, or none that is known."""
    result: dict[int, bool] = {}
    waiting = list(nodes.values())
    while waiting:
        node = waiting[-1]
        if id(node) in result:
            waiting.pop()
            continue
        variable = getattr(node, "variable", None)
        behind = [following for following, _ in node.next_functions if following is not None and id(following) in nodes]
        unknown_yet = [following for following in behind if id(following) not in result]
        if isinstance(variable, torch.Tensor) or not behind:
            result[id(node)] = id(variable) not in idle
        elif unknown_yet:
            waiting += unknown_yet
        else:
            result[id(node)] = any(result[id(following)] for following in behind)
    return result


def _names(idle: set[int], reached: set[int], variables: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the names of the largest modules without an updated weight that have weights which were reached."""
    names: dict[int, str] = {}
    for name, model in models_of(variables):
        for path, part, inside in _idle_parts(name, model, idle):
            if inside & reached:
                names.setdefault(id(part), path)
                reached = reached - inside
    return list(names.values())


def _idle_parts(name: str, module: torch.nn.Module, idle: set[int]) -> Iterator[tuple[str, Any, set[int]]]:
    """Yield path, module or weight, and weights of each largest part that no optimizer updates."""
    inside = {id(weight) for weight in module.parameters() if weight.requires_grad}
    if inside <= idle:
        yield name, module, inside
        return
    for attribute, weight in module.named_parameters(recurse=False):
        if id(weight) in idle:
            yield f"{name}.{attribute}", weight, {id(weight)}
    for attribute, child in module.named_children():
        yield from _idle_parts(f"{name}[{attribute}]" if attribute.isdecimal() else f"{name}.{attribute}", child, idle)
