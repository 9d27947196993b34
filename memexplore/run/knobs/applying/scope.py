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
from torch import nn

from memexplore.run.knobs.applying.forward import run_forward_inside
from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.torch_internals.modules import CHECKPOINT_GENERATOR
from memexplore.torch_internals.state import AUTOCAST_ENABLED


class Feature:
    """Something that torch does, unless the running thread is inside a scope that switches it off."""

    def __init__(self, *patches: SharedPatch, off: Callable[[str], contextlib.AbstractContextManager[Any]]) -> None:
        """`patches` make functions of torch look at the scopes; they are installed while a scope may be entered.

        `off` takes a type of device, and returns a context that ends the feature where it was begun outside the scope.
        """
        self.patches = patches
        self.off = off


class Reach(enum.Enum):
    """Code in which the saved-tensor hooks of `checkpoint="norms"` are on."""

    FORWARD = "while the model's forward runs"
    STEP = "for the whole step, which may call parts of the model and saves tensors in its loss"


class Scope:
    """Features that one applied knob switches off; without effect once the scope is closed."""

    def __init__(self, off: tuple[Feature, ...]) -> None:
        self.off = off

    def close(self) -> None:
        """End the effect of the scope in all threads, even where an interrupt left it entered."""
        self.off = ()


class RecomputedByKnob:
    """Base class of functions whose checkpoints the knob itself makes."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scopes: tuple[Scope, ...] = ()


_thread = _Thread()


def open_scope(log: UndoLog, *off: Feature) -> Scope:
    """Return a scope that can be entered until the log is restored."""
    scope = Scope(off)
    log.add(scope.close)
    # Those of checkpoints in any case: they take the scope into the recomputation.
    for patch in dict.fromkeys(patch for feature in (*off, CHECKPOINTS) for patch in feature.patches):
        patch.hold(log)
    return scope


def switch_off(log: UndoLog, model: nn.Module, device_type: str, *off: Feature) -> None:
    """Switch features off in a model's forward, and in its recomputation in backward, until the log is restored."""
    scope = open_scope(log, *off)
    run_forward_inside(log, model, lambda: without(scope, device_type))


@contextlib.contextmanager
def without(scope: Scope, device_type: str) -> Iterator[None]:
    """Run the block inside a scope, without what was begun before it."""
    with inside(scope), contextlib.ExitStack() as stack:
        for feature in scope.off:
            stack.enter_context(feature.off(device_type))
        yield


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


def is_off(feature: Feature) -> bool:
    """Return whether a scope of the running thread switches a feature off."""
    return any(feature in scope.off for scope in _thread.scopes)


class _InScopes:
    """A function that runs inside given scopes: the recomputation of a checkpoint."""

    def __init__(self, function: Callable[..., Any], entered: tuple[Scope, ...]) -> None:
        self._function, self._scopes = function, entered

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with inside(*self._scopes):
            return self._function(*args, **kwargs)


# --- replacements of functions of torch -----------------------------------------------------------------------------


class SharedPatch:
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
        if not is_off(AUTOCAST):
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
        if is_off(CHECKPOINTS) and not isinstance(function, RecomputedByKnob):
            yield
        else:
            yield from generator(_InScopes(function, scopes()) if scopes() else function, *args, **kwargs)

    return scoped_generator


def _reentrant_function(original: Any) -> Any:
    """Return the autograd function of `checkpoint(use_reentrant=True)`, with scopes."""

    def scoped_apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if is_off(CHECKPOINTS):
            return function(*args)
        return original.apply(_InScopes(function, scopes()) if scopes() else function, preserve_rng_state, *args)

    return type(original.__name__, (original,), {"apply": staticmethod(scoped_apply)})


# `torch.autocast`, `torch.cuda.amp.autocast` and the decorators all end in this class.
AUTOCAST = Feature(
    SharedPatch(torch.amp.autocast_mode.autocast, "__enter__", _autocast_enter),
    off=lambda device_type: torch.autocast(device_type, enabled=False),
)
# `checkpoint` looks both of its functions up when it is called, however code has imported it.
CHECKPOINTS = Feature(
    SharedPatch(*CHECKPOINT_GENERATOR, _checkpoint_generator),
    SharedPatch(torch_checkpoint, "CheckpointFunction", _reentrant_function),
    off=lambda device_type: contextlib.nullcontext(),
)
"""Calls of `torch.utils.checkpoint.checkpoint`, but for those of functions marked as a `RecomputedByKnob`."""
