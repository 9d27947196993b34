"""Make virtual tensors of the classes of users and libraries: fastai's TensorBase, torchvision's TVTensor, MetaTensor.

A virtual tensor of a class of tensors T is an instance of a class made for T, a subclass of T and of VirtualTensor: T's
methods come first, and dispatch treats the tensor as virtual. That class has T's name and equals T, so that tables with
types as keys find it, and calling it makes a T.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import FLATTEN, DisableTorchFunction, disabled_torch_function
from memexplore.torch_internals.tensors import PARAMETER_MARK
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor, fields_of

_BASE = "_users_class"
"""Attribute of the classes made here: the class T of the user."""
_made: weakref.WeakKeyDictionary[type, dict[bool, weakref.ref[type]]] = weakref.WeakKeyDictionary()
"""T -> whether the tensors are on the CPU -> the class that was made for them."""


class _Shared:
    """Methods of the classes made here that precede those of T."""

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Call nothing of T's: a registry of its subclasses must not get the class made here."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        present = memo.get(id(self))
        if present is not None:
            return present
        tensor: Any = self
        attributes = dict(tensor.__dict__)
        with DisableTorchFunction():
            result = with_class(VirtualTensor.__deepcopy__(tensor, memo), type(tensor))
        memo[id(self)] = result
        result.__dict__.update(copy.deepcopy(attributes, memo))
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        tensor: Any = self
        with DisableTorchFunction():
            rebuild, fields = VirtualTensor.__reduce_ex__(tensor, protocol)
        return of_class_saved_on_a_virtual_gpu, (users_class(type(tensor)), rebuild, fields, dict(tensor.__dict__))


def of_class_saved_on_a_virtual_gpu(
    kind: type, rebuild: Callable[..., Any], fields: tuple[Any, ...], attributes: dict[str, Any]
) -> Any:
    """Unpickle a virtual tensor of a user's class.

    Raises ValueError where no virtual GPU is on.
    """
    result = rebuild(*fields).as_subclass(kind)
    result.__dict__.update(attributes)
    return result


def users_class(kind: type) -> type:
    """Return the class T for which a class was made here, and any other class unchanged."""
    return getattr(kind, _BASE, kind)


def accepts(kind: type) -> bool:
    """Return whether virtual tensors can be instances of a class: it has no dispatch of its own."""
    return (
        not issubclass(kind, VirtualTensor)
        and not hasattr(kind, FLATTEN)
        and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    )


def with_class(tensor: Any, kind: type) -> Any:
    """Make a new virtual tensor an instance of a class of the user; torch's own classes have a mark or nothing."""
    kind = users_class(kind)
    if kind is torch.nn.Parameter:
        setattr(tensor, PARAMETER_MARK, True)
    elif kind is not torch.Tensor:
        tensor.__class__ = _class_for(kind, tensor.host)
    return tensor


def _class_for(kind: type, host: bool) -> type:
    """Return the class of the virtual tensors of a user's class, on the CPU (`host`) or on the virtual GPU."""
    present = _made.get(kind, {}).get(host)
    made = None if present is None else present()
    if made is None:
        made = _make(kind, host)
        _made.setdefault(kind, {})[host] = weakref.ref(made)
    return made


def _make(kind: Any, host: bool) -> type:
    users: Any = type(kind)

    class Meta(users):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs)

        def __instancecheck__(self, instance: Any) -> bool:
            return isinstance(instance, kind)

        def __eq__(self, other: object) -> bool:
            return self is other or (isinstance(other, type) and users_class(other) is kind)

        def __hash__(self) -> int:
            return hash(kind)

    namespace = {
        **fields_of(host),
        _BASE: kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__torch_function__": _torch_function(kind),
        "__torch_dispatch__": classmethod(VirtualTensor.__torch_dispatch__.__func__),  # type: ignore[attr-defined]
    }
    return Meta(kind.__name__, (_Shared, kind, VirtualTensor), namespace)


def _torch_function(kind: Any) -> Any:
    """Return T's `__torch_function__`, called with T and no class made here, so that its `super()` is T's own."""
    if kind.__torch_function__ is disabled_torch_function:
        return disabled_torch_function

    def torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return kind.__torch_function__(func, tuple(map(users_class, types)), args, kwargs or {})

    return classmethod(torch_function)
