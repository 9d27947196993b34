"""Files: `torch.save` keeps shapes and no values, `torch.load` brings tensors onto the virtual device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memexplore.torch_internals.modules import apply_of
from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.patches.device_names import renamed
from memexplore.virtual_gpu.tensors.tensor import META, map_locations, saved_on_a_virtual_gpu_without_values

_restore = torch.serialization.default_restore_location


class _Storage:
    """What a `map_location` function of the user gets for a storage: it says where it should go."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> _Storage:
        """Go to the virtual device."""
        renamed(0 if device is None else device)
        return _Storage("cuda:0")

    def cpu(self) -> _Storage:
        """Stay on the CPU."""
        return _Storage()


def _places(map_location: Any) -> Callable[[Any, str], str]:
    """Where `torch.load(..., map_location=...)` puts a storage that was saved on a device."""

    def place(storage: Any, saved: str) -> str:
        target = map_location
        if isinstance(map_location, dict):
            target = map_location.get(saved, saved)
        elif callable(map_location):
            target = map_location(_Storage(), saved)
            target = saved if target is None else target.device
        elif map_location is None:
            target = saved
        told = renamed(target if isinstance(target, torch.device) else torch.device(target))
        return "cuda" if told is META else str(told)

    return place


class _Load:
    """One `torch.load`: everything is read onto the CPU, and what belongs on the virtual device is moved afterwards."""

    def __init__(self, map_location: Any) -> None:
        self.place = _places(map_location)
        self._bound: dict[int, Any] = {}
        self._moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._seen: dict[int, Any] = {}

    def locate(self, storage: Any, saved: str) -> Any:
        """The `map_location` that torch gets."""
        place = self.place(storage, saved)
        if place != "cuda":
            return _restore(storage, place)
        self._bound[storage_key(storage)] = storage
        return storage

    def moved(self, value: Any) -> Any:
        """What was loaded, on the devices where it belongs; tensors that share memory still do."""
        if not self._bound:
            return value
        found = self._seen.get(id(value))
        if found is not None:
            return found[1]
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
        self._seen[id(value)] = (value, result)
        return result

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage_key(storage) not in self._bound:
            return tensor
        key = (storage_key(storage), tensor.dtype)
        whole = self._moved.get(key)
        if whole is None:
            count = storage.nbytes() // tensor.dtype.itemsize
            whole = self._moved[key] = torch.empty(count, dtype=tensor.dtype, device="cuda")
        result = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(result, tensor.requires_grad)
        return result.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def on() -> Iterator[None]:
    """Make `torch.load` know the virtual device."""
    original = torch.load

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        one = _Load(map_location)
        map_locations.append(one.place)
        try:
            return one.moved(original(f, one.locate, *args, **kwargs))
        finally:
            map_locations.pop()

    try:
        torch.load = load
        torch.serialization.add_safe_globals([saved_on_a_virtual_gpu_without_values])
        yield
    finally:
        torch.load = original
        allowed = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        kept = [entry for entry in allowed if entry is not saved_on_a_virtual_gpu_without_values]
        torch.serialization.add_safe_globals(kept)
