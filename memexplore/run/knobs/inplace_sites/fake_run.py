"""Fake run: a call of a model on tensors without values, which changes nothing of the user's and allocates nothing.

Without a virtual GPU weights and inputs are fake tensors; while one is on, its own tensors are used, and its allocator,
workspaces and observer are set aside.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memexplore.run.knobs.applying.model_state import Gradients, preserve_model_state
from memexplore.torch_internals.dispatch import FakeTensorMode, TorchDispatchMode, disable_current_modes, pytree
from memexplore.torch_internals.modules import GLOBAL_HOOKS, buffers_of, parameters_of
from memexplore.virtual_gpu.device import VirtualGpu, active
from memexplore.virtual_gpu.tensors.live_storages import live_storages

_FIRST_ADDRESS = 1 << 60
"""First address of a fake run on a virtual GPU, beyond the memory of any GPU."""


@contextlib.contextmanager
def fake_run(model: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[Callable[[], None]]:
    """Give a function that runs a model's forward on tensors like the arguments, and the backward of its outputs' sum.

    The model's weights and buffers are fake in the block, or, while a virtual GPU is on, its own. Afterwards the state
    of the model is as before.

    >>> linear = torch.nn.Linear(2, 2)
    >>> with fake_run(linear, (torch.ones(1, 2),), {}) as call:
    ...     call()
    ...     print(linear.weight.grad.shape, type(linear.weight.grad).__name__)
    torch.Size([2, 2]) FakeTensor
    >>> linear.weight.grad is None
    True
    """
    device = active()
    with (
        _interrupts_held(),
        preserve_model_state(model, Gradients.AS_THEY_ARE),
        _no_global_hooks(),
        _no_autocast_cache(),
        contextlib.ExitStack() as stack,
    ):
        if device is not None:
            stack.enter_context(_set_aside(device))
            inputs = _copied((args, kwargs), lambda tensor: tensor.detach())
        else:
            # Modes that record or rename devices must not see the run.
            stack.enter_context(disable_current_modes())
            fake = FakeTensorMode(allow_non_fake_inputs=True)
            _fake_weights(model, fake)
            inputs = _copied((args, kwargs), lambda tensor: fake.from_tensor(tensor.detach(), static_shapes=True))
            stack.enter_context(fake)
            stack.enter_context(_Ones())

        def call() -> None:
            with torch.inference_mode(False), torch.enable_grad():
                args, kwargs = pytree.tree_map_only(torch.Tensor, _leaf, inputs)
                output = model(*args, **kwargs)
                sums = [leaf.sum() for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
                torch.autograd.backward([total for total in sums if total.requires_grad])

        yield call


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the block has ended; only the main thread receives it.

    torch looks up the kernels of fake tensors in Python code that C++ calls, and an exception there ends the process
    (`torch._library.simple_registry`, seen under torch 2.13 and 2.15).
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    received: list[int] = []
    try:
        try:
            signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
            yield
        finally:
            signal.signal(signal.SIGINT, before)
    finally:
        # An interrupt at a line of the first attempt must not leave the handler.
        signal.signal(signal.SIGINT, before)
        if received:
            signal.raise_signal(signal.SIGINT)


def _copied(values: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: make(tensor).requires_grad_(tensor.requires_grad), values)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _fake_weights(model: torch.nn.Module, fake: FakeTensorMode) -> None:
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (parameters_of(module), buffers_of(module)):
            for name, tensor in table.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _copied(
                            tensor, lambda real: fake.from_tensor(real.detach(), static_shapes=True)
                        )
                    table[name] = made[id(tensor)]  # type: ignore[assignment]


class _Ones(TorchDispatchMode):
    """Every value that a model reads is 1, as on the virtual GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Switch the cache of autocast off: with casts of fake weights in it, the real call would not cast its own."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Remove the global hooks on modules for the block: a recording must not observe a fake run."""
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
    """An allocator without a limit; blocks from before the fake run are freed by the real allocator."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._addresses = itertools.count(_FIRST_ADDRESS, 512)

    def malloc(self, size: int, stream: int = 0) -> int:
        """Return an address beyond the memory of any GPU."""
        return next(self._addresses)

    def free(self, address: int) -> None:
        """Free a block."""
        if address < _FIRST_ADDRESS:
            self._allocator.free(address)


class _FreesOnly:
    """Passes to an observer only frees of blocks from before the fake run."""

    def __init__(self, observer: Any) -> None:
        self._observer = observer

    def free(self, address: int, size: int) -> None:
        """Observe that a block was freed."""
        if address < _FIRST_ADDRESS:
            self._observer.free(address, size)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@contextlib.contextmanager
def _set_aside(device: VirtualGpu) -> Iterator[None]:
    """Run the block on a virtual GPU without its allocator, its workspaces and its observer."""
    runner = device.runner
    before = (runner.allocator, runner.workspaces, runner.observer, runner.work_log)
    runner.allocator = _Unlimited(runner.allocator)  # type: ignore[assignment]
    runner.workspaces = copy.copy(runner.workspaces)
    runner.workspaces.kept = dict(runner.workspaces.kept)
    runner.observer = _FreesOnly(runner.observer) if runner.observer is not None else None  # type: ignore[assignment]
    runner.work_log = None
    try:
        yield
    finally:
        runner.allocator, runner.workspaces, runner.observer, runner.work_log = before
        for ref in list(live_storages.values()):
            if ref.address >= _FIRST_ADDRESS:  # still alive: it gets a real address when it is used
                ref.address = 0
                runner.has_earlier_tensors = True
