"""Run the distances between rows as CUDA does, by matrix products and norms.

Source: Distance.cpp below aten/src/ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import OpRunner, argument
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu

_aten = torch.ops.aten

_MOST_ROWS = 25
"""Rows of both operands from which `cdist` uses a matrix product (cdist_impl in Distance.cpp)."""


@rule(Kind.OPS, "Distance.cpp", _aten._euclidean_dist.default)
def euclidean_distance(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """Distances as one matrix product of rows with their norms: _euclidean_dist in Distance.cpp."""
    first, second = args[:2]
    if not is_on_gpu(first, second) or not first.numel() or not second.numel():
        return NotImplemented
    with runner:
        norms, ones = [], []
        for rows in (first, second):
            norms.append(_aten.pow.Tensor_Scalar(rows, 2).sum(-1, True))
            ones.append(torch.ones_like(norms[-1], memory_format=torch.contiguous_format))
        left = torch.cat([first.mul(-2), norms[0], ones[0]], -1)
        right = torch.cat([second, ones[1], norms[1]], -1)
        del norms, ones
        return left.matmul(right.mT).clamp_min_(0).sqrt_()


@rule(Kind.OPS, "Distance.cpp", _aten._cdist_forward.default)
def distances(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_cdist_forward with a matrix product where it pays: cdist_impl in Distance.cpp."""
    first, second, p, mode = args[:4]
    many = max(first.shape[-2], second.shape[-2]) > _MOST_ROWS
    if p != 2 or not (mode == 1 or (mode in (0, None) and many)):
        return NotImplemented
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    with runner:
        operands = [rows.expand((*batch, *rows.shape[-2:])) for rows in (first, second)]
        return euclidean_distance(runner, func, operands, {})


@rule(Kind.OPS, "Distance.cpp", _aten.dist.default)
def distance(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """dist: the norm of the difference (Distance.cpp)."""
    first, second = args[:2]
    if not is_on_gpu(first, second):
        return NotImplemented
    with runner:
        return _aten.norm.Scalar(first - second, argument(args, kwargs, 2, "p", 2))
