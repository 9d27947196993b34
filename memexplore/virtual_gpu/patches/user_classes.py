"""Replace the functions that make a tensor an instance of a user's class (tensors/user_classes.py).

The C++ of `Tensor.as_subclass`, `Tensor._make_subclass` and the constructor `T(tensor)` calls ops with all modes
disabled; these functions do the same, where the modes see the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import DisableTorchFunction
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors import user_classes
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor


def rows() -> list[Replace]:
    """Return the replaced methods; patches/bitsandbytes.py has the row of `_make_subclass`."""
    return [
        Replace(torch.Tensor, "as_subclass", _as_subclass(torch.Tensor.as_subclass)),
        Replace(torch.Tensor, "__new__", staticmethod(_new(torch.Tensor.__new__))),
    ]


def _alias(tensor: VirtualTensor) -> Any:
    """Return another tensor of the same contents, with the graph of autograd."""
    with DisableTorchFunction():
        return torch.ops.aten.alias.default(tensor)


def _takes(kind: Any, tensor: Any) -> bool:
    return isinstance(tensor, VirtualTensor) and user_classes.accepts(user_classes.users_class(kind))


def _as_subclass(original: Callable[..., Any]) -> Callable[..., Any]:
    def as_subclass(self: Any, cls: Any) -> Any:
        # The type of a virtual tensor, which is a plain tensor on a real GPU.
        if isinstance(cls, type) and issubclass(cls, VirtualTensor) and user_classes.users_class(cls) is cls:
            cls = torch.Tensor
        if _takes(cls, self):
            return user_classes.with_class(_alias(self), cls)
        return original(self, user_classes.users_class(cls))

    return as_subclass


def _new(original: Callable[..., Any]) -> Callable[..., Any]:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        kind = user_classes.users_class(cls)
        if kind is torch.Tensor or not user_classes.accepts(kind):
            return original(kind, *args, **kwargs)
        # C++ refuses what the modes return, a plain tensor, for a CPU tensor and for a list of numbers too.
        alone = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        return (args[0] if alone else original(torch.Tensor, *args, **kwargs)).as_subclass(kind)

    return new


def making(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.Tensor._make_subclass`, which leaves the graph of autograd out, for virtual tensors too."""

    def make(kind: type, data: Any, require_grad: bool = False, **kwargs: Any) -> Any:
        if not _takes(kind, data):
            return original(user_classes.users_class(kind), data, require_grad, **kwargs)
        with DisableTorchFunction():
            result = data.detach().requires_grad_(require_grad)
        return user_classes.with_class(result, kind)

    return make
