"""Replace the functions that make a tensor an instance of a user's class: fastai's TensorBase, torchvision's TVTensor.

The C++ of `Tensor.as_subclass`, `Tensor._make_subclass` and the constructor `T(tensor)` calls ops with all modes
disabled; these functions do the same, where the modes see the op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import MAKE_SUBCLASS, DisableTorchFunction
from memexplore.virtual_gpu.patches import cuda_objects
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import DeviceState, inherits_dispatch, is_virtual


def rows() -> list[Replace]:
    """Return the replaced methods."""
    return [
        Replace(torch.Tensor, "as_subclass", _as_subclass(torch.Tensor.as_subclass)),
        Replace(torch.Tensor, "__new__", staticmethod(_new(torch.Tensor.__new__))),
        Replace(*MAKE_SUBCLASS, staticmethod(_make_subclass(MAKE_SUBCLASS.value))),
    ]


def _as_subclass(original: Callable[..., Any]) -> Callable[..., Any]:
    def as_subclass(self: Any, cls: Any) -> Any:
        if not is_virtual(self) or not inherits_dispatch(cls):
            return original(self, cls)
        with DisableTorchFunction():
            result = torch.ops.aten.alias.default(self)  # keeps the graph of autograd
        result.__class__ = cls
        return result

    return as_subclass


def _new(original: Callable[..., Any]) -> Callable[..., Any]:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        alone = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
        if cls is torch.Tensor and DeviceState.is_default_type_cuda and not alone:
            return _of_cuda_type(args, **kwargs)
        if cls is torch.Tensor or not inherits_dispatch(cls):
            return original(cls, *args, **kwargs)
        # C++ refuses what the modes return, a plain tensor, for a CPU tensor and for a list of numbers too.
        return (args[0] if alone else torch.Tensor(*args, **kwargs)).as_subclass(cls)

    return new


def _of_cuda_type(sizes_or_data: tuple[Any, ...], device: Any = None) -> torch.Tensor:
    """Make what `torch.Tensor(...)` makes while the default tensor type is a CUDA one (legacy_tensor_ctor in C++)."""
    if device is not None and torch.device(device).type != "cuda":
        raise RuntimeError(
            f"legacy constructor expects device type: cuda but device type: {torch.device(device).type} was passed"
        )
    return cuda_objects.made_by_type(sizes_or_data, torch.get_default_dtype())


def _make_subclass(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.Tensor._make_subclass`, which leaves the graph of autograd out, for virtual tensors too."""

    def make(kind: type, data: Any, require_grad: bool = False, **kwargs: Any) -> Any:
        if not is_virtual(data) or not inherits_dispatch(kind):
            return original(kind, data, require_grad, **kwargs)
        with DisableTorchFunction():
            result = data.detach().requires_grad_(require_grad)
        result.__class__ = kind
        return result

    return make
