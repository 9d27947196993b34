"""Make only the shards of a parameter that FSDP2 reads, its own and the first.

torch makes a tensor for each rank, which takes most of the time of sharding on 1 024 ranks. Source: `_chunk_with_empty`
in torch/distributed/fsdp/_fully_shard/_fsdp_common.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from memexplore.torch_internals.sharded import splitting_of_parameters
from memexplore.virtual_gpu.patches.install import Patch, Replace


def patches() -> list[Patch]:
    """Return the patches, none where FSDP2 is not imported."""
    splitting = splitting_of_parameters()
    return [] if splitting is None else [Replace(splitting.owner, splitting.name, Shards)]


class Shards(Sequence[torch.Tensor]):
    """The shards of a tensor: views of `torch.chunk`, and for ranks that get no row empty tensors.

    >>> shards = Shards(torch.ones(5, 3), 4, dim=0)
    >>> [tuple(shard.shape) for shard in shards]
    [(2, 3), (2, 3), (1, 3), (0,)]
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, num_chunks, dim
        self._rows = -(-tensor.size(dim) // num_chunks)
        """Rows of each shard but the last ones."""

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        at = range(self._number)[index]
        return self._shard(at) if isinstance(at, int) else [self._shard(rank) for rank in at]

    def _shard(self, rank: int) -> torch.Tensor:
        first, rows = rank * self._rows, self._tensor.size(self._dim)
        if first < rows or not rows:
            return self._tensor.narrow(self._dim, first, min(self._rows, rows - first))
        return self._tensor.new_empty(0)
