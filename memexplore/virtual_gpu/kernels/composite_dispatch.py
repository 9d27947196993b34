"""Registration of the composite kernels with torch's dispatcher.

In: the composite entries of table.py. Out: composite ops on virtual tensors run the branch that a CUDA build takes
while a virtual GPU is on. The kernels are registered on AutogradPrivateUse1, a key that only virtual tensors of the
device have; for tensors of another PrivateUse1 backend they call C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.virtual_gpu.kernels import table
from memexplore.virtual_gpu.kernels.composites import decomposed
from memexplore.virtual_gpu.tensors.tensor import DeviceState, VirtualTensor

_registered: list[torch.library.Library] = []
# Composite for backends without a kernel of their own; CUDA has one, and autograd a formula that calls it.
_WITH_CUDA_KERNEL = ("silu_backward", "mish_backward", "_fused_rms_norm")


def _for_virtual_tensors(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if DeviceState.gpu_name is None or not any(_is_virtual(value) for value in args):
            return decomposed(op, *args, **kwargs)
        return kernel(*args, **kwargs)

    return dispatch


def _is_virtual(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_virtual, value))
    return isinstance(value, VirtualTensor) and not value.host


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("an op of the virtual GPU reached a backend that does not exist: please report it as a bug")


def register() -> None:
    """Register the composite kernels with torch, once in a process."""
    if _registered:
        return
    autograd = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    for op, kernel in table.of_kind(table.Kind.COMPOSITE).items():
        autograd.impl(op, _for_virtual_tensors(op, kernel))
    backend = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in _WITH_CUDA_KERNEL:
        # A registered kernel makes autograd use its formula; the dispatch mode answers before the kernel is called.
        backend.impl(name, _unreachable)
    _registered.extend((autograd, backend))
