"""Replace methods of the storages of virtual tensors: `resize_`, `clone`, and the device that code reads.

The C++ storage of a virtual tensor is a meta storage; `live_storages` has those on the device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from memexplore.text.tensor_text import dtype_of, shape_of
from memexplore.torch_internals.dispatch import disable_current_modes
from memexplore.torch_internals.memory_access import allowed, set_storage, storage_resize
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.dispatch import runner as dispatch_runner
from memexplore.virtual_gpu.dispatch.runner import PlanRunner
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.live_storages import bytes_of_text, host_storages, live_storages
from memexplore.virtual_gpu.tensors.tensor import META, DeviceState, wrap

_Storage = torch.UntypedStorage


def rows(runner: PlanRunner) -> list[Replace]:
    """Return the replaced methods of `torch.UntypedStorage`."""
    return [
        Replace(_Storage, "resize_", _resize(runner)),
        *(Replace(_Storage, name, _writing(getattr(_Storage, name))) for name in ("copy_", "fill_")),
        Replace(_Storage, "clone", _clone(_Storage.clone)),
        Replace(_Storage, "device", property(_device(_Storage.device))),
    ]


def _resize(runner: PlanRunner) -> Callable[[Any, Any], Any]:
    """`UntypedStorage.resize_`, which no mode sees."""

    def resize_(self: torch.UntypedStorage, size: Any) -> Any:
        if storage_key(self) in live_storages:
            # As the C++ function, which takes the size as an unsigned number.
            with dispatch_runner.lock:
                runner.resize_storage(self, operator.index(size) % 2**64, "UntypedStorage.resize_", ())
        return storage_resize(self, size)

    return resize_


def _writing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `copy_` or `fill_`, which asks for addresses and then runs an op on tensors."""

    def write(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        with allowed([self, *(value for value in args if isinstance(value, _Storage))]):
            return original(self, *args, **kwargs)

    return write


def _clone(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `UntypedStorage.clone`, by which `copy.deepcopy` copies a tensor's whole storage."""

    def clone(self: torch.UntypedStorage) -> Any:
        key = storage_key(self)
        ref = live_storages.get(key) or host_storages.get(key)
        if ref is None:
            return original(self)
        shape, dtype = shape_of(ref.tensor), torch.uint8
        if shape is not None and bytes_of_text(ref.tensor) == self.nbytes():
            dtype = getattr(torch, dtype_of(ref.tensor))
        else:
            shape = (self.nbytes(),)
        with disable_current_modes():
            contents = torch.empty(0, dtype=dtype, device=META)
            set_storage(contents, self, 0, shape, torch.empty(shape, device=META).stride())
        with torch.no_grad():
            return untyped_storage(wrap(contents, host=key in host_storages).clone())

    return clone


def _device(original: Any) -> Callable[[Any], torch.device]:
    def device(self: torch.UntypedStorage) -> torch.device:
        return DeviceState.cuda if storage_key(self) in live_storages else original.__get__(self)

    return device
