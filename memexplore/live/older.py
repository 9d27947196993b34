"""The storages that are older than a watched run: those alive when it begins go in, which ones are newer comes out."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from memexplore.torch_internals.dispatch import tensor_with_memory
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.device import VirtualGpu
from memexplore.virtual_gpu.tensors.live_storages import live_storages


class Older:
    """The storages of a device that are alive now; none of them is kept alive."""

    def __init__(self, device: torch.device, virtual: VirtualGpu | None) -> None:
        self._are_known = virtual is not None or not gc.get_freeze_count()
        """False where Python does not list all objects: those that `gc.freeze` has set aside are not listed."""
        storages = [ref() for ref in list(live_storages.values())] if virtual is not None else _storages_on(device)
        self._refs = {storage_key(each): weakref.ref(each) for each in storages if each is not None}

    def is_newer(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage was made since then; False where that is not known."""
        ref = self._refs.get(storage_key(storage))
        return self._are_known and (ref is None or ref() is not storage)


def _storages_on(device: torch.device) -> list[torch.UntypedStorage]:
    found: list[torch.UntypedStorage] = []
    is_tensor: dict[type, bool] = {}
    for each in gc.get_objects():
        # By the type alone: `isinstance` asks a proxy for the object behind it.
        kind: Any = type(each)
        known = is_tensor.get(kind)
        if known is None:
            known = is_tensor[kind] = issubclass(kind, torch.Tensor)
        if known:
            try:
                tensor = tensor_with_memory(each)
                if tensor.device.type == device.type:
                    found.append(untyped_storage(tensor))
            except (NotImplementedError, RuntimeError, ValueError, AttributeError):
                # Sparse and uninitialized tensors, and wrappers that are not complete, have no storage.
                continue
    return found
