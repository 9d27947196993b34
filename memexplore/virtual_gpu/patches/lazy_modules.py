"""Give lazy modules, such as `nn.LazyLinear`, their memory in the first forward pass.

An uninitialized parameter or buffer that is made on, or moves to, the virtual device stays a CPU tensor without
elements until then, and its device is in a table here: a virtual tensor has a class of its own, and torch recognises
what is uninitialized by the class.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import parameter as parameters
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from memexplore.torch_internals.modules import HOOKS_BEFORE_FORWARD, buffers_of, parameters_of
from memexplore.torch_internals.tensors import raw_device_of
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import DeviceState, is_virtual

_Mixin: Any = parameters.UninitializedTensorMixin  # type: ignore[attr-defined]


class LazyModules:
    """Uninitialized tensors whose device is virtual, and the lazy modules of the user that moved there."""

    def __init__(self) -> None:
        self._restored: dict[int, tuple[weakref.ref[Any], bool]] = {}
        """By id: the tensor, and whether it is restored when the virtual GPU is turned off."""
        self._modules: dict[int, tuple[weakref.ref[Any], Callable[[], None]]] = {}

    def rows(self, exchange: Callable[..., object]) -> list[Replace]:
        """Return the replaced methods; `exchange(tensor, applied, restored)` gives a tensor other contents."""

        def materialize(tensor: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
            made = torch.empty(shape, device=tensor.device if device is None else device, dtype=dtype or tensor.dtype)
            if is_virtual(made):
                exchange(tensor, made, self._restored.pop(id(tensor), (None, False))[1])
            else:
                tensor.data = made
                tensor.__class__ = tensor.cls_to_become

        def device_of(tensor: Any) -> torch.device:
            return DeviceState.cuda if id(tensor) in self._restored else raw_device_of(tensor)

        def deep_copy(tensor: Any, memo: dict[int, Any]) -> Any:
            """`UninitializedParameter.__deepcopy__`, which reads the device of `data`."""
            if id(tensor) not in memo:
                memo[id(tensor)] = type(tensor)(tensor.requires_grad, device_of(tensor), tensor.dtype)
            return memo[id(tensor)]

        return [
            Replace(_Mixin, "materialize", materialize),
            Replace(_Mixin, "device", property(device_of)),
            Replace(_Mixin, "is_cuda", property(lambda tensor: device_of(tensor).type == "cuda")),
            Replace(UninitializedParameter, "__deepcopy__", deep_copy),
            Replace(UninitializedParameter, "__new__", self._making(UninitializedParameter.__new__)),
            Replace(UninitializedBuffer, "__new__", self._making(UninitializedBuffer.__new__)),
        ]

    def _making(self, original: Callable[..., Any]) -> staticmethod[..., Any]:
        """Return `__new__` of a class of uninitialized tensors, which makes those of the virtual device on the CPU."""

        requires_grad_by_default = _requires_grad_by_default(original)

        def new(
            cls: Any,
            requires_grad: bool = requires_grad_by_default,
            device: Any = None,
            dtype: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            data = torch.empty(0, device=device, dtype=dtype)
            virtual = is_virtual(data)
            made = original(cls, requires_grad, "cpu" if virtual else device, data.dtype, *args, **kwargs)
            if virtual:
                self._enter(made, False)
            return made

        return staticmethod(new)

    def _enter(self, tensor: Any, restored: bool) -> None:
        key = id(tensor)
        self._restored[key] = (weakref.ref(tensor, lambda _: self._restored.pop(key, None)), restored)

    def move(self, tensor: Any, function: Callable[[Any], Any], restored: bool) -> None:
        """Apply a function that moves tensors, that of `Module.to`, to an uninitialized one."""
        applied = function(torch.empty(0, device="cpu", dtype=tensor.dtype))
        self._restored.pop(id(tensor), None)
        if is_virtual(applied):
            self._enter(tensor, restored)
        if applied.dtype is not tensor.dtype:
            tensor.data = torch.empty(0, device="cpu", dtype=applied.dtype)

    def keep(self, module: torch.nn.Module) -> None:
        """Keep the state of a lazy module, which its initialization changes, so that `restore` finds it."""
        if isinstance(module, LazyModuleMixin) and id(module) not in self._modules and _is_uninitialized(module):
            key = id(module)
            reference = weakref.ref(module, lambda _: self._modules.pop(key, None))
            self._modules[key] = (reference, _restoring(reference))

    def restore(self) -> None:
        """Make the modules lazy again. May be interrupted and repeated."""
        for _, undo in list(self._modules.values()):
            undo()
        self._modules.clear()
        self._restored.clear()


@functools.cache
def _requires_grad_by_default(new: Callable[..., Any]) -> bool:
    return bool(inspect.signature(new).parameters["requires_grad"].default)


def _is_uninitialized(module: torch.nn.Module) -> bool:
    tensors = (*parameters_of(module).values(), *buffers_of(module).values())
    return any(tensor is not None and is_lazy(tensor) for tensor in tensors)


def _restoring(reference: weakref.ref[Any]) -> Callable[[], None]:
    module = reference()
    kind, attributes = type(module), dict(module.__dict__)
    tables = {name: dict(attributes[name]) for name in HOOKS_BEFORE_FORWARD}

    def undo() -> None:
        module = reference()
        if module is None:
            return
        module.__class__ = kind
        module.__dict__.update(attributes)
        for name, entries in tables.items():
            module.__dict__[name].clear()
            module.__dict__[name].update(entries)

    return undo


__all__ = ["LazyModules", "is_lazy"]
