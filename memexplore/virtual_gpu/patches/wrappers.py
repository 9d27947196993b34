"""Give wrapper subclasses the device of the tensors inside: nested tensors, quantized tensors as of torchao.

A wrapper holds virtual tensors and has no memory of its own; its device is `meta` to C++, `cuda:0` to Python.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.tensors import MAKE_WRAPPER, raw_device_of
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import CUDA, META

_DISTRIBUTED = "torch.distributed."
"""DTensor and its like have properties of their own (distributed/dtensor.py)."""
_VALUES: dict[str, Any] = {"device": CUDA, "is_cuda": True, "is_cpu": False, "is_meta": False}
_classes: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that have made a wrapper on the virtual GPU."""


def rows() -> list[Replace]:
    """Return the replaced constructor of wrappers."""
    return [Replace(*MAKE_WRAPPER, staticmethod(_making(MAKE_WRAPPER.value)))]


def _making(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(cls: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        named = [*args, *kwargs.values()]
        if not any(map(_is_cuda, named)):
            return original(cls, *args, **kwargs)
        if not cls.__module__.startswith(_DISTRIBUTED):
            _classes.add(cls)
        args = tuple(META if _is_cuda(value) else value for value in args)
        return original(cls, *args, **{name: META if _is_cuda(value) else value for name, value in kwargs.items()})

    return make


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.startswith("cuda")
    )


def is_on_gpu(tensor: Any) -> bool:
    """Return whether a tensor is a wrapper that was made on the virtual GPU."""
    return type(tensor) in _classes and raw_device_of(tensor).type == "meta"


def place(tensor: Any, name: str, read: Callable[[Any], Any]) -> Any:
    """Return a property of the place of a tensor: that of the virtual GPU for wrappers that were made there."""
    return _VALUES[name] if is_on_gpu(tensor) else read(tensor)
