"""Follow storages that `resize_` has made smaller than their tensors: FSDP frees gathered parameters by `resize_(0)`.

Shape and strides of the tensors stay, and views of them can be made. An op that reads or writes the values of an empty
one ends in the error of a kernel that reads address 0.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.dispatch import schema_or_none
from memexplore.torch_internals.memory_access import storage_resize
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.tensors.live_storages import live_storages
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu

_WITHOUT_VALUES = frozenset(
    "set_ resize_ resize_as_ empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty "
    "new_zeros new_ones new_full new_empty_strided is_same_size".split()
)
"""Ops that use the metadata of a tensor only, or give it another storage."""


def among(func: Any, args: Any, kwargs: Any) -> list[torch.UntypedStorage]:
    """Return the shrunk storages of an op's arguments.

    Raises torch.AcceleratorError, as the kernel does on a GPU, for an op that reads or writes values of an empty one.
    """
    shrunk: list[torch.UntypedStorage] = []
    for value in (*args, *(kwargs or {}).values()):
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if not is_on_gpu(tensor) or not tensor.numel():
                continue
            storage = untyped_storage(tensor)
            ref = live_storages.get(storage_key(storage))
            if ref is None or ref.size >= tensor.numel() * tensor.element_size():
                continue
            if not ref.size and not _needs_no_values(func):
                raise torch.AcceleratorError(
                    "CUDA error: an illegal memory access was encountered: "
                    f"{func} uses a tensor of shape {tuple(tensor.shape)} whose storage was resized to 0 bytes. "
                    "Give the storage memory again with untyped_storage().resize_(bytes) first."
                )
            shrunk.append(storage)
    return shrunk


def keep_size(storages: list[torch.UntypedStorage]) -> None:
    """Undo the growth of shrunk storages by the construction of a view: `Tensor.set_` grows a meta storage."""
    for storage in storages:
        ref = live_storages.get(storage_key(storage))
        if ref is not None and ref.size < storage.nbytes():
            storage_resize(storage, ref.size)


def _needs_no_values(func: Any) -> bool:
    schema = schema_or_none(func)
    if schema is None:
        return False
    if schema.name.split("::")[-1] in _WITHOUT_VALUES:
        return True
    # A view: every result is an alias of an argument, and none is written to.
    aliases = [result.alias_info for result in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
