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
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from memexplore.analysis.tables import is_users
from memexplore.out_of_memory.objects import (
    attributes_of,
    bases_of,
    children_of,
    class_attributes,
    classes_of,
    is_a,
    items_of,
    module_of,
    own_buffers,
    own_weights,
    stored,
    stored_gradient,
)
from memexplore.torch_internals.tensors import saved_values, storage_in_tensor, storage_key, stored_in_tensor
from memexplore.virtual_gpu.frame_variables import variables
from memexplore.virtual_gpu.tensors.live_storages import live_storages

_PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), types.ModuleType, range, slice)
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
_LARGE = 100
"""Items of a container of which is asked first whether it leads to any tensor."""


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
        storage = storage_in_tensor(tensor)
        ref = live_storages.get(storage_key(storage))
        if ref is not None:
            return ref.address, ref.size
        if storage.device.type == "cuda":
            return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        # Without a storage.
        pass
    return 0, 0


def reached_from(root: Any, end: float, known: Collection[int] = frozenset(), data: set[int] | None = None) -> Reached:
    """Return the memory reached from a root until the time `end`, without what lies behind the objects `known`.

    `data` are the identities of objects that lead to no tensors, as walks before have found; this one adds its own.

    >>> reached_from([torch.zeros(2, device="cpu")], time.thread_time() + 1).blocks
    {}
    """
    blocks: dict[int, Block] = {}
    visited: set[int] = set()
    classes = _Classes(set() if data is None else data)
    waiting: list[tuple[Any, str, bool, type | None]] = [(root, "", False, None)]
    kept: list[Any] = []
    tensors = 0
    while waiting:
        value, path, in_graph, owner = waiting.pop()
        if id(value) in visited or id(value) in known or id(value) in classes.data:
            continue
        if len(kept) % _CHECKED_EVERY == 0 and time.thread_time() > end:
            return Reached(blocks, visited, False, tensors, kept)
        visited.add(id(value))
        kept.append(value)
        own_class = classes.of(value)
        if own_class.inside is _behind_tensor:
            address, size = address_of(value)
            if address:
                tensors += not in_graph
                before = blocks.get(address)
                if before is None or (before.in_graph and not in_graph):
                    blocks[address] = Block(path, in_graph, size, owner)
        own = owner if own_class.is_transparent else own_class.kind
        try:
            is_large = own_class.length is not None and own_class.length(value) >= _LARGE
            if is_large and (kinds := classes.classes_in_data(value, end)) is not None:
                waiting.extend((kind, path, in_graph, own) for kind in classes.first_met(kinds))
                continue
            for inner, way, graph in own_class.inside(value, path, in_graph, classes):
                if classes.may_lead_on(inner):
                    waiting.append((inner, way, graph, own))
        except Exception:  # such as a container that another thread changes
            continue
    return Reached(blocks, visited, True, tensors, kept)


class _Class(NamedTuple):
    """What the walk knows of the objects of a class."""

    kind: type
    is_plain: bool
    """Whether they hold no tensors of the user."""
    is_transparent: bool
    """Whether the object that they are in owns what is in them."""
    inside: Callable[[Any, str, bool, _Classes], Iterator[tuple[Any, str, bool]]]
    """Yields the values that an object refers to, with path and whether a graph leads to them."""
    length: Callable[[Any], int] | None
    """Returns the number of items of a container; None for other objects."""


class _Classes:
    """The classes that a walk has met."""

    def __init__(self, data: set[int]) -> None:
        self.data = data
        """Identities of the objects that `classes_in_data` went through and that lead to no tensor."""
        self._known: dict[int, _Class] = {}
        """Class by its identity, which it keeps as long as this lives: the hash of a class may be the user's code."""
        self._entered: set[int] = set()

    def of(self, value: Any) -> _Class:
        """Return what is known of the class of a value."""
        kind = type(value)
        known = self._known.get(id(kind))
        if known is None:
            known = self._known[id(kind)] = _described(kind)
        return known

    def may_lead_on(self, value: Any) -> bool:
        """Return whether a value may lead to a tensor of the user."""
        # The garbage collector knows all tensors, and what refers to them.
        return gc.is_tracked(value) and not self.of(value).is_plain

    def first_met(self, kinds: Iterable[type]) -> list[type]:
        """Return classes and those that they are derived from, each class once in a walk."""
        bases = {id(base): base for kind in kinds if id(kind) not in self._entered for base in bases_of(kind)}
        new = [base for number, base in bases.items() if number not in self._entered]
        self._entered |= bases.keys()
        return new

    def classes_in_data(self, container: Any, end: float) -> Iterable[type] | None:
        """Return the classes of what a container leads to; None if a tensor, graph, frame or function is among it.

        Python's garbage collector is asked for all objects of a level at once, which is faster than the walk: that
        knows the way to each object.
        """
        seen = {id(container)}
        level = [container]
        classes: dict[int, type] = {}
        while level:
            if time.thread_time() > end:
                return None
            found = {id(value): value for value in gc.get_referents(*level) if gc.is_tracked(value)}
            new = [value for number, value in found.items() if number not in seen]
            seen.update(found)
            kinds = {id(type(value)): self.of(value) for value in new}
            if any(each.inside in _OF_PROGRAMS for each in kinds.values()):
                return None
            followed = {number for number, each in kinds.items() if not each.is_plain and each.inside is not _in_class}
            classes |= {number: each.kind for number, each in kinds.items() if number in followed}
            classes |= {id(value): value for value in new if kinds[id(type(value))].inside is _in_class}
            level = [value for value in new if id(type(value)) in followed]
        self.data |= seen - classes.keys()
        return classes.values()


def _described(kind: type) -> _Class:
    own = module_of(kind)
    is_tensor, is_class = issubclass(kind, torch.Tensor), issubclass(kind, type)
    is_foreign = own.partition(".")[0] in _FOREIGN and not is_tensor and not is_class
    is_transparent = is_tensor or own in _OF_CONTAINERS
    is_plain = issubclass(kind, _PLAIN) or is_foreign
    length = next((base.__len__ for base in (dict, *_SEQUENCES) if issubclass(kind, base)), None)
    return _Class(kind, is_plain, is_transparent, _inside_of(kind), length)


def _inside_of(kind: type) -> Callable[..., Iterator[tuple[Any, str, bool]]]:
    """Return what yields the values that the objects of a class refer to."""
    by_class: dict[type, Callable[..., Iterator[tuple[Any, str, bool]]]] = {
        torch.Tensor: _behind_tensor,
        dict: _in_dictionary,
        **dict.fromkeys(_SEQUENCES, _in_sequence),
        **dict.fromkeys(_WITH_FRAMES, _in_frames),
        **dict.fromkeys(_FUNCTIONS, _in_function),
        type: _in_class,
    }
    if _is_class_of_nodes(kind):
        return _behind_node
    return next((inside for base, inside in by_class.items() if issubclass(kind, base)), _in_object)


@functools.lru_cache(maxsize=4096)
def is_users_module(name: str) -> bool:
    """Return whether a module is the user's code: the notebook or program itself, or a file that is not installed."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return name == "__main__" or (isinstance(file, str) and is_users(file))


def is_node(value: Any) -> bool:
    """Return whether a value is a node of a graph of autograd; its class may have any metaclass."""
    return _is_class_of_nodes(type(value))


def _is_class_of_nodes(kind: type) -> bool:
    return any("next_functions" in class_attributes(base) for base in bases_of(kind))


def models_of(variables: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules among variables, and among the attributes of other variables, with their names."""
    for name, value in variables:
        if is_a(value, torch.nn.Module):
            yield name, value
        else:
            for attribute, module in attributes_of(value).items():
                if is_a(module, torch.nn.Module):
                    yield f"{name}.{attribute}", module


# -- what is in the objects of a class


def _behind_tensor(tensor: Any, path: str, in_graph: bool, classes: _Classes) -> Iterator[tuple[Any, str, bool]]:
    if not stored_in_tensor(tensor, "is_leaf"):
        yield stored_in_tensor(tensor, "grad_fn"), path, True
    yield stored_gradient(tensor), f"{path}.grad", in_graph
    yield from _attributes(tensor, path, in_graph, classes)


def _behind_node(node: Any, path: str, in_graph: bool, classes: _Classes) -> Iterator[tuple[Any, str, bool]]:
    yield from ((inner, path, True) for inner, _ in node.next_functions if inner is not None)
    yield from ((inner, path, True) for inner in saved_values(node))
    yield from ((inner, path, True) for inner in attributes_of(node).values())


def _in_dictionary(value: Any, path: str, in_graph: bool, classes: _Classes) -> Iterator[tuple[Any, str, bool]]:
    for key, inner in itertools.islice(dict.items(value), _MOST_ITEMS):
        if classes.may_lead_on(inner):
            yield inner, f"{path}[{_key(key)}]", in_graph


def _in_sequence(value: Any, path: str, in_graph: bool, classes: _Classes) -> Iterator[tuple[Any, str, bool]]:
    kind = next(kind for kind in _SEQUENCES if is_a(value, kind))
    for number, inner in enumerate(itertools.islice(kind.__iter__(value), _MOST_ITEMS)):
        if classes.may_lead_on(inner):
            yield inner, f"{path}[{number}]", in_graph


def _in_frames(value: Any, path: str, in_graph: bool, classes: _Classes) -> Iterator[tuple[Any, str, bool]]:
    for frame in _frames_of(value):
        yield from locals_of(frame, path, in_graph)


def _in_class(value: Any, path: str, in_graph: bool, classes: _Classes) -> Iterator[tuple[Any, str, bool]]:
    if is_users_module(module_of(value)):
        yield from ((inner, f"{path}.{name}", in_graph) for name, inner in attributes_of(value).items())


def _in_object(value: Any, path: str, in_graph: bool, classes: _Classes) -> Iterator[tuple[Any, str, bool]]:
    if is_a(value, BaseException):
        yield stored(value, BaseException, "__traceback__"), f"{path}.__traceback__", in_graph
        yield stored(value, BaseException, "__cause__"), path, in_graph
        yield stored(value, BaseException, "__context__"), path, in_graph
    if module_of(type(value)) in _WRITTEN_IN_C:
        yield from ((inner, path, in_graph) for inner in gc.get_referents(value))
    yield from _attributes(value, path, in_graph, classes)


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


def _attributes(value: Any, path: str, in_graph: bool, classes: _Classes) -> Iterator[tuple[Any, str, bool]]:
    for name, inner in attributes_of(value).items():
        if classes.may_lead_on(inner):
            yield inner, f"{path}.{name}", in_graph
    if is_a(value, torch.nn.Module):
        # Last, and so the first to be visited: their names are shorter than the names of the tables they are in.
        for table in (children_of(value), own_buffers(value), own_weights(value)):
            yield from ((inner, f"{path}.{name}", in_graph) for name, inner in table.items())
    yield from ((kind, path, in_graph) for kind in classes.first_met([type(value)]))
    for kind in classes_of(value):
        for name, slot in _slots(kind).items():
            try:
                yield slot.__get__(value), f"{path}.{name}", in_graph
            except AttributeError:  # empty
                continue


def _slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots of a class of Python."""
    own = class_attributes(kind)
    if "__slots__" not in own:
        return {}
    return {name: slot for name, slot in own.items() if type(slot) is types.MemberDescriptorType}


def locals_of(frame: types.FrameType, path: str = "", in_graph: bool = False) -> Iterator[tuple[Any, str, bool]]:
    """Yield the local variables of a frame; of a module or cell, whose variables are global, none."""
    if (values := variables(frame)) is not frame.f_globals and frame.f_code.co_name != "<module>":
        yield from ((value, f"{path}.{name}" if path else name, in_graph) for name, value in items_of(values))


def _in_function(value: Any, path: str, in_graph: bool, classes: _Classes) -> Iterator[tuple[Any, str, bool]]:
    yield from ((inner, path, in_graph) for inner in _of_function(value))


def _of_function(value: Any) -> Iterator[Any]:
    if is_a(value, types.MethodType):
        yield value.__self__
    elif is_a(value, functools.partial):
        yield from (stored(value, functools.partial, name) for name in ("func", "args", "keywords"))
    else:
        yield from (value.__defaults__, value.__kwdefaults__)
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # empty
                continue


_OF_PROGRAMS = (_behind_tensor, _behind_node, _in_frames, _in_function)
"""What goes into objects that data do not have."""


_OF_KEYS = (bool, str, int, float)


def _key(key: Any) -> str:
    if type(key) is tuple:
        return f"({', '.join(map(_key, key))})"
    kind = next((kind for kind in _OF_KEYS if is_a(key, kind)), None)
    text = type(key).__name__ if kind is None else kind.__repr__(key)
    return text if len(text) <= 40 else text[:39] + "…"
