"""Tell which watched models run compiled code: their steps get no hooks and are not recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from operator import methodcaller
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from memexplore.live.store import Store
from memexplore.torch_internals.modules import is_compiled, is_compiled_outside
from memexplore.torch_internals.state import never_compile

_OWN = "memexplore."
COMPILED = (
    "The model is compiled: its steps are watched, but none is recorded completely, because recording would make the "
    "compiler compile it again."
)


_left_alone: set[str] = set()
"""Names of modules whose functions the compiler leaves alone."""


def leave_own_code_alone() -> None:
    """Let `torch.compile` compile no function of memexplore: hooks and dispatch modes run inside compiled functions."""
    # Without a line of Python for each of thousands of modules.
    for name in set(filter(methodcaller("startswith", _OWN), list(sys.modules))) - _left_alone:
        _left_alone.add(name)
        for code in _codes(name, vars(sys.modules[name]).values()):
            never_compile(code)


def _codes(name: str, values: Iterable[Any]) -> Iterator[CodeType]:
    """The code of functions and classes that a module of this name defines, and of the functions inside of them."""
    for value in values:
        if isinstance(value, CodeType):
            yield value
            yield from _codes(name, value.co_consts)
        elif isinstance(value, FunctionType) and value.__module__ == name:
            yield from _codes(name, (value.__code__,))
        elif isinstance(value, type) and value.__module__ == name:
            yield from _codes(name, vars(value).values())
        elif isinstance(value, classmethod | staticmethod):
            yield from _codes(name, (value.__func__,))
        elif isinstance(value, property):
            yield from _codes(name, (value.fget, value.fset))


class CompiledModels:
    """The compiled ones among the watched models. A note says that none of their steps is recorded."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._is_open = False
        """Whether the loop may call a model, or the module that `torch.compile` has returned around it."""

    def are_run(self, models: Sequence[nn.Module]) -> bool:
        """Return whether models run compiled code, or may run it in the first step."""
        is_known = any(map(is_compiled, models))
        self._is_open = not is_known and any(map(is_compiled_outside, models))
        if is_known:
            self._store.add_note(COMPILED)
        return is_known or self._is_open

    def are_still_run(self, calls: int) -> bool:
        """Return the same after a step with this number of calls of the models themselves."""
        if self._is_open:
            self._is_open = False
            if calls:
                return False
            self._store.add_note(COMPILED)
        return True
