"""DTensor on a virtual GPU: the device of its wrappers, shapes of results in a fake mode, the kernel of attention.

The dispatch mode of the virtual GPU leaves an op on a DTensor to DTensor, which calls ops on the local tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from memexplore.torch_internals.dispatch import DisableTorchFunction, disable_current_modes
from memexplore.torch_internals.dtensor import DETECT_FAKE_MODE, PROPAGATE, AsyncCollectiveTensor, DTensor
from memexplore.virtual_gpu.kernels import attention
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import plain_fake_mode

_DEVICE_NAMES = ("device", "is_cuda", "is_cpu", "is_meta")
_INNER = ((DTensor, "_local_tensor"), (AsyncCollectiveTensor, "elem"))
"""Wrappers, and the attribute that holds the tensor inside."""


def patches() -> list[Patch]:
    """Return the patches of DTensor."""
    fake = plain_fake_mode()
    return [
        Replace(PROPAGATE.owner, PROPAGATE.name, _without_modes(PROPAGATE.value)),
        Replace(DETECT_FAKE_MODE.owner, DETECT_FAKE_MODE.name, lambda *inputs: fake),
        Replace(functional, "scaled_dot_product_attention", _attention(functional.scaled_dot_product_attention)),
        *(
            Replace(wrapper, name, property(operator.attrgetter(f"{inner}.{name}")))
            for wrapper, inner in _INNER
            for name in _DEVICE_NAMES
        ),
    ]


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `scaled_dot_product_attention`, for a DTensor with the kernel that a CUDA build chooses.

    C++ chooses by the shapes of the whole tensors, and by a stub that builds without CUDA lack.
    """

    @functools.wraps(original)
    def scaled_dot_product_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        tensors = (query, key, value, attn_mask)
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        if not (isinstance(query, DTensor) and query.is_cuda):
            return original(*tensors, dropout_p, is_causal, **options)
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        with torch.autocast("cuda", enabled=False):
            query, key, value, mask = (_cast(tensor, dtype) for tensor in tensors)
            return attention.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, **options)

    return scaled_dot_product_attention


def _cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    """Return an argument as autocast casts it (None: not on): floating-point tensors that are not double."""
    if dtype is None or tensor is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


def _without_modes(original: Callable[..., Any]) -> Callable[..., Any]:
    def propagate(*args: Any) -> Any:
        with disable_current_modes(), DisableTorchFunction():
            return original(*args)

    return propagate
