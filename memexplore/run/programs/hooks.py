"""What a running program calls of torch, intercepted until an undo log is restored: methods, and calls of models.

A program has bound names of its own (`from torch.optim import AdamW`), so classes are changed and not their modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.state import calls_optimizer_hooks

Wrapper = Callable[..., Any]
"""Runs instead of a method: takes the method, then its object and its other arguments."""


def wrap_method(log: UndoLog, base: type, name: str, wrapper: Wrapper) -> None:
    """Make `wrapper(method, self, ...)` run instead of a method of a class and of its subclasses, also of later ones.

    Where a method calls the method of its base class, the wrapper runs once.

    >>> class Base:
    ...     def double(self, value):
    ...         return 2 * value
    >>> log = UndoLog()
    >>> wrap_method(log, Base, "double", lambda method, self, value: method(self, value) + 1)
    >>> class Derived(Base):
    ...     def double(self, value):
    ...         return super().double(value)
    >>> Base().double(4), Derived().double(4)
    (9, 9)
    >>> log.restore()
    >>> Base().double(4), Derived().double(4)
    (8, 8)
    """
    running: set[int] = set()

    def wrap(owner: type) -> None:
        if name not in vars(owner):
            return
        method = vars(owner)[name]

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) in running:
                return method(self, *args, **kwargs)
            running.add(id(self))
            try:
                return wrapper(method, self, *args, **kwargs)
            finally:
                running.discard(id(self))

        log.set_attribute(owner, name, call)

    for owner in _with_subclasses(base):
        wrap(owner)
    before = vars(base).get("__init_subclass__")

    def init_subclass(owner: type, **kwargs: Any) -> None:
        if before is not None:
            before.__func__(owner, **kwargs)
        else:
            super(base, owner).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        wrap(owner)

    log.set_attribute(base, "__init_subclass__", classmethod(init_subclass))


def wrap_steps(log: UndoLog, wrapper: Wrapper) -> None:
    """Make `wrapper(step, optimizer, ...)` run instead of the step of every optimizer, outside of its hooks."""
    for kind in _with_subclasses(Optimizer):
        step = vars(kind).get("step")
        if step is not None and not hasattr(step, "hooked") and kind is not Optimizer:
            log.set_attribute(kind, "step", _hooked(step))
    wrap_method(log, Optimizer, "step", wrapper)


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step of a class of optimizers with its hooks, which the first optimizer of the class would add."""
    with_hooks = calls_optimizer_hooks(step)

    @functools.wraps(step)
    def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # That of accelerate, around another one, has no hooks.
        return (with_hooks if "defaults" in vars(optimizer) else step)(optimizer, *args, **kwargs)

    call.hooked = True  # type: ignore[attr-defined]
    return call


def wrap_function(log: UndoLog, owners: Iterable[Any], name: str, wrapper: Wrapper) -> None:
    """Make `wrapper(function, ...)` run instead of a function of some modules, or the method of one class alone."""
    for owner in owners:
        log.set_attribute(owner, name, _wrapped(getattr(owner, name), wrapper))


def _wrapped(function: Callable[..., Any], wrapper: Wrapper) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(function, *args, **kwargs)

    return call


def _with_subclasses(base: type) -> Iterator[type]:
    seen, waiting = {base}, [base]
    while waiting:
        kind = waiting.pop()
        yield kind
        derived: set[type] = set(kind.__subclasses__()) - seen
        seen |= derived
        waiting += derived


class OutermostCalls:
    """Calls of modules that no other module calls; `before(module, args, kwargs)` is called before each.

    Calls of single layers are left out, such as those by a checkpoint in the backward pass.
    """

    def __init__(self, log: UndoLog, before: Callable[[nn.Module, Any, Any], object]) -> None:
        self.depth = 0
        """Number of modules whose call runs."""
        self._models, self._layers = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self.depth and (module in self._models or module not in self._layers):
                self._models[module] = None
                self._layers.update(dict.fromkeys(module.modules()))
                before(module, args, kwargs)
            self.depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                self.depth -= 1

        log.set_attribute(nn.Module, "__call__", call)


def has_weights(module: nn.Module) -> bool:
    """Return whether a module is a model rather than a loss: it has parameters."""
    return next(module.parameters(), None) is not None


def is_training_call(module: nn.Module) -> bool:
    """Return whether a call of a module trains it."""
    return torch.is_grad_enabled() and any(weight.requires_grad for weight in module.parameters())


def common_samples(inputs: Any) -> int | None:
    """Return the first dimension that all tensors of a model's inputs have in common, None without one.

    A tensor whose first dimension is 1 is for all samples.

    >>> common_samples((torch.zeros(4, 3), {"mask": torch.zeros(4)}, torch.zeros(1, 3), torch.tensor(0.5)))
    4
    """
    sizes = {len(value) for value in tensors_of(inputs) if value.dim()}
    if len(sizes) > 1:
        sizes.discard(1)
    return sizes.pop() if len(sizes) == 1 else None


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments or results."""
    return [value for value in pytree.tree_leaves(tree) if isinstance(value, torch.Tensor)]


def gives_parameters(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the arguments of an optimizer's constructor are parameters, and not an optimizer to wrap."""
    parameters = args[0] if args else kwargs.get("params")
    return isinstance(parameters, Iterable) and not isinstance(parameters, str)
