"""Extrapolation of the largest batch that fits from the tape of one run, or of two runs with different batches.

The answer saves runs of a search; it is an estimate and never shown as a result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memexplore.allocator import Settings, assign_addresses
from memexplore.allocator.actions import SEGMENT_ACTIONS
from memexplore.tape import Action, Category, Phase, Tape

_MAX_UNITS = 1 << 40


def extrapolated_batch(tapes: dict[int, Tape], capacity: int, unit: int = 1) -> int | None:
    """Return the largest multiple of `unit` that fits `capacity` bytes if every request grows linearly with the batch.

    `tapes` holds the tapes of two runs by batch, both with unlimited memory. The requests, extrapolated to a batch, are
    placed by an allocator of that capacity, so fragmentation counts too. None where the two runs do not make the same
    requests but for their sizes, or where memory does not grow.

    >>> from memexplore.run.machine import machine_of
    >>> from memexplore.run.knobs.knobs import Knobs
    >>> from memexplore.run.programs.step import Step
    >>> from memexplore.run.run import run
    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=torch.mean, optimizer=torch.optim.SGD)
    >>> machine = machine_of("T4", release="2.13").unlimited()
    >>> tapes = {size: run(step, Knobs(batch=size), machine).tape for size in (1024, 2048)}
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
    return _largest(one, first, (other.size - one.size) / (second - first), capacity, unit)


def proportional_batch(tape: Tape, batch: int, capacity: int, unit: int = 1) -> int | None:
    """Return the largest multiple of `unit` that fits if only tensors of the batch grow, in proportion to it.

    `tape` is that of one run with `batch` samples and unlimited memory. Weights, gradients, optimizer state, tensors
    with the shape of one of these, and what an update takes keep their sizes. None where memory does not grow.
    """
    one = _requests(tape)
    constant = np.isin(one.category, _CONSTANT)
    shapes = [text.partition("[")[2] for text in one.tensor_texts]
    of_weights = {shapes[number] for number in np.unique(one.tensor[constant & (one.tensor >= 0)])}
    alike = np.array([shape in of_weights for shape in [*shapes, None]], dtype=bool)
    constant |= (one.phase == Phase.OPTIMIZER) | (alike[one.tensor] & (one.tensor >= 0))
    is_alloc = one.action == Action.ALLOC
    grows = _of_blocks(one, is_alloc & ~constant)
    return _largest(one, batch, np.where(grows, one.size / batch, 0.0), capacity, unit)


_CONSTANT = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.OPTIMIZER_STATE,
    Category.GRADIENT,
    Category.WORKSPACE,
    Category.GATHERED_PARAMETER,
    Category.GRADIENT_BUCKET,
)


def _of_blocks(tape: Tape, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the rows of the blocks whose request is chosen: the request itself and the rows that free it."""
    result = chosen.copy()
    alive: dict[int, bool] = {}
    rows = zip(tape.action.tolist(), tape.address.tolist(), chosen.tolist(), strict=True)
    for row, (action, address, is_chosen) in enumerate(rows):
        if action == Action.ALLOC:
            alive[address] = is_chosen
        elif action in _FREES:
            result[row] = alive.get(address, False)
    return result


_FREES = (Action.FREE_REQUESTED, Action.FREE_COMPLETED)


def _largest(tape: Tape, batch: int, bytes_per_sample: NDArray[np.float64], capacity: int, unit: int) -> int | None:
    """Return the largest multiple of `unit` that fits if each size of a tape of `batch` samples grows linearly."""
    tape = tape.without_workspaces()
    settings = Settings.parse(tape.meta.settings)
    meta = tape.meta._replace(capacity=capacity, limit=None, capacity_without_limit=None)

    def fits(units: int) -> bool:
        size = np.rint(tape.size + bytes_per_sample * (units * unit - batch)).astype(np.int64)
        placed = assign_addresses(tape.replace(size=np.maximum(size, 0), meta=meta), settings)
        return not (placed.action == Action.OOM).any()

    # More than fits is allocated from this batch on, wherever the blocks are placed.
    sign = np.select([tape.action == Action.ALLOC, tape.action == Action.FREE_REQUESTED], [1, -1], 0)
    growth = np.cumsum(sign * bytes_per_sample)
    allocated = np.cumsum(sign * tape.size) - batch * growth
    growing = growth > _LEAST_GROWTH
    if not growing.any():
        return None
    high = int(np.floor(((capacity - allocated[growing]) / growth[growing]).min() / unit))
    if high > _MAX_UNITS:
        return None
    low, reach = high, 1
    while low > 0 and not fits(low):
        low, high, reach = max(low - reach, 0), low, reach * 4
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(low, 0) * unit


_LEAST_GROWTH = 1e-3
"""Bytes per sample below which a sum of differences is an error of rounding."""


def _requests(tape: Tape) -> Tape:
    """The tape without its segments."""
    return tape[~np.isin(tape.action, SEGMENT_ACTIONS)]
