"""Install a list of patches for a block, completely or not at all.

An interrupt may arrive at any line. So the actions that restore the state are recorded in one assignment, before
anything is changed (`_journal`). Every action may run twice, and `restore` runs under two `finally`: if one is
interrupted, the other one completes. Originals are never read while patches are installed, so a patched function is
never taken for the original.

Rows next to each other are installed and restored by functions written in C. So a table of hundreds of rows runs few
lines of Python; only a name that was absent takes lines of its own, when it is removed.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import io
import itertools
import operator
import weakref
from collections.abc import Callable, Generator, Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

Value = TypeVar("Value")
Undo = Callable[[], object]
_MISSING = object()


class Patch(Protocol):
    """One change of global state."""

    def undo(self) -> Undo:
        """Return a function that restores the present state. It may be called twice, and without `install`."""

    def install(self) -> None:
        """Make the change."""


class Replace(NamedTuple):
    """An attribute of a module or a class, and what replaces it."""

    owner: Any
    name: str
    replacement: Any

    def undo(self) -> Undo:
        """Return a function that restores the present value, or its absence."""
        return partial(_set, self.owner, self.name, vars(self.owner).get(self.name, _MISSING))

    def install(self) -> None:
        """Set the attribute."""
        setattr(self.owner, self.name, self.replacement)


class ReplaceTogether(NamedTuple):
    """Many attributes, replaced in one call of C. So are those restored that were there, without a gap."""

    owners: Sequence[Any]
    names: Sequence[str]
    replacements: Sequence[Any]

    def undo(self) -> Undo:
        """Return a function that restores the present values, or their absence."""
        present = tuple(map(operator.contains, map(vars, self.owners), self.names))
        owners = tuple(itertools.compress(self.owners, present))
        names = tuple(itertools.compress(self.names, present))
        values = tuple(map(operator.getitem, map(vars, owners), names))
        absent = itertools.compress(zip(self.owners, self.names, strict=True), map(operator.not_, present))
        return partial(_restore_all, tuple(zip(owners, names, values, strict=True)), tuple(absent))

    def install(self) -> None:
        """Set the attributes."""
        collections.deque(map(setattr, self.owners, self.names, self.replacements), 0)


def _restore_all(present: Sequence[tuple[Any, str, Any]], absent: Sequence[tuple[Any, str]]) -> None:
    """Set attributes and remove others. The first error is raised after all of them."""
    steps = itertools.chain(itertools.starmap(setattr, present), itertools.starmap(_remove, absent))
    errors = []
    while True:
        try:
            # An iterator of itertools goes on with the next step after one that failed.
            collections.deque(steps, 0)
            break
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _together(patches: Iterable[Patch]) -> list[Patch]:
    """Return patches in which rows next to each other are one patch."""
    result: list[Patch] = []
    for kind, run in itertools.groupby(patches, type):
        if kind is Replace:
            owners, names, replacements = zip(*run, strict=True)  # type: ignore[call-overload]
            result.append(ReplaceTogether(owners, names, replacements))
        else:
            result.extend(run)
    return result


class Insert(NamedTuple):
    """An entry of a dict, such as a table of hooks, under a key of its own."""

    entries: MutableMapping[Any, Any]
    key: Any
    value: Any

    def undo(self) -> Undo:
        """Return a function that removes the entry."""
        return partial(self.entries.pop, self.key, None)

    def install(self) -> None:
        """Add the entry."""
        self.entries[self.key] = self.value


class Keep(NamedTuple):
    """State that later patches or the block change, and that is restored: how it is read and how it is written."""

    read: Callable[[], Any]
    write: Callable[[Any], object]

    def undo(self) -> Undo:
        """Return a function that writes the present state."""
        return partial(self.write, self.read())

    def install(self) -> None:
        """Change nothing."""


def _nothing() -> None:
    pass


class Call(NamedTuple):
    """A function that makes a change, and one that undoes it; either may be left out."""

    make: Callable[[], object] = _nothing
    unmake: Callable[[], object] = _nothing

    def undo(self) -> Undo:
        """Return `unmake`."""
        return self.unmake

    def install(self) -> None:
        """Call `make`."""
        self.make()


def _set(owner: Any, name: str, value: Any) -> None:
    if value is not _MISSING:
        setattr(owner, name, value)
    else:
        _remove(owner, name)


def _remove(owner: Any, name: str) -> None:
    if name in vars(owner):
        delattr(owner, name)


class _Journal(NamedTuple):
    """Actions that restore everything patched, in the order of installation, and the block that patched it."""

    undo: Sequence[Undo]
    block: Callable[[], Patched[Any] | None]


_EMPTY = _Journal((), lambda: None)
_journal = _EMPTY


class Patched(contextlib.ContextDecorator, io.IOBase, Generic[Value]):
    """Context manager that patches torch for a block. `switch` returns the block's value and the patches.

    Its `__exit__` is that of `io.IOBase`, which is written in C and calls `close`, and `close` is that of a generator.
    So no line of Python runs between the end of the block and the two `finally` of the generator, and an interrupt
    cannot prevent them. `io.IOBase` calls `close` also when the object is collected.
    """

    def __init__(self, switch: Callable[[], tuple[Value, Sequence[Patch]]]) -> None:
        self._switch = switch
        # Neither holds the object itself, which is collected as soon as nothing refers to it.
        self._block: Any = _block(switch, weakref.ref(self))
        self.close = self._block.close  # type: ignore[method-assign]

    def _recreate_cm(self) -> Patched[Value]:
        # ContextDecorator: a decorated function may be called more than once.
        return Patched(self._switch)

    def __enter__(self) -> Value:  # type: ignore[override]
        if inspect.getgeneratorstate(self._block) != inspect.GEN_CREATED:
            raise RuntimeError("this context manager was entered before, and it serves one block only: make a new one")
        try:
            return next(self._block)
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> bool:
        """Whether the block has begun and not ended."""
        return _journal.block() is self and self._block.gi_frame is not None


def _block(
    switch: Callable[[], tuple[Value, Sequence[Patch]]], block: Callable[[], Patched[Value] | None]
) -> Generator[Value, None, None]:
    try:
        try:
            yield _install(switch, block)
        finally:
            if _journal.block is block:
                restore()
    finally:
        if _journal.block is block:
            restore()


def _install(switch: Callable[[], tuple[Value, Sequence[Patch]]], block: Callable[[], Patched[Value] | None]) -> Value:
    global _journal
    if not block_is_running():
        # Patches of a block whose end was interrupted more than once.
        restore()
    value, rows = switch()
    if block_is_running():
        raise RuntimeError("torch is patched by another block; leave that block first")
    patches = _together(rows)
    _journal = _Journal([patch.undo() for patch in patches], block)
    for patch in patches:
        patch.install()
    return value


def add(patches: Sequence[Patch]) -> None:
    """Install further patches for the running block, such as those of a module that few blocks import.

    Raises RuntimeError outside a block.
    """
    global _journal
    if not block_is_running():
        raise RuntimeError("no block is running that could undo the patches; enter a block first")
    patches = _together(patches)
    _journal = _Journal([*_journal.undo, *(patch.undo() for patch in patches)], _journal.block)
    for patch in patches:
        patch.install()


def block_is_running() -> bool:
    """Whether torch is patched for a block that has not ended."""
    block = _journal.block()
    return block is not None and block.running


def restore() -> None:
    """Undo all patches, the last one first, whatever block installed them. Without patches it does nothing.

    An undo that fails does not keep the others from running; the first error is raised at the end.
    """
    global _journal
    errors = []
    for undo in reversed(_journal.undo):
        try:
            undo()
        except Exception as error:
            errors.append(error)
    _journal = _EMPTY
    if errors:
        raise errors[0]


__all__ = [
    "Call",
    "Insert",
    "Keep",
    "Patch",
    "Patched",
    "Replace",
    "ReplaceTogether",
    "Undo",
    "add",
    "block_is_running",
    "restore",
]
