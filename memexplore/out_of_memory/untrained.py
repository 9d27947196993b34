"""Find the models that no optimizer trains, such as a teacher, and what is kept for gradients that nobody uses.

A graph that leads only to weights of no optimizer is kept for nothing, and so are the gradients of these weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from memexplore.out_of_memory.evidence_types import Holder, VariableUse
from memexplore.out_of_memory.objects import (
    attributes_of,
    children_of,
    classes_of,
    is_a,
    name_of,
    of_kind,
    own_weights,
    parts_of,
    requires_gradient,
    stored_gradient,
    updated_by,
    weights_of,
)
from memexplore.out_of_memory.reach import Block, address_of, is_node, models_of, reached_from
from memexplore.torch_internals.tensors import saved_values, stored_in_tensor

_MOST_NAMES = 4
"""Names of models, and of parts of them, that are listed."""
_SHARDED = ("FSDP", "FullyShardedDataParallel")
"""Classes of modules whose weights in the graph are not the optimizer's."""


def optimizers_in(objects: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers among objects, without wrappers of another optimizer."""
    optimizers = of_kind(objects, torch.optim.Optimizer)
    return [value for value in optimizers if not is_a(attributes_of(value).get("optimizer"), torch.optim.Optimizer)]


def untrained(objects: list[Any], variables: Iterable[tuple[str, Any]]) -> Holder | None:
    """Return the float32 weights of the models among variables that are not trained; None without such a model.

    `objects` were reached. A model with weights that require a gradient counts only if an optimizer updates others, and
    a frozen part of a trained model does not count: the layers around it need its results in their own precision.
    """
    updated = updated_by(optimizers_in(objects)).keys()

    def is_trained(weight: torch.Tensor) -> bool:
        return id(weight) in updated or (requires_gradient(weight) and not updated)

    trained = [module for module in of_kind(objects, torch.nn.Module) if any(map(is_trained, weights_of(module)))]
    inner = {id(part) for module in trained for _, part in parts_of(module)}
    sizes: dict[int, int] = {}
    names: list[str] = []
    for name, model in models_of(variables):
        if id(model) in inner:
            continue
        long = [weight for weight in weights_of(model) if stored_in_tensor(weight, "dtype") is torch.float32]
        weights = map(address_of, long)
        new = {address: size for address, size in weights if address and address not in sizes}
        if new:
            sizes |= new
            names.append(name)
    if not sizes:
        return None
    label = ", ".join(names) if len(names) <= _MOST_NAMES else ""
    return Holder(label, VariableUse.NOT_TRAINED, frozenset(sizes), frozenset(), sum(sizes.values()), len(sizes), True)


def without_update(
    objects: list[Any], blocks: Iterable[Mapping[int, Block]], variables: Iterable[tuple[str, Any]], end: float
) -> Holder | None:
    """Return the memory that graphs and gradients take for weights that no optimizer updates.

    `objects` were reached, with these blocks; `variables` name models. None where every weight is updated, where no
    optimizer has weights of a model, where weights are sharded, as the graph then has other tensors, and after the time
    `end`. Inputs that require a gradient are no weights: their gradient may be used.
    """
    updated = updated_by(optimizers_in(objects)).keys()
    modules = of_kind(objects, torch.nn.Module)
    weights = {id(weight): weight for module in modules for weight in own_weights(module).values()}
    sharded = any(name_of(kind).startswith(_SHARDED) for module in modules for kind in classes_of(module))
    if updated.isdisjoint(weights) or sharded:
        return None
    nodes = {id(value): value for value in objects if is_node(value)}
    idle = {number: weight for number, weight in weights.items() if number not in updated and requires_gradient(weight)}
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
    gradients = [stored_gradient(idle[number]) for number in reached]
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
        if is_a(variable, torch.Tensor) or not behind:
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
    inside = {id(weight) for weight in weights_of(module) if requires_gradient(weight)}
    if inside <= idle:
        yield name, module, inside
        return
    for attribute, weight in own_weights(module).items():
        if id(weight) in idle:
            yield f"{name}.{attribute}", weight, {id(weight)}
    for attribute, child in children_of(module).items():
        yield from _idle_parts(f"{name}[{attribute}]" if attribute.isdecimal() else f"{name}.{attribute}", child, idle)
