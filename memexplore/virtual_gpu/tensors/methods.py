"""Give `torch.Tensor` the methods by which a virtual tensor reads as a CUDA tensor.

A virtual tensor is an object of the class of real tensors, which must have its methods. Each of them first asks whether
the tensor is virtual, and calls torch's own method for any other. `torch.Tensor` has them while a virtual GPU is on or
a virtual tensor is alive (`put_on`), and is as torch made it at all other times.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import DisableTorchFunction, disabled_torch_dispatch
from memexplore.torch_internals.tensors import REDUCE, has_python_key, storage_key, untyped_storage
from memexplore.virtual_gpu.tensors import live_storages, pinned_memory, saved, sparse_contents
from memexplore.virtual_gpu.tensors.tensor import (
    HOST,
    DeviceState,
    address_of,
    dispatch,
    is_on_host,
    is_virtual,
)
from memexplore.virtual_gpu.values import reading, real_tensors
from memexplore.virtual_gpu.values.value_reads import NotSimulated

_Tensor = torch.Tensor


class _Virtual(torch.Tensor):
    """The properties and methods of virtual tensors."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return HOST if is_on_host(self) else DeviceState.cuda

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return not is_on_host(self)

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    def get_device(self) -> int:
        return -1 if is_on_host(self) else DeviceState.cuda.index

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is None:
            name = str(real_tensors.empty(0, dtype=self.dtype).type())
            return name if is_on_host(self) else name.replace("torch.", "torch.cuda.")
        if hasattr(dtype, "__name__"):
            # A class such as torch.LongTensor or torch.cuda.FloatTensor.
            dtype = f"{dtype.__module__}.{dtype.__name__}"
        if isinstance(dtype, str):
            target = real_tensors.empty(0).type(dtype.replace("torch.cuda.", "torch.")).dtype
            return self.to(DeviceState.cuda if "cuda" in dtype else HOST, target)
        return self.to(dtype)

    def is_shared(self) -> bool:
        return not is_on_host(self)

    is_pinned = pinned_memory.is_pinned
    pin_memory = pinned_memory.pinned

    def untyped_storage(self) -> torch.UntypedStorage:
        storage = untyped_storage(self)
        if not is_on_host(self) and not storage.nbytes():
            live_storages.watch_empty(storage)
        return storage

    def data_ptr(self) -> int:
        return address_of(self) + int(self.storage_offset()) * self.element_size()

    # Values: see values/reading.py.

    def item(self) -> Any:
        return reading.item(self)

    def tolist(self) -> Any:
        return reading.tolist(self)

    def numpy(self, *, force: bool = False) -> Any:
        if not is_on_host(self) and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return reading.numpy(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **_: Any) -> Any:
        raise NotSimulated(reading.NO_DLPACK)

    def __bool__(self) -> bool:
        return reading.truth(self)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        return reading.formatted(self, spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return sparse_contents.text(self) if self.layout is torch.sparse_coo else reading.text(self)

    def __copy__(self) -> torch.Tensor:
        """Return a tensor in the same storage: `copy.copy` pickles everything but the storage."""
        with torch.no_grad(), DisableTorchFunction():
            result = self.detach().requires_grad_(self.requires_grad)
        result.__class__ = type(self)
        vars(result).update(vars(self))
        return result

    def _reduce_ex_internal(self, protocol: Any) -> Any:
        if DeviceState.gpu_name is None:
            raise RuntimeError(
                "this tensor was made on a virtual GPU, which is off now, and has no values to save or copy: turn it "
                "on again (%memgpu NAME, or `with memexplore.virtual(NAME):`) or create the tensor and its model again"
            )
        if self.layout is not torch.strided:
            return _originals[REDUCE.name](self, protocol)
        return saved.reduced(self)


# --- putting them on `torch.Tensor` -----------------------------------------------------------------------------------


class _Dispatch:
    """`__torch_dispatch__` of `torch.Tensor`: that of virtual tensors, and none for the classes that inherit it."""

    def __get__(self, instance: Any, owner: type) -> Any:
        if owner is _Tensor or owner is torch.nn.Parameter or (instance is not None and has_python_key(instance)):
            return dispatch
        return disabled_torch_dispatch


class _ReducesAs:
    """Something that `copy.copy` copies as the tensor that it holds: as if the tensor had no `__copy__`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._tensor.__reduce_ex__(protocol)


_PROPERTIES = ("device", "is_cuda", "is_meta")
_METHODS = (
    "get_device type is_shared is_pinned pin_memory untyped_storage data_ptr item tolist numpy __array__ __dlpack__ "
    f"__bool__ __float__ __int__ __index__ __complex__ __format__ __repr__ __copy__ {REDUCE.name}"
).split()


def _key(attribute: Any) -> Any:
    """Return what C++ names to a function mode for a method, or for reading a property."""
    return attribute if callable(attribute) else attribute.__get__


def _copied(tensor: torch.Tensor) -> Any:
    return copy.copy(_ReducesAs(tensor))


_originals: dict[str, Any] = {
    name: _key(getattr(_Tensor, name)) for name in (*_PROPERTIES, *_METHODS) if hasattr(_Tensor, name)
} | {"__copy__": _copied}
"""Name -> torch's method, or what reads torch's property."""


def _property(name: str, ours: Any) -> property:
    return property(lambda self: ours(self) if is_virtual(self) else _originals[name](self))


def _method(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(_originals[name])
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if is_virtual(self) else _originals[name])(self, *args, **kwargs)

    method.__name__ = name
    return method


def _replacement(name: str, ours: Any) -> Any:
    return _property(name, ours.fget) if isinstance(ours, property) else _method(name, ours)


_replacements: dict[str, Any] = {
    **{name: _replacement(name, vars(_Virtual)[name]) for name in (*_PROPERTIES, *_METHODS)},
    "__torch_dispatch__": _Dispatch(),
}
NAMES = tuple(_replacements)
_MISSING = object()
_own: dict[str, Any] = {}
"""Name -> what `torch.Tensor` itself had under it before, `_MISSING` where it had the method of its base."""
_wrappers: dict[str, Any] = {}
"""Name -> a method that another library has put on `torch.Tensor`, and that calls ours."""


_Storage = torch.UntypedStorage
_storage_address = _Storage.data_ptr


def _address_of_storage(self: torch.UntypedStorage) -> int:
    """`UntypedStorage.data_ptr`, by which libraries that save a model find tensors that share memory."""
    is_virtual_storage = storage_key(self) in live_storages.live_storages or self.device.type == "meta"
    return live_storages.storage_address(self) if is_virtual_storage else _storage_address(self)


def put_on() -> None:
    """Give `torch.Tensor` the methods, if it does not have them. An interrupted call can be made again."""
    _Storage.data_ptr = _address_of_storage  # type: ignore[assignment, method-assign]
    if vars(_Tensor).get(NAMES[-1]) is _replacements[NAMES[-1]]:
        return
    for name, replacement in _replacements.items():
        present = vars(_Tensor).get(name, _MISSING)
        if present is not replacement and present is not _wrappers.get(name):
            _own[name] = present
            if hasattr(_Tensor, name):
                _originals[name] = _key(getattr(_Tensor, name))
            setattr(_Tensor, name, replacement)


def take_off_unless_needed() -> None:
    """Make `torch.Tensor` as it was, if no virtual GPU is on and no virtual tensor is alive.

    An interrupted call can be made again.
    """
    if DeviceState.gpu_name is not None or live_storages.any_alive():
        return
    if vars(_Storage).get("data_ptr") is _address_of_storage:
        del _Storage.data_ptr  # torch's is that of its base class
    for name in reversed(NAMES):
        present, own = vars(_Tensor).get(name, _MISSING), _own.get(name, _MISSING)
        if present is _replacements[name]:
            if own is _MISSING:
                delattr(_Tensor, name)
            else:
                setattr(_Tensor, name, own)
        elif name in _own and present is not own:
            _wrappers[name] = present


live_storages.Watch.begin, live_storages.Watch.end = put_on, take_off_unless_needed


def keys_of(name: str) -> list[Any]:
    """Return what a function mode may get for a method or property of `torch.Tensor`: torch's own and ours.

    C++ names it by what `torch.Tensor` has when it is called.
    """
    if name not in _replacements:
        return [_key(getattr(_Tensor, name))]
    return [_originals[name], _key(_replacements[name])]
