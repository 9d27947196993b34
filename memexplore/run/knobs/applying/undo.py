"""Undo log: actions that restore what a knob changes, recorded before each change.

The function of a knob takes an `UndoLog`, changes a model and returns an `ApplyReport`. It records each action
before the change, sets a value instead of toggling one, and runs again if the first attempt was interrupted. So an
interrupt at any line leaves the model either changed or restored, never in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

from torch import nn

from memexplore.torch_internals.modules import pre_hooks_of, pre_hooks_with_kwargs_of
from memexplore.virtual_gpu.patches.install import Replace

_T = TypeVar("_T")
_MISSING = object()


class UndoLog:
    """Actions that restore a state; each may run twice.

    >>> log, table = UndoLog(), {"a": 1}
    >>> log.set_item(table, "a", 2)
    >>> log.set_item(table, "b", 3)
    >>> log.restore()
    >>> table
    {'a': 1}
    """

    def __init__(self) -> None:
        self._actions: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def add(self, action: Callable[..., Any], *args: Any) -> None:
        """Record an action that restores a state. Call this before the change."""
        self._actions.append((action, args))

    def set_item(self, table: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Set an entry of a table, and restore its value or its absence later."""
        self.add(_restore_item, table, key, table.get(key, _MISSING))
        table[key] = value

    def set_attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a module or a class, and restore its value or its absence later."""
        patch = Replace(owner, name, value)
        self.add(patch.undo())
        patch.install()

    def add_pre_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register a forward pre-hook that takes `(module, args, kwargs)`, and remove it later."""
        self.add(_remove_pre_hook, module, hook)
        module.register_forward_pre_hook(hook, with_kwargs=True)

    def restore(self) -> None:
        """Run the actions, the latest first, all of them even if one raises; then raise the first error."""
        error: BaseException | None = None
        for action, args in reversed(self._actions):
            try:
                action(*args)
            except BaseException as raised:
                error = error or raised
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        self._actions.clear()


@contextlib.contextmanager
def undone_after(change: Callable[[UndoLog], _T]) -> Iterator[_T]:
    """Run a function that records what it changes, give its result to the block, and restore everything afterwards."""
    log = UndoLog()
    try:
        try:
            yield change(log)
        finally:
            log.restore()
    finally:
        # An interrupt can stop the first attempt anywhere; after a complete one the log is empty.
        log.restore()


def _restore_item(table: MutableMapping[str, Any], key: str, value: Any) -> None:
    if value is _MISSING:
        table.pop(key, None)
    else:
        table[key] = value


def _remove_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    hooks = pre_hooks_of(module)
    for number in [number for number, other in hooks.items() if other is hook]:
        del hooks[number]
        pre_hooks_with_kwargs_of(module).pop(number, None)
