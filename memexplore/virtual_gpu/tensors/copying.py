"""Copies of virtual tensors by `copy.copy` and `copy.deepcopy`, with the storages that a CUDA tensor's copies have.

In: a virtual tensor, and the memo of `copy.deepcopy`. Out: a leaf tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.tensors import PARAMETER_MARK, storage_key, untyped_storage


def shallow(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same storage, as `copy.copy` makes one: it pickles everything but the storage."""
    with torch.no_grad():
        return _marked_as(tensor, tensor.detach())


def deep(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Return a tensor in a copy of the tensor's whole storage: `Tensor.__deepcopy__` in torch/_tensor.py.

    Tensors that share a storage share its copy. Raises RuntimeError for a tensor that has a history.
    """
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol: "
            "detach the tensor first"
        )
    with torch.no_grad():
        return _marked_as(tensor, tensor.detach().clone() if tensor.is_cpu else _in_copied_storage(tensor, memo))


def _in_copied_storage(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    storage = untyped_storage(tensor)
    count = storage.nbytes() // tensor.element_size()
    copied = memo.setdefault("torch", {})
    whole = copied.get(storage_key(storage))
    if whole is None:
        fills = tensor.is_contiguous() and tensor.numel() == count
        source = tensor.detach() if fills else tensor.detach().as_strided((count,), (1,), 0)
        whole = copied[storage_key(storage)] = source.clone()
        if fills:
            return whole
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    result = tensor.new_empty(0).set_(untyped_storage(whole), *layout)  # type: ignore[call-overload]
    return result.conj_physical() if tensor.is_conj() else result.neg() if tensor.is_neg() else result


def _marked_as(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return a leaf that is a parameter, and needs gradients, if a tensor is and does."""
    result.requires_grad_(tensor.requires_grad)
    if getattr(tensor, PARAMETER_MARK, False):
        setattr(result, PARAMETER_MARK, True)
    return result
