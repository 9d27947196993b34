"""Move modules to the virtual device in place, and restore them when the device is turned off."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memexplore.torch_internals.dispatch import FLATTEN, DisableTorchFunction
from memexplore.torch_internals.modules import MODULE_APPLY, OWN_TENSORS, apply_of, buffers_of, parameters_of
from memexplore.torch_internals.state import contents_key
from memexplore.torch_internals.tensors import TENSOR_HOOKS, swap_tensors
from memexplore.virtual_gpu.patches.contents_elsewhere import ContentsElsewhere
from memexplore.virtual_gpu.patches.lazy_modules import LazyModules, is_lazy
from memexplore.virtual_gpu.tensors.tensor import is_virtual


class _Original(NamedTuple):
    """State of a real tensor before it moved, so that restoring it may be interrupted and repeated."""

    tensor: weakref.ref[torch.Tensor]
    kind: type
    attributes: dict[str, Any]
    key: int
    """Identity of its contents."""
    holder: torch.Tensor
    """The tensor object that holds its contents meanwhile."""


class _Depth(threading.local):
    """Number of running `Module._apply` of a thread."""

    value = 0


class ModuleMoves:
    """The modules that moved to one virtual device, and what their tensors were before.

    A tensor keeps its identity when it moves, as on a real GPU: an optimizer made before `.cuda()` still holds it. So
    the contents of two tensor objects are exchanged, and exchanged back when the device is turned off.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, _Original] = {}
        """Real tensors of the user that moved, by id."""
        self._buffers: dict[tuple[int, str], tuple[weakref.ref[torch.nn.Module], torch.Tensor]] = {}
        self._script_parameters: dict[tuple[int, str], tuple[weakref.ref[torch.nn.Module], torch.nn.Parameter]] = {}
        """Parameters of TorchScript modules of the user that moved."""
        self._states: dict[int, tuple[weakref.ref[torch.optim.Optimizer], dict[Any, dict[Any, Any]]]] = {}
        self._built_here = WeakIdKeyDictionary()
        """Modules built while the device is on, which are not moved back to the CPU."""
        self.lazy = LazyModules()
        self.contents = ContentsElsewhere()
        self._depth = _Depth()
        self.observer: Any = None
        """A recorder, which gets every model that moved."""

    def registered(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """Hook on all modules: the first parameter or buffer of a module says that it is built under the device."""
        if not any(module.__dict__.get(table) for table in OWN_TENSORS):
            self._built_here[module] = True

    def stepping(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Hook before the step of any optimizer: keep its state for tensors that moved."""
        if id(optimizer) in self._states or not self._tensors:
            return
        before = {
            parameter: {name: _copied(value) for name, value in state.items()}
            for parameter, state in optimizer.state.items()
        }
        self._states[id(optimizer)] = (self._reference(self._states, id(optimizer), optimizer), before)

    def apply(self, module: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        """`Module._apply`, which `Module.to` and similar methods call, while the device is on."""
        self._depth.value += 1
        try:
            if recurse:
                self._apply_children(module, function)
            self._apply_own(module, function)
        finally:
            self._depth.value -= 1
            if not self._depth.value and self.observer is not None:
                self.observer.tag_model(module)
        return module

    def _apply_children(self, module: torch.nn.Module, function: Callable[[Any], Any]) -> None:
        ours = MODULE_APPLY.value
        for child in module.children():
            apply = apply_of(child)
            if getattr(apply, "__func__", None) is ours:
                # Without the frames between, which every stack below would have.
                self._apply_children(child, function)
                self._apply_own(child, function)
            else:
                apply(function)

    def _apply_own(self, module: torch.nn.Module, function: Callable[[Any], Any]) -> None:
        restored = module not in self._built_here
        if restored:
            self.lazy.keep(module)
        for name, parameter in list(parameters_of(module).items()):
            if parameter is not None and is_lazy(parameter):
                self.lazy.move(parameter, function, restored)
            elif parameter is not None:
                self._apply_to_parameter(module, name, parameter, function, restored)
        buffers = buffers_of(module)
        for name, buffer in buffers.items():
            if buffer is not None and is_lazy(buffer):
                self.lazy.move(buffer, function, restored)
            elif buffer is not None:
                applied = function(buffer)
                if is_virtual(applied) and not is_virtual(buffer):
                    self._keep_buffer(module, name, buffer)
                buffers[name] = applied

    def _apply_to_parameter(
        self, module: torch.nn.Module, name: str, parameter: Any, function: Callable[[Any], Any], restored: bool
    ) -> None:
        before = parameter.grad
        with torch.no_grad():
            applied = function(parameter)
            if applied.is_meta and not parameter.is_meta:
                # A new parameter, as `Module._apply` makes: an optimizer keeps the old one with its memory.
                module.register_parameter(name, torch.nn.Parameter(applied, parameter.requires_grad))
                return
            gradient = function(before) if before is not None else None
        if applied is not parameter:
            self.exchange(parameter, applied, restored)
            if isinstance(module, torch.jit.ScriptModule):
                self._hold(module, name, parameter, restored)
        if gradient is not None and gradient is not before:
            parameter.grad = gradient.requires_grad_(before.requires_grad)

    def exchange(self, tensor: torch.Tensor, applied: torch.Tensor, restored: bool = True) -> torch.Tensor | None:
        """Give `tensor` the contents of `applied`, without history; `restored` when the device is turned off, or not.

        Attributes and hooks of `tensor` stay. Returns the tensor object that has its contents of before, if one has.
        """
        if not is_virtual(tensor) and not is_virtual(applied):
            if hasattr(applied, FLATTEN):
                # As `Module._apply` does for wrappers such as DTensor.
                torch.utils.swap_tensors(tensor, torch.nn.Parameter(applied, requires_grad=tensor.requires_grad))
            else:
                tensor.data = applied
            return None
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        if is_virtual(applied) and type(applied) is torch.Tensor:
            # As `torch.nn.Parameter` does, which detaches once more. The count of writes in place is not shared with
            # `applied`: FSDP1 writes to its shard between the forward and the backward of a view of the parameter.
            # Data of inference mode make `tensor` an inference tensor that still counts its writes, so that it can be
            # written to later: a model that is validated in half precision and averages its weights after that.
            with torch.inference_mode(False) if applied.is_inference() else contextlib.nullcontext():
                other: torch.Tensor = applied.data
            with torch.inference_mode() if other.is_inference() else contextlib.nullcontext():
                other.requires_grad_(tensor.requires_grad)
            if is_parameter:
                other.__class__ = torch.nn.Parameter
        elif is_parameter:
            other = torch.nn.Parameter(applied.detach(), requires_grad=tensor.requires_grad)
        else:
            other = applied.detach().requires_grad_(tensor.requires_grad)
        self._swap(tensor, other, restored)
        return other

    def _swap(self, tensor: torch.Tensor, other: torch.Tensor, restored: bool) -> None:
        for name, value in tensor.__dict__.items():
            other.__dict__.setdefault(name, value)
        for hooks in TENSOR_HOOKS:
            if getattr(tensor, hooks) is not None:
                setattr(other, hooks, getattr(tensor, hooks))
        if restored and not is_virtual(tensor) and id(tensor) not in self._tensors:
            # Before the swap: an interrupt inside it leaves a tensor that is neither the one nor the other.
            reference = self._reference(self._tensors, id(tensor), tensor)
            self._tensors[id(tensor)] = _Original(reference, type(tensor), tensor.__dict__, contents_key(tensor), other)
        swap(tensor, other)

    def set_data(self, tensor: torch.Tensor, data: torch.Tensor) -> None:
        """`tensor.data = data` where the device changes, or one of both is an inference tensor."""
        if is_virtual(tensor) and is_virtual(data) and tensor.device == data.device:
            self.exchange(tensor, data)
            return
        back = self.contents.back(tensor, data)
        if back is not None:
            self._swap(tensor, back, restored=True)
        before = self.exchange(tensor, data) if back is None else back
        if before is not None:
            self.contents.keep(tensor, before)

    def _keep_buffer(self, module: torch.nn.Module, name: str, buffer: torch.Tensor) -> None:
        key = (id(module), name)
        if module not in self._built_here and key not in self._buffers:
            self._buffers[key] = (self._reference(self._buffers, key, module), buffer)

    def _hold(self, module: torch.jit.ScriptModule, name: str, parameter: torch.nn.Parameter, restored: bool) -> None:
        """Give a parameter to the C++ module of TorchScript again: it holds the contents, not the tensor object."""
        key = (id(module), name)
        if restored and key not in self._script_parameters:
            reference = self._reference(self._script_parameters, key, module)
            self._script_parameters[key] = (reference, parameter)
        parameters_of(module)[name] = parameter

    @staticmethod
    def _reference(table: dict[Any, Any], key: Any, value: Any) -> weakref.ref[Any]:
        """Return a weak reference that removes its entry of a table, or `del model` would free nothing."""
        return weakref.ref(value, lambda _: table.pop(key, None))

    def restore(self) -> None:
        """Restore all tensors, buffers and optimizer states. May be interrupted and repeated."""
        for original in list(self._tensors.values()):
            tensor = original.tensor()
            if tensor is not None:
                _restore_tensor(tensor, original)
        for (_, name), (module_reference, buffer) in list(self._buffers.items()):
            module = module_reference()
            if module is not None and name in buffers_of(module):
                buffers_of(module)[name] = buffer
        for (_, name), (module_reference, parameter) in list(self._script_parameters.items()):
            module = module_reference()
            if module is not None:
                parameters_of(module)[name] = parameter
        for optimizer_reference, before in list(self._states.values()):
            optimizer = optimizer_reference()
            if optimizer is not None:
                _restore_state(optimizer, before)
        self.lazy.restore()
        self.contents.forget()
        for table in (self._tensors, self._buffers, self._script_parameters, self._states):
            table.clear()


def parsing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the parser of the arguments of `Module.to`, with `cuda` named by a number or a virtual tensor too."""

    def parse(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        elif args and is_virtual(args[0]):
            args = (args[0].device, args[0].dtype, *args[1:])
        with DisableTorchFunction():
            return original(*args, **kwargs)

    return parse


def swap(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange class, attributes and contents of two tensor objects.

    `torch.utils.swap_tensors` does the same and refuses tensors with weak references or a graph: then the module would
    get a new parameter and the optimizer keep the old one.
    """
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    swap_tensors(first, second)


def _restore_tensor(tensor: torch.Tensor, original: _Original) -> None:
    if contents_key(tensor) != original.key:
        tensor.grad = None
        swap_tensors(tensor, original.holder)
    tensor.__class__ = original.kind
    tensor.__dict__ = original.attributes


def _copied(value: Any) -> Any:
    # Step counters are on the CPU and counted up in place.
    return value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _restore_state(optimizer: torch.optim.Optimizer, before: dict[Any, dict[Any, Any]]) -> None:
    for parameter, state in list(optimizer.state.items()):
        if any(is_virtual(value) for value in state.values()):
            if parameter in before:
                optimizer.state[parameter] = before[parameter]
            else:
                del optimizer.state[parameter]
