"""Keep what a sparse tensor of the virtual GPU consists of; C++ knows its shape only. kernels/sparse.py has its ops."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from memexplore.virtual_gpu.tensors.tensor import is_virtual

_ATTRIBUTE = "sparse_contents"


class SparseContents:
    """What a sparse tensor consists of."""

    exist = False
    """Whether a sparse tensor was ever made: looking for one among the arguments of every op takes time."""

    def __init__(self, indices: torch.Tensor, values: torch.Tensor, coalesced: bool) -> None:
        self.indices = indices
        """Shape (sparse dimensions, count)."""
        self.values = values
        """Shape (count, ...)."""
        self.coalesced = coalesced


def contents_of(tensor: torch.Tensor) -> SparseContents:
    """Return the contents of a sparse tensor."""
    return vars(tensor)[_ATTRIBUTE]  # type: ignore[no-any-return]


def set_contents(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, coalesced: bool) -> None:
    """Give a sparse tensor its contents, or others."""
    vars(tensor)[_ATTRIBUTE] = SparseContents(indices, values, coalesced)
    SparseContents.exist = True


def is_sparse(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a sparse tensor of the virtual GPU."""
    return is_virtual(value) and value.layout is torch.sparse_coo


def text(tensor: torch.Tensor) -> str:
    """Return the text that a sparse tensor prints as."""
    count = contents_of(tensor).values.shape[0]
    return f"virtual(shape={tuple(tensor.shape)}, nnz={count}, dtype={tensor.dtype}, layout=sparse_coo)"
