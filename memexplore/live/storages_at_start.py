"""Tell storages of a virtual GPU that a watched run has made from storages that were there before it."""

from __future__ import annotations

import weakref

import torch

from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.tensors.live_storages import live_storages


class StoragesAtStart:
    """The storages of the virtual GPU that are alive when a watched run begins; none of them is kept alive."""

    def __init__(self) -> None:
        storages = [ref() for ref in list(live_storages.values())]
        self._refs = {storage_key(storage): weakref.ref(storage) for storage in storages if storage is not None}

    def is_new(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage of the virtual GPU was made since the run began."""
        ref = self._refs.get(storage_key(storage))
        return ref is None or ref() is not storage
