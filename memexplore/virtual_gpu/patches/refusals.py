"""End functions that a virtual GPU cannot run in one sentence, where torch would end in an error of its own parts.

Each function runs as usual for tensors that are not virtual.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.export
import torch.utils.dlpack

from memexplore.torch_internals.dispatch import pytree
from memexplore.virtual_gpu.dispatch import unsupported
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values.reading import NO_DLPACK
from memexplore.virtual_gpu.values.value_reads import NotSimulated


def rows() -> list[Replace]:
    """Return the replaced functions."""
    return [
        *(
            Replace(owner, name, _of_cpu(getattr(owner, name), name))
            for owner, names in ((torch.nested, _NESTED), (torch, _COMPRESSED))
            for name in names
        ),
        *(
            Replace(owner, "to_dlpack", _of_real(torch.utils.dlpack.to_dlpack, NO_DLPACK))
            for owner in (torch, torch.utils.dlpack)
            if hasattr(owner, "to_dlpack")
        ),
        *(
            Replace(torch.func, name, _of_real(getattr(torch.func, name), _LINEARIZE))
            for name in ("linearize",)
            if hasattr(torch.func, name)
        ),
        *(
            Replace(torch.export, name, _of_real(getattr(torch.export, name), _EXPORT))
            for name in ("export", "draft_export")
            if hasattr(torch.export, name)
        ),
        Replace(torch.UntypedStorage, "cuda", _without_tensor),
    ]


_NESTED = ("nested_tensor", "as_nested_tensor")
_COMPRESSED = tuple(f"sparse_{layout}_tensor" for layout in ("compressed", "csr", "csc", "bsr", "bsc"))
_LINEARIZE = (
    "torch.func.linearize traces the function, which cannot be simulated on a virtual GPU: use torch.func.jvp, or "
    "profile on a real GPU"
)
_EXPORT = (
    "torch.export traces the model, which cannot be simulated on a virtual GPU: leave it out, or profile on a real GPU"
)


def _of_cpu(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that makes tensors of a kind that is not supported on `cuda`; jagged nested tensors are."""

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda" and kwargs.get("layout") is not torch.jagged:
            raise unsupported.not_simulated(f"torch.{name}", "")
        return original(*args, **kwargs)

    return make


def _of_real(original: Callable[..., Any], message: str) -> Callable[..., Any]:
    """Return a function that refuses virtual tensors with a message."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(is_virtual(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)):
            raise NotSimulated(message)
        return original(*args, **kwargs)

    return call


def _without_tensor(*args: Any, **kwargs: Any) -> Any:
    """Refuse a method that would make a storage on the device."""
    raise NotSimulated(
        "a storage without a tensor cannot be simulated on a virtual GPU: make a tensor, or profile on a real GPU"
    )
