"""Scopes: features of torch switched off while the forward of one model runs, in the thread that runs it.

Autocast and `torch.utils.checkpoint` are switched off inside functions of torch, which all models share. The
replacements installed here look at the scopes of the running thread and do what torch does where no scope is open, so
other models, the loss and other threads are unaffected. A checkpoint made inside a scope carries the scope into its
recomputation, in whichever thread the backward pass runs.

A module that two models share belongs to the scope of the model whose forward calls it. A model called inside the
forward of another is inside the scopes of both.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from memexplore.knobs.undo import UndoLog
from memexplore.torch_internals.modules import CHECKPOINT_GENERATOR
from memexplore.torch_internals.state import AUTOCAST_ENABLED


class Off(enum.Flag):
    """Features of torch that a scope switches off."""

    NOTHING = 0
    AUTOCAST = enum.auto()
    CHECKPOINTS = enum.auto()
    """Calls of `torch.utils.checkpoint.checkpoint`, but for those of functions marked as a `RecomputedByKnob`."""


class Reach(enum.Enum):
    """Code in which the saved-tensor hooks of `checkpoint="norms"` are on."""

    FORWARD = "while the model's forward runs"
    STEP = "for the whole step, which may call parts of the model and saves tensors in its loss"


class Scope:
    """Features that one applied knob switches off; without effect once the scope is closed."""

    def __init__(self, off: Off) -> None:
        self.off = off

    def close(self) -> None:
        """End the effect of the scope in all threads, even where an interrupt left it entered."""
        self.off = Off.NOTHING


class RecomputedByKnob:
    """Base class of functions whose checkpoints the knob itself makes."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: tuple[Scope, ...] = ()


_thread = _Thread()


def open_scope(log: UndoLog, off: Off) -> Scope:
    """Return a scope that can be entered until the log is restored."""
    scope = Scope(off)
    log.add(scope.close)
    for patch in _PATCHES:
        patch.hold(log)
    return scope


def scopes() -> tuple[Scope, ...]:
    """Return the scopes that the running thread is inside."""
    return _thread.scopes


@contextlib.contextmanager
def inside(*entered: Scope) -> Iterator[None]:
    """Run the block inside further scopes."""
    before = _thread.scopes
    try:
        _thread.scopes = before + entered
        yield
    finally:
        _thread.scopes = before


def is_off(what: Off) -> bool:
    """Return whether a scope of the running thread switches something off."""
    return any(what in scope.off for scope in _thread.scopes)


class _InScopes:
    """A function that runs inside given scopes: the recomputation of a checkpoint."""

    def __init__(self, function: Callable[..., Any], entered: tuple[Scope, ...]) -> None:
        self._function, self._scopes = function, entered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with inside(*self._scopes):
            return self._function(*args, **kwargs)


# --- replacements of functions of torch -----------------------------------------------------------------------------


class _SharedPatch:
    """A replaced attribute of torch, installed while at least one scope needs it."""

    def __init__(self, owner: Any, name: str, replace: Callable[[Any], Any]) -> None:
        self._owner, self._name, self._replace = owner, name, replace
        self._lock = threading.RLock()
        self._holders: set[object] = set()
        self._original: Any = None
        self._replacement: Any = None

    def hold(self, log: UndoLog) -> None:
        """Install the replacement until the log is restored."""
        holder = object()
        log.add(self._release, holder)
        with self._lock:
            if not self._holders:
                self._original = getattr(self._owner, self._name)
                self._replacement = self._replace(self._original)
            self._holders.add(holder)
            setattr(self._owner, self._name, self._replacement)

    def _release(self, holder: object) -> None:
        with self._lock:
            self._holders.discard(holder)
            if not self._holders and getattr(self._owner, self._name) is self._replacement:
                setattr(self._owner, self._name, self._original)


def _autocast_enter(enter: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an `autocast.__enter__` that enters disabled inside a scope without autocast."""

    def scoped_enter(context: Any) -> Any:
        if not is_off(Off.AUTOCAST):
            return enter(context)
        enabled = getattr(context, AUTOCAST_ENABLED)
        setattr(context, AUTOCAST_ENABLED, False)
        try:
            return enter(context)
        finally:
            setattr(context, AUTOCAST_ENABLED, enabled)

    return scoped_enter


def _checkpoint_generator(generator: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    """Return the generator that `checkpoint(use_reentrant=False)` runs, with scopes."""

    def scoped_generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if is_off(Off.CHECKPOINTS) and not isinstance(function, RecomputedByKnob):
            yield
        else:
            yield from generator(_InScopes(function, scopes()) if scopes() else function, *args, **kwargs)

    return scoped_generator


def _reentrant_function(original: Any) -> Any:
    """Return the autograd function of `checkpoint(use_reentrant=True)`, with scopes."""

    def scoped_apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if is_off(Off.CHECKPOINTS):
            return function(*args)
        return original.apply(_InScopes(function, scopes()) if scopes() else function, preserve_rng_state, *args)

    return type(original.__name__, (original,), {"apply": staticmethod(scoped_apply)})


# `torch.autocast`, `torch.cuda.amp.autocast` and the decorators all end in this class, and `checkpoint` looks both of
# its functions up when it is called, however code has imported it.
_PATCHES = (
    _SharedPatch(torch.amp.autocast_mode.autocast, "__enter__", _autocast_enter),
    _SharedPatch(*CHECKPOINT_GENERATOR, _checkpoint_generator),
    _SharedPatch(torch_checkpoint, "CheckpointFunction", _reentrant_function),
)
