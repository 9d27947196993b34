"""Find who owns tensors that no variable of the program reaches: a library's global variable, or a reference cycle.

A search goes from the largest of these tensors to what refers to them, until it comes to something that lives by
itself: the variables of a module, those of a function that runs, a class. What it does not lead to lives in reference
cycles only, which nothing frees before the garbage collector runs.
"""

from __future__ import annotations

import gc
import sys
import time
import types
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import torch

from memexplore.out_of_memory.cures import GRADIENT, cure_of, names_of_classes
from memexplore.out_of_memory.evidence_types import Holder, VariableUse
from memexplore.out_of_memory.objects import (
    attributes_of,
    is_a,
    items_of,
    module_of,
    name_of,
    of_kind,
    stored_gradient,
)
from memexplore.out_of_memory.reach import address_of, is_users_module, reached_from
from memexplore.torch_internals.tensors import stored_in_tensor

_MOST_NAMES = 3
"""Classes of a cycle that are named."""
_AT_ONCE = 32
"""Objects whose referrers are searched in one call, which looks at all objects of the process."""
_TOGETHER = 16
"""Tensors whose owners are searched together."""
_LEAST = 1 << 20
"""Bytes from which an owner is searched."""


def owners(reached: Collection[int], end: float) -> tuple[list[Holder], bool]:
    """Return the owners of tensors whose addresses were not reached, and whether all were found until the time `end`.

    >>> from memexplore.virtual_gpu.tensors.live_storages import live_storages
    >>> owners({storage.address for storage in live_storages.values()}, time.thread_time() + 1)
    ([], True)
    """
    lost = _lost(reached)
    rest = dict(map(address_of, lost))
    of_gradients = _in_own_gradients(lost, reached, end)
    rest = {address: size for address, size in rest.items() if address not in of_gradients.addresses}
    found: dict[tuple[VariableUse, str], dict[int, int]] = {}
    curable: dict[str, tuple[str, ...]] = {}
    complete = True
    while sum(rest.values()) >= _LEAST:
        lost = [tensor for tensor in lost if address_of(tensor)[0] in rest]
        # Those of one owner were often made one after the other.
        searched = lost[:: max(len(lost) // _TOGETHER, 1)]
        behind = _behind(searched, {id(lost)}, end)
        if behind is None:
            complete = False
            break
        before = len(rest)
        for (use, name), value in behind.items():
            blocks = {address: block.size for address, block in reached_from(value, end).blocks.items()}
            if use is VariableUse.CYCLE:
                curable[name] = _curable(value)
            own = {address: size for address, size in blocks.items() if address not in reached}
            found.setdefault((use, name), {}).update(own)
            rest = {address: size for address, size in rest.items() if address not in own}
        if len(rest) == before:
            # A tensor that only C++ has, such as one that a graph saved, has an owner that Python does not show.
            for tensor in searched:
                rest.pop(address_of(tensor)[0], None)
        del searched
    large = {key: own for key, own in found.items() if sum(own.values()) >= _LEAST}
    holders = [_holder(name, use, own, curable.get(name, ())) for (use, name), own in large.items()]
    return [*holders, *([of_gradients] if of_gradients.size >= _LEAST else [])], complete


def _holder(name: str, use: VariableUse, sizes: dict[int, int], classes: tuple[str, ...]) -> Holder:
    return Holder(name, use, frozenset(sizes), frozenset(), sum(sizes.values()), len(sizes), True, classes)


def _curable(objects: list[Any]) -> tuple[str, ...]:
    """Return the classes of the object of a cycle for which there is a cure."""
    names = (names_of_classes(type(value)) for value in objects)
    return next((each for each in names if cure_of(each) is not None), ())


def _in_own_gradients(lost: list[torch.Tensor], reached: Collection[int], end: float) -> Holder:
    """Return leaves with a gradient that has a graph, and all that the graph has: C++ keeps them for each other."""
    leaves = [
        tensor
        for tensor in lost
        if (gradient := stored_gradient(tensor)) is not None and not stored_in_tensor(gradient, "is_leaf")
    ]
    blocks = reached_from(leaves, end).blocks
    own = {address: block for address, block in blocks.items() if address not in reached}
    in_graph = frozenset(address for address, block in own.items() if block.in_graph)
    shapes = Counter(tuple(stored_in_tensor(leaf, "shape")) for leaf in leaves)
    name = f"Tensor({' × '.join(map(str, shapes.most_common(1)[0][0]))}).grad" if shapes else ""
    size = sum(block.size for block in own.values())
    return Holder(
        name, VariableUse.OWN_GRADIENT, frozenset(own), in_graph, size, len(leaves), True, classes=(GRADIENT,)
    )


def _lost(reached: Collection[int]) -> list[torch.Tensor]:
    """Return the tensors that Python has on the device and that were not reached."""
    addresses = ((tensor, address_of(tensor)[0]) for tensor in of_kind(gc.get_objects(), torch.Tensor))
    return [tensor for tensor, address in addresses if address and address not in reached]


def _behind(values: list[Any], ours: set[int], end: float) -> dict[tuple[VariableUse, str], Any] | None:
    """Return what keeps some values: roots, by their names, or the objects of cycles; None after the time `end`.

    `ours` are the identities of objects of this search.
    """
    modules = {id(vars(module)): name for name, module in list(sys.modules.items()) if type(module) is types.ModuleType}
    running = {id(frame) for top in sys._current_frames().values() for frame in _outward(top)}
    roots: dict[tuple[VariableUse, str], Any] = {}
    seen: dict[int, Any] = {id(value): value for value in values}
    level = list(values)
    own = {id(values), id(seen), id(roots), *ours}
    is_dead = True
    while level:
        # Each call compares what all objects refer to with all that it is given.
        part, level = level[:_AT_ONCE], level[_AT_ONCE:]
        if time.thread_time() > end:
            return None
        below = {id(value) for value in part}
        for value in gc.get_referrers(*part):
            if id(value) in seen or id(value) in own or value is part or value is level:
                continue
            if id(value) in running:
                is_dead = False
            elif id(value) in modules or is_a(value, type):
                is_dead = False
                roots |= _named(value, modules.get(id(value), ""), below)
            else:
                seen[id(value)] = value
                level.append(value)
    objects = list(seen.values())[len(values) :]
    if is_dead and objects:
        roots[VariableUse.CYCLE, _classes(objects)] = objects
    return {key: value for key, value in roots.items() if not key[1].startswith("memexplore.")}


def _named(owner: Any, module: str, below: set[int]) -> dict[tuple[VariableUse, str], Any]:
    """Return the variables of a module, or the attributes of a class, that lead to some objects."""
    if is_a(owner, type):
        module, values = name_of(owner), list(attributes_of(owner).items())
    else:
        values = items_of(owner)
    prefix = "" if module == "__main__" else f"{module}."
    return {(VariableUse.LIBRARY, f"{prefix}{name}"): value for name, value in values if id(value) in below}


def _outward(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _classes(objects: list[Any]) -> str:
    """Return the names of the classes of the objects of a cycle: those of the user, else those of a library."""
    kinds = {id(type(value)): type(value) for value in objects if not is_a(value, torch.Tensor)}.values()
    users = [kind for kind in kinds if is_users_module(module_of(kind))]
    library = [kind for kind in kinds if module_of(kind).partition(".")[0] not in ("builtins", "collections", "torch")]
    others = [kind for kind in kinds if kind not in (dict, list, tuple)]
    names = sorted({name_of(kind) for kind in users or library or others})
    return ", ".join(names[:_MOST_NAMES])


__all__ = ["owners"]
