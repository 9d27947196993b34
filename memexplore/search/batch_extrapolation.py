"""Extrapolation of the largest batch that fits from the tapes of two runs with different batches.

The answer saves runs of a search; it is an estimate and never shown as a result.
"""

from __future__ import annotations

import numpy as np

from memexplore.allocator import Settings, assign_addresses
from memexplore.allocator.actions import SEGMENT_ACTIONS
from memexplore.tape import Action, Tape

_MAX_UNITS = 1 << 40


def extrapolated_batch(tapes: dict[int, Tape], capacity: int, unit: int = 1) -> int | None:
    """Return the largest multiple of `unit` that fits `capacity` bytes if every request grows linearly with the batch.

    `tapes` holds the tapes of two runs by batch, both with unlimited memory. The requests, extrapolated to a batch, are
    placed by an allocator of that capacity, so fragmentation counts too. None where the two runs do not make the same
    requests but for their sizes, or where memory does not grow.

    >>> from memexplore import capture, gpu_catalogue
    >>> from memexplore.knobs.knobs import Knobs
    >>> from memexplore.steps.step import Step
    >>> from memexplore.steps.trial import run
    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=torch.mean, optimizer=torch.optim.SGD)
    >>> gpu = capture.unlimited(gpu_catalogue.find("T4"))
    >>> tapes = {size: run(step, Knobs(batch=size), gpu=gpu, release="2.13").tape for size in (1024, 2048)}
    >>> extrapolated_batch(tapes, 64 << 20)
    1536
    """
    (first, one), (second, other) = sorted(tapes.items())
    one, other = _requests(one), _requests(other)
    alike = len(one) == len(other) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("action", "op", "module", "phase", "step")
    )
    if not alike or first == second:
        return None
    bytes_per_sample = (other.size - one.size) / (second - first)
    settings = Settings.parse(one.meta.settings)
    meta = one.meta._replace(capacity=capacity, total=capacity)

    def fits(batch: int) -> bool:
        size = np.rint(one.size + bytes_per_sample * (batch - first)).astype(np.int64)
        placed = assign_addresses(one.replace(size=np.maximum(size, 0), meta=meta), settings)
        return not (placed.action == Action.OOM).any()

    low, high = 0, max(1, second // unit)
    while fits(high * unit):
        low, high = high, high * 2
        if high > _MAX_UNITS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * unit) else (low, middle)
    return low * unit


def _requests(tape: Tape) -> Tape:
    """The tape without its segments."""
    return tape[~np.isin(tape.action, SEGMENT_ACTIONS)]
