"""What other tools say of the same script: PyTorch's MemTracker, and torchinfo's summary.

The script is CUDA code and runs here on fake CPU tensors: in a build of torch without CUDA, autograd aborts the process
on fake CUDA tensors. So MemTracker does not round to 512 bytes, and autocast follows the CPU's list of ops.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torchinfo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode


class _CpuForCuda(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        args = tuple(_renamed(value) for value in args)
        return func(*args, **{name: _renamed(value) for name, value in (kwargs or {}).items()})


def _renamed(value: Any) -> Any:
    return "cpu" if isinstance(value, (str, torch.device)) and str(value).startswith("cuda") else value


def _moved(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply`, which swaps fake parameters and fails where an in-place op left a weak reference to one."""
    with torch.no_grad():
        for each in module.modules():
            for name, parameter in each._parameters.items():
                if parameter is not None and (new := convert(parameter)) is not parameter:
                    each._parameters[name] = nn.Parameter(new, parameter.requires_grad)
            buffers = {name: buffer for name, buffer in each._buffers.items() if buffer is not None}
            each._buffers.update({name: convert(buffer) for name, buffer in buffers.items()})
    return module


@contextlib.contextmanager
def on_fake_cpu() -> Iterator[FakeTensorMode]:
    """A plain fake mode in which CUDA code runs on fake CPU tensors."""
    autocast = torch.autocast
    with (
        FakeTensorMode() as mode,
        _CpuForCuda(),
        mock.patch.object(torch, "autocast", lambda device, *rest, **named: autocast(_renamed(device), *rest, **named)),
        mock.patch.object(nn.Module, "_apply", _moved),
        # It draws until a value lies inside, and fake tensors have none.
        mock.patch.object(nn.init, "trunc_normal_", lambda tensor, *rest, **named: tensor),
    ):
        yield mode


class _TotalsOnly(MemTracker):
    """A MemTracker that keeps no peak of every module, which takes four fifths of its time and is not asked for."""

    def _update_peak_stats(self, peak_state: Any) -> None:
        modules, self.memory_tracking = self.memory_tracking, {}
        try:
            super()._update_peak_stats(peak_state)
        finally:
            self.memory_tracking = modules


class _Counters:
    """The counters of `torch.cuda`, answered by a MemTracker that counts from the first reset on."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._tracker = _TotalsOnly()
        self._running = False

    def reset_peak(self) -> None:
        running = self._running
        self.stop()
        # MemTracker's hooks tie graphs that backward retained into cycles: what it counts would grow with every call.
        gc.collect()
        if not running:
            # By type: isinstance asks an object for its class, and some lazy modules warn when asked.
            fakes = (each for each in gc.get_objects() if issubclass(type(each), FakeTensor))
            self._tracker.track_external(*(each for each in fakes if each.fake_mode is self._mode))
        self._tracker.reset_mod_stats()
        self._tracker.__enter__()
        self._running = True

    def stop(self) -> None:
        if self._running:
            self._running = False
            self._tracker.__exit__(None, None, None)

    def next_call(self, module: nn.Module, args: Any) -> None:
        """MemTracker counts one call of a model and asks to be reset before the next."""
        if self._tracker._mod_tracker.parents == {"Global"} and not self._tracker._mod_tracker.is_bw:
            self._tracker.reset_mod_stats()

    def peak(self) -> int:
        return _total(self._tracker.get_tracker_snapshot("peak"))

    def now(self) -> int:
        return _total(self._tracker.get_tracker_snapshot("current"))


def _total(snapshot: dict[torch.device, dict[str, int]]) -> int:
    return sum(each["Total"] for each in snapshot.values())


def mem_tracker(run: Callable[[], float]) -> float:
    """Bytes that `run` returns when MemTracker answers what it asks of `torch.cuda`.

    Tracked is what happens after its first `reset_peak_memory_stats`; MemTracker is told of every tensor alive then.
    """
    gc.collect()
    with on_fake_cpu() as mode, contextlib.ExitStack() as undo:
        counters = _Counters(mode)
        undo.callback(counters.stop)
        for name, function in (
            ("reset_peak_memory_stats", counters.reset_peak),
            ("max_memory_allocated", counters.peak),
            ("memory_allocated", counters.now),
        ):
            undo.enter_context(mock.patch.object(torch.cuda, name, function))
        undo.callback(register_module_forward_pre_hook(counters.next_call).remove)
        return run()


class Subject(NamedTuple):
    """The model that a script calls, with what it is given at first; None where it calls none."""

    module: nn.Module | None
    inputs: tuple[torch.Tensor, ...]
    autocast: torch.dtype | None
    optimizer: torch.optim.Optimizer | None
    gradients: bool
    """Whether its first call was one whose gradients can be asked for."""


class _SeenEnough(Exception):
    pass


def subject(run: Callable[[], float]) -> Subject:
    """What a script calls first, found by running it up to its first optimizer step or the second call of a model.

    Call it inside `on_fake_cpu`. Raises ValueError where it calls several models that have parameters.
    """
    calls: list[Subject] = []
    parts: set[nn.Module] = set()
    optimizers: list[torch.optim.Optimizer] = []

    def called(module: nn.Module, args: Any) -> None:
        if not calls:
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            calls.append(Subject(module, args, dtype, None, torch.is_grad_enabled()))
            parts.update(module.modules())
        elif module is calls[0].module:
            raise _SeenEnough
        elif module not in parts and next(module.parameters(), None) is not None:
            raise ValueError("the script calls several models: no one of them tells what it takes")

    def steps(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        optimizers.append(optimizer)
        raise _SeenEnough

    hooks = register_module_forward_pre_hook(called), register_optimizer_step_pre_hook(steps)
    silent = {name: lambda: 0 for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated")}
    try:
        with mock.patch.multiple(torch.cuda, **silent), contextlib.suppress(_SeenEnough):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        return Subject(None, (), None, None, True)
    return calls[0]._replace(optimizer=optimizers[0] if optimizers else None)


def called(found: Subject) -> tuple[list[torch.Tensor], int]:
    """The tensors that the model returns, and the bytes that all its leaf modules return."""
    leaves: list[int] = []

    def count(module: nn.Module, args: Any, output: Any) -> None:
        leaves.append(sum(tensor.nbytes for tensor in _tensors(output)))

    found_leaves = [module for module in found.module.modules() if next(module.children(), None) is None]
    hooks = [module.register_forward_hook(count) for module in found_leaves]
    try:
        with _autocast(found.autocast):
            return _tensors(found.module(*found.inputs)), sum(leaves)
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(each, torch.Tensor)]


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    return torch.autocast("cpu", dtype) if dtype is not None else contextlib.nullcontext()


def summarised(found: Subject) -> int | None:
    """Bytes of torchinfo's "Estimated Total Size": input, forward and backward pass, parameters; None if no model."""
    if found.module is None:
        return None
    with _autocast(found.autocast):
        told = torchinfo.summary(found.module, input_data=list(found.inputs), verbose=0)
    return told.total_input + told.total_output_bytes + told.total_param_bytes
