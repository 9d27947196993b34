"""Find who holds tensors: the variables and containers that keep their storages alive, as text.

Python's garbage collector knows which objects refer to which; each question takes it a walk over all objects, which
cannot be interrupted. So a walk answers for all tensors together, one is begun only if the time left is enough for it
as far as the time of the walks before tells, and a search that ends for this reason says so.
"""

from __future__ import annotations

import gc
import itertools
import linecache
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch

from memexplore.analysis.tables import is_users
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.frame_variables import variables

_DEPTH = 8
"""Objects on the way from a tensor to a variable, and so walks, at most."""
_TENSORS = 3
_GROUPS = 4
"""Groups that are followed to their variables, of the groups with a tensor that an object of Python holds."""
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_STORED = r"\s*(\.(append|appendleft|add|extend|insert|update|setdefault)\(|\[[^\]]*\]\s*=[^=]|\+=|\|=)"


class _Found(NamedTuple):
    filename: str
    name: str
    """Name of a variable, with the attributes on the way to the container, such as ``trainer.history``."""


class _Way:
    """The way from a tensor of a group to the variable from which it is reached, as far as it is known."""

    # Without a dictionary, which would be one more object that holds the tensor.
    __slots__ = ("attributes", "holder", "is_open", "rank", "seen", "value")

    def __init__(self, rank: int, value: Any) -> None:
        self.rank = rank
        self.value = value  # the object that was reached
        self.attributes = ""
        self.seen: set[int] = set()
        self.holder: _Found | None = None
        self.is_open = True

    def end(self, holder: _Found | None) -> None:
        self.holder, self.is_open = holder, False


def holders(groups: Sequence[Sequence[Any]], seconds: float) -> list[str]:
    """Return texts such as ``train.py:57: history.append(loss)``, found within `seconds` of processor time.

    They hold the storages of the first group for which any is found: a storage without a tensor of Python is held by an
    autograd graph, whose result, such as the loss, is in a later group. If the time was not enough, the last text says
    that the search went no further.

    The search takes longer than `seconds` by one walk over all objects at most: 0.3 s where Python has five million.
    """
    began = time.thread_time()
    end = began + seconds
    ranks = {storage_key(storage): rank for rank, group in reversed(list(enumerate(groups))) for storage in group}
    if not ranks:
        return []
    ways = _ways(ranks)
    is_complete = True
    walk = 1.5 * (time.thread_time() - began)  # the walk for tensors stops at the class of each object
    for depth in range(_DEPTH):
        _end_at_variables(ways)
        if depth == 1:
            ways = _first_groups(ways)
        if not _is_open(ways):
            break
        began = time.thread_time()
        if began + walk > end:
            is_complete = False
            break
        _follow(ways)
        walk = time.thread_time() - began
    _end_at_variables(ways)
    texts = _texts(ways)
    if is_complete or (texts and not _is_open(ways)):
        return texts
    missing = "others" if texts else "something that was not found"
    return [*texts, f"{missing}: not searched further after {seconds:g} s"]


def _ways(ranks: Mapping[int, int]) -> list[_Way]:
    """Return ways that begin at a few tensors of Python of each group; `ranks` are by key of a tensor's storage."""
    classes = _tensor_classes()
    ways: dict[int, list[_Way]] = {}
    # Objects refer to their class. Reading all objects in Python would take several times as long as a walk.
    for tensor in gc.get_referrers(*classes):
        if type(tensor) in classes:
            try:
                rank = ranks.get(storage_key(untyped_storage(tensor)))
            except (NotImplementedError, ValueError, RuntimeError):  # tensors without a storage
                continue
            if rank is not None and len(of_rank := ways.setdefault(rank, [])) < _TENSORS:
                of_rank.append(_Way(rank, tensor))
    return [way for rank in sorted(ways) for way in ways[rank]]


def _first_groups(ways: Sequence[_Way]) -> list[_Way]:
    """Return the ways of the first groups that are held, after a step.

    Saved tensors of a virtual GPU are objects of Python which the autograd graph alone holds: no way leads further.
    """
    held = dict.fromkeys(way.rank for way in ways if way.is_open or way.holder)
    first = set(list(held)[:_GROUPS])
    return [way for way in ways if way.rank in first]


def _tensor_classes() -> set[type]:
    """Return `torch.Tensor` and its subclasses."""
    classes: set[type] = set()
    waiting: list[type] = [torch.Tensor]
    while waiting:
        kind = waiting.pop()
        if kind not in classes:
            classes.add(kind)
            waiting.extend(type.__subclasses__(kind))
    return classes


def _is_open(ways: Sequence[_Way]) -> bool:
    """Return whether a way of the first group that may have a holder is open."""
    for _, of_group in itertools.groupby(ways, key=lambda way: way.rank):
        of_rank = list(of_group)
        if any(way.is_open for way in of_rank):
            return True
        if any(way.holder for way in of_rank):
            return False
    return False


def _texts(ways: Sequence[_Way]) -> list[str]:
    """Return the holders of the first group that has any."""
    for _, of_group in itertools.groupby(ways, key=lambda way: way.rank):
        texts = dict.fromkeys(_with_line(way.holder) for way in of_group if way.holder is not None)
        if texts:
            return list(texts)
    return []


def _follow(ways: Sequence[_Way]) -> None:
    """Follow all open ways by one object, in one walk over all objects."""
    values = {id(way.value): way.value for way in ways if way.is_open}
    holding: dict[int, list[Any]] = {key: [] for key in values}
    objects = tuple(values.values())
    referrers = gc.get_referrers(*objects)
    own = {id(values), id(objects), id(referrers), *map(id, holding.values())}
    for referrer in referrers:
        if id(referrer) not in own:
            # Before `_holds`, which gives an instance a dictionary that holds its attributes in its place.
            keys = values.keys() if len(values) == 1 else set(values).intersection(map(id, gc.get_referents(referrer)))
            if keys and _holds(referrer):
                for key in keys:
                    holding[key].append(referrer)
    for way in ways:
        if way.is_open:
            way.seen.add(id(way.value))
            _follow_one(way, [referrer for referrer in holding[id(way.value)] if id(referrer) not in way.seen])


def _follow_one(way: _Way, holding: Sequence[Any]) -> None:
    """Go on to an object that holds the value of a way, or end at a global variable."""
    for referrer in holding:
        if type(referrer) is dict and "__builtins__" in referrer and isinstance(referrer.get("__name__"), str):
            name = next((name for name, variable in referrer.items() if variable is way.value), "")
            if name:
                way.end(_Found(str(referrer.get("__file__") or ""), name + way.attributes))
                return
    if holding:
        way.attributes = _attribute(holding[0], way.value) + way.attributes
        way.value = holding[0]
    else:
        way.end(None)


def _end_at_variables(ways: Sequence[_Way]) -> None:
    """End the open ways that have reached a local variable of a running function of the user."""
    reached: dict[int, list[_Way]] = {}
    for way in ways:
        if way.is_open:
            reached.setdefault(id(way.value), []).append(way)
    for frame in _users_frames():
        for name, local in variables(frame).items():
            for way in reached.pop(id(local), ()):
                way.end(_Found(frame.f_code.co_filename, name + way.attributes))


def _users_frames() -> Iterator[FrameType]:
    for innermost in list(sys._current_frames().values()):
        frame: FrameType | None = innermost
        while frame is not None:
            if is_users(frame.f_code.co_filename):
                yield frame
            frame = frame.f_back


def _holds(value: Any) -> bool:
    """Return whether an object is a container or an instance, not a frame, a function or an iterator."""
    if isinstance(value, _CONTAINERS):
        return True
    return not isinstance(value, FrameType | ModuleType | type | torch.Tensor) and isinstance(
        getattr(value, "__dict__", None), dict
    )


def _attribute(holder: Any, value: Any) -> str:
    """Return ``.name`` for the attribute of an instance, or of its dictionary, that is a value."""
    if isinstance(holder, _CONTAINERS) and type(holder) is not dict:
        return ""
    names = holder if type(holder) is dict else vars(holder)
    name = next((name for name, attribute in list(names.items()) if attribute is value), "")
    return f".{name}" if isinstance(name, str) and name.isidentifier() else ""


def _with_line(holder: _Found) -> str:
    """Return the first line of the file that stores something in the variable, else the variable and its file."""
    # The last name may be a key of a dictionary: then the name before it is the variable's.
    for name in reversed(holder.name.split(".")):
        stored = re.compile(rf"\b{re.escape(name)}{_STORED}")
        for number, line in enumerate(linecache.getlines(holder.filename), 1):
            if stored.search(line):
                return f"{holder.filename}:{number}: {line.strip()}"
    return f"{holder.name} in {holder.filename}" if holder.filename else holder.name
