"""Arguments and outputs of an op, in one storage or another: tensors go in; which are the same, and texts, come out."""

from __future__ import annotations

from typing import Any

import torch

from memexplore.recorder.events import LISTS
from memexplore.tensor_text import tensor_text
from memexplore.torch_internals.tensors import base_of, storage_key, untyped_storage


def text_of_whole(tensor: torch.Tensor, size: int) -> str:
    """Return shape and dtype of the tensor that a storage of `size` bytes was made for, empty if `tensor` is a part.

    The tensor is the base of a view. A view without a base, such as `x.t().detach()`, is recognised by its gaps or by
    the order of its dimensions in memory.
    """
    base = base_of(tensor)
    base = tensor if base is None else base
    if base.nbytes != size:
        return ""
    is_in_order = base.is_contiguous() or base.is_contiguous(memory_format=torch.channels_last)
    return tensor_text(base.shape, base.dtype) if is_in_order else ""


def is_among(args: Any, output: torch.Tensor) -> bool:
    """Return whether an op's output is one of its arguments itself, those in lists included."""
    for value in args:  # noqa: SIM110 - a generator takes three times as long
        if value is output or (isinstance(value, LISTS) and is_among(value, output)):
            return True
    return False


def argument_in(storage: torch.UntypedStorage, args: Any) -> torch.Tensor | None:
    """Return the first of an op's tensor arguments in a storage, those in lists included; None without one."""
    for value in args:
        if isinstance(value, torch.Tensor):
            # A storage has one Python object while that is alive.
            if value.layout is torch.strided and untyped_storage(value) is storage:
                return value
        elif isinstance(value, LISTS):
            found = argument_in(storage, value)
            if found is not None:
                return found
    return None


def by_storage(args: Any, found: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the first of an op's tensor arguments in each storage, by the key of the storage."""
    for value in args:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                found.setdefault(storage_key(untyped_storage(value)), value)
        elif isinstance(value, LISTS):
            by_storage(value, found)
    return found
