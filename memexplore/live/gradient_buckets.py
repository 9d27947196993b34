"""Allocate tensors of the size of the gradient buckets of DistributedDataParallel.

DDP holds a copy of all gradients, in buckets that are reduced together, from its first step on. With
`gradient_as_bucket_view` the gradients are views of the buckets. Sources: torch/nn/parallel/distributed.py and
`compute_bucket_assignment_by_size` of torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

_FIRST = 1 << 20
"""Bytes after which the first bucket is full where the size of buckets is the default one."""


class Buckets(NamedTuple):
    """How DDP divides the gradients of a model."""

    limits: tuple[int, ...]
    """Bytes after which a bucket is full: of the first buckets one after the other, then the last for all others."""
    holds_gradients: bool
    """Whether the gradients are views of the buckets."""


def buckets_of(model: nn.Module) -> Buckets | None:
    """Return how the gradients of a model are divided, None for a model that DDP does not wrap."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return None
    # Releases of torch have different attributes.
    size = getattr(model, "bucket_bytes_cap", 25 << 20)
    listed = tuple(getattr(model, "bucket_bytes_cap_list", ()))
    first = (_FIRST,) if getattr(model, "bucket_bytes_cap_default", True) else ()
    return Buckets(listed or (*first, size), model.gradient_as_bucket_view)


class BucketTensors:
    """The buckets of one model, on its device, as tensors without values of their own."""

    def __init__(self, model: nn.Module, buckets: Buckets) -> None:
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._tensors = []
        for parameters in divided(model, buckets.limits):
            count = sum(parameter.numel() for parameter in parameters)
            bucket = torch.empty(count, dtype=parameters[0].dtype, device=parameters[0].device)
            self._tensors.append(bucket)
            if buckets.holds_gradients:
                parts = bucket.split([parameter.numel() for parameter in parameters])
                pairs = zip(parameters, parts, strict=True)
                self._gradients += [(parameter, part.view_as(parameter)) for parameter, part in pairs]

    def place_gradients(self) -> None:
        """Let gradients that are views of the buckets be there before backward, which adds to them."""
        for parameter, gradient in self._gradients:
            if parameter.grad is None:
                parameter.grad = gradient


def divided(model: nn.Module, limits: tuple[int, ...]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters of each bucket, in the order in which backward reaches them.

    >>> model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))  # 64 bytes each
    >>> [len(parameters) for parameters in divided(model, (64, 128))]
    [1, 2, 2]
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for parameters in kinds.values():
        remaining = itertools.chain(limits, itertools.repeat(limits[-1]))
        bucket: list[nn.Parameter] = []
        limit, size = next(remaining), 0
        for parameter in reversed(parameters):
            bucket.append(parameter)
            size += parameter.numel() * parameter.element_size()
            if size >= limit:
                yield bucket
                bucket, limit, size = [], next(remaining), 0
        if bucket:
            yield bucket
