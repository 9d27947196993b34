"""Modules on the virtual device: moved without touching what the user had, put back when the device goes off."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import DisableTorchFunction
from memexplore.torch_internals.modules import OWN_TENSORS, apply_of, buffers_of, parameters_of
from memexplore.torch_internals.tensors import PARAMETER_MARK, TENSOR_HOOKS, swap_tensors
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor

_Parameter = torch.nn.Parameter


class Moves:
    """What was moved onto the virtual device, and what was there before.

    A tensor keeps its identity when it is moved, as on a real GPU: an optimizer made before `.cuda()` still holds it.
    So the contents of two tensor objects are exchanged, and exchanged back when the device goes off.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        """By id: a tensor of the user that was real, and the object that holds its contents meanwhile."""
        self._buffers: dict[tuple[int, str], tuple[weakref.ref[torch.nn.Module], torch.Tensor]] = {}
        self._states: dict[int, tuple[weakref.ref[torch.optim.Optimizer], dict[Any, dict[Any, Any]]]] = {}
        self._born: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._depth = 0
        self.observer: Any = None
        """A recorder, told of every model that was moved."""

    def registered(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """Hook: a module got a parameter or a buffer while the virtual device is on, so it is being built under it."""
        if not any(module.__dict__.get(table) for table in OWN_TENSORS):
            self._born.add(module)

    def stepping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hook: an optimizer is about to step; its state for tensors that were moved is kept."""
        if id(optimizer) in self._states or not self._tensors:
            return
        before = {
            parameter: {name: _kept(value) for name, value in state.items()}
            for parameter, state in optimizer.state.items()
        }
        self._states[id(optimizer)] = (self._until_gone(self._states, id(optimizer), optimizer), before)

    def apply(self, module: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        """`Module._apply` while the virtual device is on."""
        self._depth += 1
        try:
            if recurse:
                for child in module.children():
                    apply_of(child)(function)
            self._apply_own(module, function)
        finally:
            self._depth -= 1
            if not self._depth and self.observer is not None:
                self.observer.tag_model(module)
        return module

    def _apply_own(self, module: torch.nn.Module, function: Callable[[Any], Any]) -> None:
        for parameter in parameters_of(module).values():
            if parameter is None:
                continue
            before = parameter.grad
            with torch.no_grad():
                applied = function(parameter)
                gradient = function(before) if before is not None else None
            if applied is not parameter:
                self.exchange(parameter, applied, module not in self._born)
            if gradient is not None and gradient is not before:
                parameter.grad = gradient.requires_grad_(before.requires_grad)  # type: ignore[union-attr]
        for name, buffer in buffers_of(module).items():
            if buffer is not None:
                applied = function(buffer)
                if isinstance(applied, VirtualTensor) and not isinstance(buffer, VirtualTensor):
                    self._keep_buffer(module, name, buffer)
                buffers_of(module)[name] = applied

    def exchange(self, tensor: torch.Tensor, applied: torch.Tensor, keep: bool = True) -> None:
        """Give a tensor the contents of another, without its history; `keep` what it had until the device goes off."""
        if not isinstance(tensor, VirtualTensor) and not isinstance(applied, VirtualTensor):
            tensor.data = applied
            return
        if isinstance(tensor, _Parameter) or getattr(tensor, PARAMETER_MARK, False):
            made: torch.Tensor = _Parameter(applied.detach(), requires_grad=tensor.requires_grad)
        else:
            made = applied.detach().requires_grad_(tensor.requires_grad)
        real = not isinstance(tensor, VirtualTensor)
        for name, value in tensor.__dict__.items():
            made.__dict__.setdefault(name, value)
        for hooks in TENSOR_HOOKS:
            if getattr(tensor, hooks) is not None:
                setattr(made, hooks, getattr(tensor, hooks))
        swap(tensor, made)
        if real and keep and id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = (self._until_gone(self._tensors, id(tensor), tensor), made)

    def _keep_buffer(self, module: torch.nn.Module, name: str, buffer: torch.Tensor) -> None:
        key = (id(module), name)
        if module not in self._born and key not in self._buffers:
            self._buffers[key] = (self._until_gone(self._buffers, key, module), buffer)

    @staticmethod
    def _until_gone(table: dict[Any, Any], key: Any, value: Any) -> weakref.ref[Any]:
        # What is kept for an object must not outlive it, or `del model` would free nothing.
        return weakref.ref(value, lambda _: table.pop(key, None))

    def restore(self) -> None:
        """Give everything that was there before its own contents back."""
        for reference, original in list(self._tensors.values()):
            tensor = reference()
            if tensor is not None:
                tensor.grad = None
                swap(tensor, original)
        for (_, name), (owner, buffer) in list(self._buffers.items()):
            module = owner()
            if module is not None and name in buffers_of(module):
                buffers_of(module)[name] = buffer
        for stepped, before in list(self._states.values()):
            optimizer = stepped()
            if optimizer is not None:
                _restore_state(optimizer, before)
        for table in (self._tensors, self._buffers, self._states):
            table.clear()


def parsing(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch._C._nn._parse_to`, with which `Module.to` reads its arguments, where a number or a tensor names `cuda`."""

    def parse(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        elif args and isinstance(args[0], VirtualTensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        with DisableTorchFunction():
            return original(*args, **kwargs)

    return parse


def swap(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange what two tensor objects are.

    `torch.utils.swap_tensors` does the same and refuses where somebody holds a weak reference or a graph: then the
    module would get a new parameter and the optimizer keep the old one.
    """
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    swap_tensors(first, second)


def _kept(value: Any) -> Any:
    # Step counters are on the CPU and counted up in place.
    return value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _restore_state(optimizer: torch.optim.Optimizer, before: dict[Any, dict[Any, Any]]) -> None:
    for parameter, state in list(optimizer.state.items()):
        if any(isinstance(value, VirtualTensor) for value in state.values()):
            del optimizer.state[parameter]
            if parameter in before:
                optimizer.state[parameter] = before[parameter]
