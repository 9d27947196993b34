"""A model's call rehearsed on tensors without values: nothing of the user's is touched, and no memory is asked for."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memexplore.torch_internals.dispatch import FakeTensorMode, TorchDispatchMode, disable_current_modes, pytree
from memexplore.torch_internals.modules import GLOBAL_HOOKS, buffers_of, parameters_of
from memexplore.virtual_gpu.device import VirtualGpu, active
from memexplore.virtual_gpu.tensors.tensor import live_storages

_BEYOND = 1 << 60
"""Addresses from here on are those of a rehearsal on a virtual GPU: no card has so much memory."""


@contextlib.contextmanager
def rehearsing(model: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[Callable[[], None]]:
    """Give a function that runs a model's forward on tensors like the arguments, and the backward of its outputs' sum.

    The model's weights and buffers are fake for the block, or, while a virtual GPU is on, its own. Attributes of
    modules, lists and dicts among them too, are as before afterwards.

    >>> linear = torch.nn.Linear(2, 2)
    >>> with rehearsing(linear, (torch.ones(1, 2),), {}) as call:
    ...     call()
    ...     print(linear.weight.grad.shape, type(linear.weight.grad).__name__)
    torch.Size([2, 2]) FakeTensor
    >>> linear.weight.grad is None
    True
    """
    device = active()
    with _attributes_kept(model), _no_global_hooks(), _no_casts_kept(), contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(_aside(device))
            inputs = _like((args, kwargs), lambda tensor: tensor.detach())
        else:
            # What records or renames outside must not see it.
            stack.enter_context(disable_current_modes())
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            _fake_weights(model, fake)
            inputs = _like((args, kwargs), lambda tensor: fake.from_tensor(tensor.detach(), static_shapes=True))
            stack.enter_context(fake)
            stack.enter_context(_Ones())

        def call() -> None:
            with torch.inference_mode(False), torch.enable_grad():
                given, named = pytree.tree_map_only(torch.Tensor, _again, inputs)
                output = model(*given, **named)
                sums = [leaf.sum() for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
                torch.autograd.backward([total for total in sums if total.requires_grad])

        yield call


def _like(values: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: make(tensor).requires_grad_(tensor.requires_grad), values)


def _again(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _fake_weights(model: torch.nn.Module, fake: FakeTensorMode) -> None:
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (parameters_of(module), buffers_of(module)):
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _like(tensor, lambda one: fake.from_tensor(one.detach(), static_shapes=True))
                    table[name] = made[id(tensor)]  # type: ignore[assignment]


class _Ones(TorchDispatchMode):
    """Every value that a model asks for counts as 1, as on the virtual GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _attributes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put back what modules hold, and what is in the lists, dicts and sets that they hold, after the block."""
    kinds: tuple[type, ...] = (list, dict, set)
    before = [(module, dict(vars(module))) for module in model.modules()]
    inside = [
        (value, copy.copy(value)) for _, attributes in before for value in attributes.values() if type(value) in kinds
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for value, content in inside:
            value.clear()  # type: ignore[union-attr]
            value.extend(content) if isinstance(value, list) else value.update(content)  # type: ignore[union-attr]


@contextlib.contextmanager
def _no_casts_kept() -> Iterator[None]:
    """Keep autocast from holding casts of weights until it ends: the ops of the call itself would miss them."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Take the hooks on all modules away for the block: a recording must not hear of a rehearsal."""
    tables = [hooks.value for hooks in GLOBAL_HOOKS]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)


class _Unlimited:
    """An allocator with room for everything; what was placed before the rehearsal is freed where it lies."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._addresses = itertools.count(_BEYOND, 512)

    def malloc(self, size: int) -> int:
        """An address that no card has."""
        return next(self._addresses)

    def free(self, address: int) -> None:
        """Give a block back."""
        if address < _BEYOND:
            self._allocator.free(address)


class _Frees:
    """Tells an observer of nothing but frees of what was there before."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer

    def free(self, address: int, size: int) -> None:
        """A block was given back."""
        if address < _BEYOND:
            self._observer.free(address, size)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def _aside(device: VirtualGpu) -> Iterator[None]:
    """Have a virtual GPU run the block without placing anything, and without telling anybody."""
    mode = device.mode
    before = (mode.allocator, mode.workspaces, mode.observer, mode.work_log)
    mode.allocator = _Unlimited(mode.allocator)  # type: ignore[assignment]
    mode.workspaces = copy.copy(mode.workspaces)
    mode.workspaces.kept = dict(mode.workspaces.kept)
    mode.observer = _Frees(mode.observer) if mode.observer is not None else None  # type: ignore[assignment]
    mode.work_log = None
    try:
        yield
    finally:
        mode.allocator, mode.workspaces, mode.observer, mode.work_log = before
        for ref in live_storages.values():
            if ref.address >= _BEYOND:  # still alive: it is placed when it is used
                ref.address = 0
                mode.has_earlier_tensors = True
