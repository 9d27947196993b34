"""The storages of a virtual GPU that are older than a watched run: which of all storages are newer comes out."""

from __future__ import annotations

import weakref

import torch

from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.tensors.live_storages import live_storages


class Older:
    """The storages of the virtual GPU that are alive now; none of them is kept alive."""

    def __init__(self) -> None:
        storages = [ref() for ref in list(live_storages.values())]
        self._refs = {storage_key(each): weakref.ref(each) for each in storages if each is not None}

    def is_newer(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage of the virtual GPU was made since then."""
        ref = self._refs.get(storage_key(storage))
        return ref is None or ref() is not storage
