"""Pickle virtual tensors as torch pickles tensors: each has a layout in a storage, which is kept whole.

`torch.save` keeps a storage once, however many tensors share it. `pickle` keeps it once for each tensor, so that they
share nothing afterwards. Source: `Tensor._reduce_ex_internal` in torch/_tensor.py, torch/serialization.py, and
`TypedStorage.__reduce__` in torch/storage.py. A file has the values of a storage where they are known, else its size.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memexplore.torch_internals.tensors import set_conj, set_neg, storage_key, untyped_storage
from memexplore.virtual_gpu.tensors.tensor import DeviceState, fake_cpu_tensor, is_on_host
from memexplore.virtual_gpu.values import known_values, notes, real_tensors
from memexplore.virtual_gpu.values.known_values import Assumption

map_locations: list[Callable[[Any, str], str]] = []
"""For each running `torch.load`: a function of a storage and the device it was saved on, which returns its device."""
saved_values: list[list[tuple[torch.Tensor, torch.Tensor, Assumption | None]]] = []
"""For each running `torch.load`: arguments of `fill`; the values are not yet read while it unpickles."""
_WITHOUT_STORAGE_CLASS = tuple(f"torch.{name}" for name in "float8 float4 bits uint16 uint32 uint64 complex32".split())
"""Beginnings of the dtypes that torch saves as bytes."""


class SavedStorage:
    """A storage in a file: its bytes as a tensor, None where they are unknown, their number and its device.

    `assumption` is what an `Assumption` about the bytes consists of, if they are assumed.
    """

    def __init__(
        self, values: torch.Tensor | None, size: int, device: str, assumption: tuple[str, bool] | None = None
    ) -> None:
        self.values = values
        self.assumption = None if assumption is None else Assumption(*assumption)
        self._size = size
        self._device = device
        self._loaded: torch.Tensor | None = None

    def __reduce__(self) -> Any:
        # torch.load reads tuples of Python only.
        assumption = () if self.assumption is None else (tuple(self.assumption),)
        return SavedStorage, (self.values, self._size, self._device, *assumption)

    def loaded(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that has the storage on its device; `shape` and `dtype` name it if they fill the storage."""
        if self._loaded is None:
            device = map_locations[-1](None, self._device) if map_locations else self._device
            if self.values is not None and (DeviceState.gpu_name is None or not device.startswith("cuda")):
                self._loaded = self.values
                if self.assumption is not None:
                    notes.assume(self.assumption.text)
            else:
                if math.prod(shape) * dtype.itemsize != self._size:
                    shape, dtype = (self._size,), torch.uint8
                self._loaded = _empty(shape, dtype, device)
                if self.values is not None:
                    _fill(self._loaded, self.values, self.assumption)
        return self._loaded


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if device.startswith("cuda"):
        return torch.empty(shape, dtype=dtype, device="cuda")
    return fake_cpu_tensor(shape, dtype)


def _fill(tensor: torch.Tensor, values: torch.Tensor, assumption: Assumption | None) -> None:
    values = values.view(tensor.dtype).view(tensor.shape)
    if saved_values:
        saved_values[-1].append((tensor, values, assumption))
    else:
        fill(tensor, values, assumption)


def fill(tensor: torch.Tensor, values: torch.Tensor, assumption: Assumption | None) -> None:
    """Copy values from a file into a tensor on the device, with what is assumed about them."""
    copy_values(tensor, values)
    if assumption is not None:
        known_values.assume(tensor, assumption)


def copy_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values from the CPU into a tensor on the device."""
    with torch.no_grad():
        tensor.detach().copy_(values)


# --- saving -----------------------------------------------------------------------------------------------------------


class _Saving(threading.local):
    storages: dict[int, tuple[torch.UntypedStorage, torch.dtype, SavedStorage]] | None = None
    """The storages in the file that `torch.save` is writing, by their keys; None while it is not running."""


_saving = _Saving()


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Keep each storage once in what the block pickles, as `torch.save` does."""
    before, _saving.storages = _saving.storages, {}
    try:
        yield
    finally:
        _saving.storages = before


def reduced(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """Return what `__reduce_ex__` returns for a virtual tensor with strides.

    Raises RuntimeError where `torch.save` keeps another tensor in the same storage with another dtype.
    """
    storage = _saved_storage(tensor)
    is_known = storage.values is not None and not is_made_up(tensor)
    make = saved_on_a_virtual_gpu_with_values if is_known else saved_on_a_virtual_gpu_without_values
    layout = tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
    return make, (storage, *layout, tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)


def is_made_up(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values that the program itself would not have."""
    assumption = known_values.assumption(tensor)
    return assumption is not None and assumption.is_made_up


def _saved_storage(tensor: torch.Tensor) -> SavedStorage:
    storage = untyped_storage(tensor)
    dtype = torch.uint8 if str(tensor.dtype).startswith(_WITHOUT_STORAGE_CLASS) else tensor.dtype
    if _saving.storages is not None and storage_key(storage) in _saving.storages:
        _, other, saved = _saving.storages[storage_key(storage)]
        if dtype != other:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")
        return saved
    copy = known_values.copy_of(tensor) if tensor.numel() and known_values.of(tensor) is not None else None
    values = None if copy is None else real_tensors.empty(0, dtype=torch.uint8).set_(copy)
    place = "cpu" if is_on_host(tensor) else "cuda:0"
    saved = SavedStorage(values, storage.nbytes(), place, None if values is None else known_values.assumption(tensor))
    if _saving.storages is not None:
        _saving.storages[storage_key(storage)] = storage, dtype, saved
    return saved


# --- loading: `torch.load` prints the names of these functions where no virtual GPU is on -----------------------------


def saved_on_a_virtual_gpu_without_values(
    storage: SavedStorage, offset: int, shape: tuple[int, ...], *layout: Any
) -> torch.Tensor:
    """Unpickle a virtual tensor. Raises ValueError where no virtual GPU is on."""
    if DeviceState.gpu_name is None:
        raise ValueError(
            f"a tensor of shape {shape} was saved on a virtual GPU and has no values; it can be loaded on a virtual "
            "GPU only, which spawned processes do not have"
        )
    return saved_on_a_virtual_gpu_with_values(storage, offset, shape, *layout)


def saved_on_a_virtual_gpu_with_values(
    storage: SavedStorage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    is_conjugated: bool,
    is_negated: bool,
    requires_grad: bool,
) -> torch.Tensor:
    """Unpickle a virtual tensor whose values were known."""
    loaded = storage.loaded(shape, dtype)
    with torch.no_grad():
        result = loaded.new_empty(0, dtype=dtype)
        result.set_(untyped_storage(loaded), offset, shape, stride)  # type: ignore[call-overload]
    if is_conjugated:
        set_conj(result, True)
    if is_negated:
        set_neg(result, True)
    return result.requires_grad_(requires_grad)
