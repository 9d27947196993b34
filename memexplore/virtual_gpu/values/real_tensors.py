"""Make real tensors on the CPU by torch's functions as they were before a program could replace them.

DeepSpeed's `zero.Init` replaces `torch.zeros` and the others by functions that put every tensor on the GPU. Inside a
block of `original_functions` torch's own Python code calls the original ones too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

arange = functools.partial(torch.arange, device="cpu")
empty = functools.partial(torch.empty, device="cpu")
full = functools.partial(torch.full, device="cpu")
ones = functools.partial(torch.ones, device="cpu")
tensor = functools.partial(torch.tensor, device="cpu")
zeros = functools.partial(torch.zeros, device="cpu")

_NAMES = (
    "arange empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randn randn_like "
    "scalar_tensor tensor zeros zeros_like"
).split()
_ORIGINAL = {name: getattr(torch, name) for name in _NAMES}


@contextlib.contextmanager
def original_functions() -> Iterator[None]:
    """Undo a program's replacements of torch's functions in the block: torch's fake kernels call some of them."""
    replaced = {
        name: getattr(torch, name) for name, function in _ORIGINAL.items() if getattr(torch, name) is not function
    }
    try:
        for name in replaced:
            setattr(torch, name, _ORIGINAL[name])
        yield
    finally:
        for name, function in replaced.items():
            setattr(torch, name, function)
