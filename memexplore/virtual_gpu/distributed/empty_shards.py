"""FSDP2 on layers with fewer rows than ranks: the ranks without a row have one empty shard, not one each.

In: a parameter and the number of ranks. Out: the shards of all ranks, of which FSDP reads its own and the size of the
first. Each further empty tensor would be one more op: with 1 024 ranks most of the time of a small layer.
Source: `_chunk_with_empty` in torch/distributed/fsdp/_fully_shard/_fsdp_common.py.
"""

from __future__ import annotations

import torch

from memexplore.torch_internals.sharded import splitting_of_parameters
from memexplore.virtual_gpu.patches.install import Patch, Replace


def patches() -> list[Patch]:
    """Return the patches, none where FSDP2 is not imported."""
    splitting = splitting_of_parameters()
    return [] if splitting is None else [Replace(splitting.owner, splitting.name, _split)]


def _split(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
    shards = list(torch.chunk(tensor, num_chunks, dim=dim))
    missing = num_chunks - len(shards)
    return shards + [shards[0].new_empty(0)] * missing if missing else shards
