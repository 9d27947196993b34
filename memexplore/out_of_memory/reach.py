"""Find the tensors that a value reaches, as addresses of their memory on the device.

The walk goes through containers, attributes, also those of the user's classes, closures, tracebacks and the graphs that
autograd keeps. It ends after a given time.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import time
import traceback
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from memexplore.analysis.tables import is_users
from memexplore.out_of_memory.attempts import is_readable
from memexplore.torch_internals.tensors import saved_values, storage_key, untyped_storage
from memexplore.virtual_gpu.frame_variables import variables
from memexplore.virtual_gpu.tensors.live_storages import live_storages

_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, range, slice)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_OF_CONTAINERS = ("builtins", "collections")
"""Modules of classes that belong to no library: what has an attribute with such an object owns what is in it."""
_WRITTEN_IN_C = ("builtins", "itertools", "functools", "operator")
"""Modules of classes without attributes, such as the iterators of `zip` and of lists, and the caches of functions."""
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_WITH_FRAMES = (types.TracebackType, types.FrameType, types.GeneratorType)
_FOREIGN = ("IPython", "ipykernel", "ipywidgets", "traitlets", "comm", "zmq", "tornado", "asyncio", "memexplore")
"""Packages whose objects reach the whole notebook."""
_MOST_ITEMS = 100_000
_CHECKED_EVERY = 512


class Block(NamedTuple):
    """Memory of a tensor that was reached."""

    path: str
    """Way from the root, such as ``[3]`` or ``.history[0]``."""
    in_graph: bool
    """Whether it was reached through a graph."""
    size: int
    owner: type | None = None
    """Class of the object with the attribute that leads there, such as a metric with a list of tensors."""


class Reached(NamedTuple):
    """Memory reached from one root, by address."""

    blocks: dict[int, Block]
    visited: set[int]
    """Identities of the objects on the way."""
    complete: bool
    """Whether the walk came to its end in time."""
    tensors: int
    """Tensors on the device that were reached without a graph."""
    kept: list[Any]
    """The objects on the way: as long as they live, no other object gets their identities."""


def address_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return address and bytes of a tensor's memory on the virtual or real GPU; zeros where it has none."""
    try:
        storage = untyped_storage(tensor)
        ref = live_storages.get(storage_key(storage))
        if ref is not None:
            return ref.address, ref.size
        if tensor.device.type == "cuda":
            return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError, ValueError, AttributeError, TypeError):
        # Without a storage, or of a class that does not let torch have it.
        pass
    return 0, 0


def reached_from(root: Any, end: float, known: Collection[int] = frozenset()) -> Reached:
    """Return the memory reached from a root until the time `end`, without what lies behind the objects `known`.

    >>> reached_from([torch.zeros(2, device="cpu")], time.thread_time() + 1).blocks
    {}
    """
    blocks: dict[int, Block] = {}
    visited: set[int] = set()
    waiting: list[tuple[Any, str, bool, type | None]] = [(root, "", False, None)]
    kept: list[Any] = []
    count = tensors = 0
    while waiting:
        value, path, in_graph, owner = waiting.pop()
        if id(value) in visited or id(value) in known or _is_plain(value):
            continue
        count += 1
        if count % _CHECKED_EVERY == 0 and time.thread_time() > end:
            return Reached(blocks, visited, False, tensors, kept)
        visited.add(id(value))
        kept.append(value)
        if isinstance(value, torch.Tensor):
            address, size = address_of(value)
            if address:
                tensors += not in_graph
                before = blocks.get(address)
                if before is None or (before.in_graph and not in_graph):
                    blocks[address] = Block(path, in_graph, size, owner)
        own = owner if isinstance(value, torch.Tensor) or type(value).__module__ in _OF_CONTAINERS else type(value)
        try:
            waiting.extend((inner, way, graph, own) for inner, way, graph in _inside(value, path, in_graph))
        except Exception:  # an attribute that cannot be read, a container that another thread changes
            continue
    return Reached(blocks, visited, True, tensors, kept)


def _is_plain(value: Any) -> bool:
    """Return whether a value holds no tensors of the user."""
    kind = type(value)
    if issubclass(kind, torch.Tensor) or _is_users_class(value):
        return False
    return issubclass(kind, _PLAIN) or str(kind.__module__).partition(".")[0] in _FOREIGN or not is_readable(value)


def _is_users_class(value: Any) -> bool:
    return issubclass(type(value), type) and is_users_module(str(type.__dict__["__module__"].__get__(value)))


@functools.lru_cache(maxsize=4096)
def is_users_module(name: str) -> bool:
    """Return whether a module is the user's code: the notebook or program itself, or a file that is not installed."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or (isinstance(file, str) and is_users(file))


def is_node(value: Any) -> bool:
    """Return whether a value is a node of a graph of autograd; its class may have any metaclass."""
    return any("next_functions" in vars(kind) for kind in type(value).__mro__)


def models_of(variables: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules among variables, and among the attributes of other variables, with their names."""
    for name, value in variables:
        if isinstance(value, torch.nn.Module):
            yield name, value
        elif isinstance(own := getattr(value, "__dict__", None), dict | types.MappingProxyType):
            for attribute, module in list(own.items()):
                if is_readable(module) and isinstance(module, torch.nn.Module):
                    yield f"{name}.{attribute}", module


def _inside(value: Any, path: str, in_graph: bool) -> Iterator[tuple[Any, str, bool]]:
    """Yield the values that a value refers to, with path and whether a graph leads to them."""
    if isinstance(value, torch.Tensor):
        yield from _behind_tensor(value, path, in_graph)
    elif is_node(value):
        yield from _behind_node(value, path)
    elif isinstance(value, Mapping):
        yield from ((inner, f"{path}[{_key(key)}]", in_graph) for key, inner in _items(value))
    elif isinstance(value, _SEQUENCES):
        yield from ((inner, f"{path}[{number}]", in_graph) for number, inner in enumerate(_bounded(value)))
    elif isinstance(value, _WITH_FRAMES):
        for frame in _frames_of(value):
            yield from locals_of(frame, path, in_graph)
    elif isinstance(value, _FUNCTIONS):
        yield from ((inner, path, in_graph) for inner in _of_function(value))
    elif isinstance(value, type):
        yield from ((inner, f"{path}.{name}", in_graph) for name, inner in list(vars(value).items()))
    else:
        if isinstance(value, BaseException):
            yield value.__traceback__, f"{path}.__traceback__", in_graph
            yield value.__cause__, path, in_graph
            yield value.__context__, path, in_graph
        if type(value).__module__ in _WRITTEN_IN_C:
            yield from ((inner, path, in_graph) for inner in gc.get_referents(value))
        yield from _attributes(value, path, in_graph)


def _behind_tensor(tensor: torch.Tensor, path: str, in_graph: bool) -> Iterator[tuple[Any, str, bool]]:
    node = None if tensor.is_leaf else tensor.grad_fn
    if node is not None:
        yield node, path, True
    if tensor.is_leaf and tensor.grad is not None:
        yield tensor.grad, f"{path}.grad", in_graph
    yield from ((inner, f"{path}.{name}", in_graph) for name, inner in vars(tensor).items())


def _behind_node(node: Any, path: str) -> Iterator[tuple[Any, str, bool]]:
    yield from ((inner, path, True) for inner, _ in node.next_functions if inner is not None)
    yield from ((inner, path, True) for inner in saved_values(node))
    yield from ((inner, path, True) for inner in getattr(node, "__dict__", {}).values())


def _frames_of(value: Any) -> Iterator[types.FrameType]:
    """Yield a frame itself, the frame of a generator, or those of a traceback from the first of the user's on."""
    if isinstance(value, types.FrameType):
        yield value
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None:
            yield value.gi_frame
    else:
        # What runs the user's code, such as IPython, reaches everything.
        frames = (frame for frame, _ in traceback.walk_tb(value))
        yield from itertools.dropwhile(lambda frame: not is_users(frame.f_code.co_filename), frames)


def _attributes(value: Any, path: str, in_graph: bool) -> Iterator[tuple[Any, str, bool]]:
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((inner, f"{path}.{name}", in_graph) for name, inner in list(attributes.items()))
        if isinstance(value, torch.nn.Module):
            # Last, and so the first to be visited: their names are shorter than the names of the tables they are in.
            yield from ((inner, f"{path}.{name}", in_graph) for name, inner in value.named_children())
            yield from ((inner, f"{path}.{name}", in_graph) for name, inner in value.named_buffers(recurse=False))
            yield from ((inner, f"{path}.{name}", in_graph) for name, inner in value.named_parameters(recurse=False))
    for kind in type(value).__mro__:
        yield kind, path, in_graph
        for name in _slots(kind):
            inner = getattr(value, name, None)
            yield inner, f"{path}.{name}", in_graph


def _slots(kind: type) -> tuple[str, ...]:
    """Return the slots of a class of the user; slots of other classes may compute what they return."""
    if (known := _slots_of.get(kind)) is None:
        known = _slots_of[kind] = _found_slots(kind)
    return known


_slots_of: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""Slots by class: a class leads to its functions, and these to all variables of their module."""


def _found_slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    return tuple(
        name
        for name in names
        if name not in ("__dict__", "__weakref__") and isinstance(vars(kind).get(name), types.MemberDescriptorType)
    )


def locals_of(frame: types.FrameType, path: str = "", in_graph: bool = False) -> Iterator[tuple[Any, str, bool]]:
    """Yield the local variables of a frame; of a module or cell, whose variables are global, none."""
    if (values := variables(frame)) is not frame.f_globals and frame.f_code.co_name != "<module>":
        yield from ((value, f"{path}.{name}" if path else name, in_graph) for name, value in values.items())


def _of_function(value: Any) -> Iterator[Any]:
    if isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    else:
        yield from (value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # empty
                continue


def _items(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    try:
        return list(value.items())[:_MOST_ITEMS] if type(value).__module__ in _KNOWN or isinstance(value, dict) else []
    except Exception:  # changed by another thread
        return []


_KNOWN = ("collections", "builtins", "types", "torch.utils.weak", "transformers.utils.generic")


def _bounded(value: Any) -> list[Any]:
    try:
        return list(value)[:_MOST_ITEMS] if len(value) <= _MOST_ITEMS else []
    except Exception:
        return []


def _key(key: Any) -> str:
    text = repr(key) if isinstance(key, str | int | bool | float | tuple) else type(key).__name__
    return text if len(text) <= 40 else text[:39] + "…"
