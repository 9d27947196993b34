"""Answers of other tools for the same script: PyTorch's MemTracker and torchinfo's summary.

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
    """`nn.Module._apply`, which swaps fake parameters and fails if an in-place op left a weak reference to one."""
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
    """Switch on a plain fake mode in which CUDA code runs on fake CPU tensors."""
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
    """A MemTracker without the peaks of modules, which take four fifths of its time and are not needed."""

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
        # MemTracker's hooks tie graphs that backward retained into cycles: its count would grow with every call.
        gc.collect()
        if not running:
            # By type: isinstance reads __class__, at which some lazy modules warn.
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
        """Reset MemTracker before another call of the model, as it requires."""
        if self._tracker._mod_tracker.parents == {"Global"} and not self._tracker._mod_tracker.is_bw:
            self._tracker.reset_mod_stats()

    def peak(self) -> int:
        return _total(self._tracker.get_tracker_snapshot("peak"))

    def now(self) -> int:
        return _total(self._tracker.get_tracker_snapshot("current"))


def _total(snapshot: dict[torch.device, dict[str, int]]) -> int:
    return sum(each["Total"] for each in snapshot.values())


def mem_tracker(run: Callable[[], float]) -> float:
    """Return the bytes that `run` returns when MemTracker supplies the counters of `torch.cuda`.

    MemTracker starts at the first `reset_peak_memory_stats` and counts every tensor alive then as external.
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
    """The model that a script calls, with the inputs of its first call; None without a model."""

    module: nn.Module | None
    inputs: tuple[torch.Tensor, ...]
    autocast: torch.dtype | None
    optimizer: torch.optim.Optimizer | None
    gradients: bool
    """Whether gradients were enabled in the first call."""


class _StopRun(Exception):
    pass


def subject(run: Callable[[], float]) -> Subject:
    """Run a script up to its first optimizer step or second call of a model, and return the model it calls.

    Call it inside `on_fake_cpu`. Raises ValueError if the script calls several models with parameters.
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
            raise _StopRun
        elif module not in parts and next(module.parameters(), None) is not None:
            raise ValueError("the script calls several models: no one of them stands for its memory")

    def steps(optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        optimizers.append(optimizer)
        raise _StopRun

    hooks = register_module_forward_pre_hook(called), register_optimizer_step_pre_hook(steps)
    silent = {name: lambda: 0 for name in ("reset_peak_memory_stats", "max_memory_allocated", "memory_allocated")}
    try:
        with mock.patch.multiple(torch.cuda, **silent), contextlib.suppress(_StopRun):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        return Subject(None, (), None, None, True)
    return calls[0]._replace(optimizer=optimizers[0] if optimizers else None)


def outputs_of(found: Subject) -> tuple[list[torch.Tensor], int]:
    """Call the model; return its output tensors and the bytes that all its leaf modules return."""
    leaves: list[int] = []

    def count(module: nn.Module, args: Any, output: Any) -> None:
        leaves.append(sum(tensor.nbytes for tensor in _tensors(output)))

    leaf_modules = [module for module in found.module.modules() if next(module.children(), None) is None]
    hooks = [module.register_forward_hook(count) for module in leaf_modules]
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


def torchinfo_total(found: Subject) -> int | None:
    """Return torchinfo's "Estimated Total Size" in bytes: input, outputs, parameters; None without a model."""
    if found.module is None:
        return None
    with _autocast(found.autocast):
        statistics = torchinfo.summary(found.module, input_data=list(found.inputs), verbose=0)
    return statistics.total_input + statistics.total_output_bytes + statistics.total_param_bytes
