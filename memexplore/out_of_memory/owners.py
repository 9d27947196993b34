"""Find who owns tensors that no variable of the program reaches: a library's global variable, or a reference cycle.

One search goes from all these tensors at once to what refers to them, until it comes to something that lives by itself:
the variables of a module, those of a function that runs, a class. What it does not lead to lives in reference cycles
only, which nothing frees before the garbage collector runs.
"""

from __future__ import annotations

import gc
import sys
import time
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from memexplore.out_of_memory.evidence_types import Holder, VariableUse
from memexplore.out_of_memory.reach import address_of, is_users_module, reached_from

_MOST_NAMES = 3
"""Classes of a cycle that are named."""
_LEAST = 1 << 20
"""Bytes from which an owner is searched."""


def owners(reached: Collection[int], end: float) -> list[Holder]:
    """Return the owners of tensors whose addresses were not reached, until the time `end`; none if it is over before.

    >>> owners((), time.thread_time() + 1)
    []
    """
    blocks = dict(address_of(tensor) for tensor in _tensors())
    sizes = {address: size for address, size in blocks.items() if address and address not in reached}
    if sum(sizes.values()) < _LEAST:
        return []
    lost = [tensor for tensor in _tensors() if address_of(tensor)[0] in sizes]
    behind = _referrers(lost, end)
    if behind is None:
        return []
    roots, objects = behind
    # A tensor that only C++ has, such as one that a graph saved, has an owner that Python does not show.
    referred = {id(inner) for value in objects for inner in gc.get_referents(value)}
    lost = [tensor for tensor in lost if id(tensor) in referred]
    # With gradients and graphs.
    behind_lost = reached_from(lost, end).blocks
    sizes = {address: block.size for address, block in behind_lost.items() if address not in reached}
    result: list[Holder] = []
    rest = dict(sizes)
    for name, value in roots.items():
        own = [address for address in reached_from(value, end).blocks if address in rest]
        if own:
            result.append(_holder(name, VariableUse.LIBRARY, own, rest))
            rest = {address: size for address, size in rest.items() if address not in own}
    if sum(rest.values()) >= _LEAST:
        result.append(_holder(_named(objects), VariableUse.CYCLE, list(rest), rest))
    return result


def _holder(name: str, use: VariableUse, addresses: list[int], sizes: dict[int, int]) -> Holder:
    size = sum(sizes[address] for address in addresses)
    return Holder(name, use, frozenset(addresses), frozenset(), size, len(addresses), True)


def _tensors() -> Iterator[torch.Tensor]:
    """Yield all tensors that Python has; the objects are not asked, as that may run the user's code."""
    return (value for value in gc.get_objects() if issubclass(type(value), torch.Tensor))


def _referrers(values: list[Any], end: float) -> tuple[dict[str, Any], list[Any]] | None:
    """Return the roots that lead to some values, by name, and the other objects that do; None after the time `end`."""
    modules = {id(vars(module)): name for name, module in list(sys.modules.items()) if type(module) is types.ModuleType}
    running = {id(frame): frame for top in sys._current_frames().values() for frame in _outward(top)}
    roots: dict[str, Any] = {}
    seen: dict[int, Any] = {id(value): value for value in values}
    level = list(values)
    while level:
        if time.thread_time() > end:
            return None
        below = {id(value) for value in level}
        own = {id(level), id(values), id(seen), id(roots), id(below)}
        found = []
        for value in gc.get_referrers(*level):
            if id(value) in seen or id(value) in own:
                continue
            if id(value) in running:
                roots[f"{value.f_code.co_name}()"] = [item for item in gc.get_referents(value) if id(item) in below]
            elif id(value) in modules:
                name = modules[id(value)].removeprefix("__main__")
                roots |= {f"{name}.{key}".strip("."): item for key, item in list(value.items()) if id(item) in below}
            elif isinstance(value, type):
                roots |= {f"{value.__qualname__}.{key}": each for key, each in _own(value) if id(each) in below}
            else:
                seen[id(value)] = value
                found.append(value)
        level = found
        del found
    ours = [name for name in roots if name.startswith("memexplore.")]
    return {name: value for name, value in roots.items() if name not in ours}, list(seen.values())


def _outward(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _own(kind: type) -> Iterable[tuple[str, Any]]:
    return list(type.__dict__["__dict__"].__get__(kind).items())


def _named(objects: list[Any]) -> str:
    """Return the classes of the objects of a cycle, those of the user first."""
    kinds = {type(value) for value in objects if not issubclass(type(value), torch.Tensor)}
    users = [kind for kind in kinds if is_users_module(kind.__module__)]
    library = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("builtins", "collections", "torch")]
    names = sorted({kind.__qualname__ for kind in users or library or kinds - {dict, list, tuple}})
    return ", ".join(names[:_MOST_NAMES])


__all__ = ["owners"]
