"""Make the results of ops of `torch.inference_mode` inference tensors.

An inference tensor has neither the dispatch keys of autograd nor a version counter, so torch itself refuses to write to
it outside inference mode, to save it for a backward pass and to let it require a gradient. A tensor gets or lacks them
when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memexplore.torch_internals.dispatch import disable_current_modes
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.tensors.tensor import HOST, META, is_on_host, is_virtual, meta_alias, plain_alias, wrap


def among(args: Sequence[Any]) -> bool:
    """Whether a tensor among an op's arguments is an inference tensor, also in a list."""
    for value in args:
        if isinstance(value, torch.Tensor):
            if value.is_inference():
                return True
        elif isinstance(value, list | tuple) and among(value):
            return True
    return False


def marked(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an op of inference mode, with inference tensors in place of those with a new storage.

    An argument and a view of one stay as they are: views of inference tensors are inference tensors, others are not.
    """
    if isinstance(result, torch.Tensor):
        return _marked(result, _storages((*args, *kwargs.values())))
    if isinstance(result, list | tuple) and any(isinstance(value, torch.Tensor) for value in result):
        old = _storages((*args, *kwargs.values()))
        return type(result)(_marked(value, old) if isinstance(value, torch.Tensor) else value for value in result)
    return result


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return an inference tensor as `detach` makes it outside inference mode: it can be written to.

    It has a version counter: native::detach in aten/src/ATen/native/TensorShape.cpp.
    """
    with disable_current_modes():
        return wrap(meta_alias(tensor), is_on_host(tensor))


def _storages(values: Sequence[Any]) -> set[int]:
    keys: set[int] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                keys.add(storage_key(untyped_storage(value)))
        elif isinstance(value, list | tuple):
            keys |= _storages(value)
    return keys


def _marked(tensor: torch.Tensor, old_storages: set[int]) -> torch.Tensor:
    virtual = is_virtual(tensor)
    if type(tensor) is not torch.Tensor and not virtual:
        return tensor
    if tensor.layout is not torch.strided or storage_key(untyped_storage(tensor)) in old_storages:
        return tensor
    with torch.inference_mode():
        return wrap(plain_alias(tensor, META), is_on_host(tensor)) if virtual else plain_alias(tensor, HOST)
