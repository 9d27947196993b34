"""Save and load virtual tensors by `torch.save` and `torch.load`: a file keeps shapes and known values.

So does what a queue, a pipe or the start of a process pickles: a virtual tensor has no memory that could be shared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import register
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from memexplore.torch_internals.modules import apply_of
from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.files import session
from memexplore.virtual_gpu.patches.device_names import renamed
from memexplore.virtual_gpu.patches.install import Call, Patch
from memexplore.virtual_gpu.tensors.saved import (
    SavedStorage,
    copy_values,
    fill,
    map_locations,
    saved_on_a_virtual_gpu_with_values,
    saved_on_a_virtual_gpu_without_values,
    saved_values,
)
from memexplore.virtual_gpu.tensors.tensor import META, is_virtual

_restore_location = torch.serialization.default_restore_location


class _Storage:
    """A storage as a `map_location` function of the user gets it: its methods note the device that it moves to."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> _Storage:
        """Move to the virtual device."""
        renamed(0 if device is None else device)
        return _Storage("cuda:0")

    def cpu(self) -> _Storage:
        """Stay on the CPU."""
        return _Storage()


def _target_function(map_location: Any) -> Callable[[Any, str], str]:
    """Return a function of a storage and the device it was saved on: where `torch.load(..., map_location)` puts it."""

    def target_of(storage: Any, saved: str) -> str:
        target = map_location
        if isinstance(map_location, dict):
            target = map_location.get(saved, saved)
        elif callable(map_location):
            target = map_location(_Storage(), saved)
            target = saved if target is None else target.device
        elif map_location is None:
            target = saved
        device = renamed(target if isinstance(target, int | torch.device) else torch.device(target))
        return "cuda" if device is META else str(device)

    return target_of


class _Load:
    """One `torch.load`: all tensors are read onto the CPU, and those of the virtual device are moved afterwards."""

    def __init__(self, map_location: Any) -> None:
        self.target_of = _target_function(map_location)
        self._storages: dict[int, Any] = {}
        """Storages on the CPU that belong on the virtual device, by their address in C++."""
        self._moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._results: dict[int, tuple[Any, Any]] = {}
        """By id: a loaded object, and its replacement."""

    def locate(self, storage: Any, saved: str) -> Any:
        """Return a storage at its device; the `map_location` that torch gets."""
        target = self.target_of(storage, saved)
        if target != "cuda":
            return _restore_location(storage, target)
        self._storages[storage_key(storage)] = storage
        return storage

    def moved(self, value: Any) -> Any:
        """Return the loaded value with its tensors on their devices. Tensors that shared memory still do."""
        if not self._storages:
            return value
        entry = self._results.get(id(value))
        if entry is not None:
            return entry[1]
        result = value
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            result = self._tensor(value)
        elif isinstance(value, torch.nn.Module):
            apply_of(value)(self._tensor)
        elif isinstance(value, dict):
            for key in list(value):
                value[key] = self.moved(value[key])
        elif isinstance(value, list):
            value[:] = [self.moved(entry) for entry in value]
        elif type(value) is tuple:
            result = tuple(self.moved(entry) for entry in value)
        elif isinstance(value, torch.optim.Optimizer):
            self.moved(value.__dict__)
        self._results[id(value)] = (value, result)
        return result

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._storages:
            return tensor
        key = (storage_key(storage), tensor.dtype)
        contents = self._moved.get(key)
        if contents is None:
            count = storage.nbytes() // tensor.dtype.itemsize
            contents = self._moved[key] = torch.empty(count, dtype=tensor.dtype, device="cuda")
            copy_values(contents, tensor.as_strided((count,), (1,), 0))
        result = contents.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(result, tensor.requires_grad)
        return result.requires_grad_(tensor.requires_grad)


def load_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `torch.load` that brings tensors onto the virtual device."""

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, (str, os.PathLike)):
            f = session.read_path(f)
            if os.fspath(f).endswith(".safetensors"):
                # torch reads it with safetensors, whose functions are replaced too.
                return original(f, map_location, *args, **kwargs)
        loading = _Load(map_location)
        map_locations.append(loading.target_of)
        saved_values.append([])
        try:
            loaded = original(f, loading.locate, *args, **kwargs)
            for saved in saved_values[-1]:
                fill(*saved)
            return loading.moved(loaded)
        finally:
            map_locations.pop()
            saved_values.pop()

    return load


def _reduced(tensor: torch.Tensor) -> Any:
    """Return what another process makes a tensor of; torch refuses results of autograd."""
    can_be_sent = tensor.is_leaf or not tensor.requires_grad
    return tensor.__reduce_ex__(2) if is_virtual(tensor) and can_be_sent else reduce_tensor(tensor)


def patches() -> list[Patch]:
    """Return patches that let other processes and `torch.load(weights_only=True)` read virtual tensors.

    `torch.load` is not among them.
    """
    # `float` and `int`: a virtual number is pickled as one.
    needed = (SavedStorage, saved_on_a_virtual_gpu_without_values, saved_on_a_virtual_gpu_with_values, float, int)
    safe = [entry for entry in needed if entry not in torch.serialization.get_safe_globals()]
    # Only the exit of this context manager removes an entry and leaves those of the user.
    allowed = torch.serialization.safe_globals(safe)  # type: ignore[arg-type]
    return [
        Call(
            partial(torch.serialization.add_safe_globals, safe),  # type: ignore[arg-type]
            partial(allowed.__exit__, None, None, None),
        ),
        *(
            Call(partial(register, kind, _reduced), partial(register, kind, reduce_tensor))
            for kind in (torch.Tensor, torch.nn.Parameter)
        ),
        Call(unmake=map_locations.clear),
        Call(unmake=saved_values.clear),
    ]
