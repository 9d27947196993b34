"""Divide a batch of any form into micro-batches of nearly equal size, each with its share of the samples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from memexplore.run.programs import batches


def samples_of(batch: Any) -> int:
    """Return the length of the first dimension of the first tensor that has one, 0 without such a tensor.

    >>> samples_of({"scale": torch.tensor(2.0), "x": torch.zeros(5, 3)})
    5
    """
    return next((len(tensor) for tensor in batches.tensors(batch) if tensor.dim()), 0)


def parts_of(batch: Any, count: int) -> Iterator[tuple[Any, float]]:
    """Yield a batch in `count` parts, or in one for each sample, and the share of the samples in each.

    >>> [(len(part), share) for part, share in parts_of(torch.zeros(5, 3), 4)]
    [(2, 0.4), (1, 0.2), (1, 0.2), (1, 0.2)]
    """
    samples = samples_of(batch)
    begin, parts = 0, min(count, samples)
    for number in range(parts):
        rows = slice(begin, begin + samples // parts + (number < samples % parts))
        share = (rows.stop - begin) / samples
        begin = rows.stop
        yield batches.mapped(partial(_rows, samples=samples, rows=rows), batch), share


def _rows(value: torch.Tensor, samples: int, rows: slice) -> torch.Tensor:
    return value[rows] if value.dim() and len(value) == samples else value
