"""Where memory will end, from two runs with different batches: a guess that saves runs and is never an answer."""

from __future__ import annotations

import numpy as np

from memexplore.allocator import Settings, assign_addresses
from memexplore.tape import Action, Tape

_SEGMENTS = (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE, Action.SEGMENT_MAP, Action.SEGMENT_UNMAP)
_MOST = 1 << 40


def likely_batch(runs: dict[int, Tape], capacity: int, unit: int = 1) -> int | None:
    """The largest batch that fits if every request grows evenly between two runs, by batch; None where that is unknown.

    The requests are asked of an allocator with that capacity, so what is lost between blocks counts too. The tapes are
    those of runs with memory without end. Both have to make the same requests in all but their sizes.

    >>> import dataclasses
    >>> from memexplore import gpu_catalogue
    >>> from memexplore.knobs.knobs import Knobs
    >>> from memexplore.steps.step import Step
    >>> from memexplore.steps.trial import run
    >>> import torch
    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(64, 1024), loss=torch.mean, optimizer=torch.optim.SGD)
    >>> endless = dataclasses.replace(gpu_catalogue.find("T4"), total=1 << 50)
    >>> tapes = {size: run(step, Knobs(batch=size), gpu=endless, release="2.13").tape for size in (1024, 2048)}
    >>> likely_batch(tapes, 64 << 20)
    1536
    """
    (first, one), (second, other) = sorted(runs.items())
    one, other = _requests(one), _requests(other)
    alike = len(one) == len(other) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in ("action", "op", "module", "phase", "step")
    )
    if not alike or first == second:
        return None
    pace = (other.size - one.size) / (second - first)
    settings = Settings.parse(one.meta.settings)
    meta = one.meta._replace(capacity=capacity, total=capacity)

    def fits(batch: int) -> bool:
        size = np.rint(one.size + pace * (batch - first)).astype(np.int64)
        placed = assign_addresses(one.replace(size=np.maximum(size, 0), meta=meta), settings)
        return not (placed.action == Action.OOM).any()

    low, beyond = 0, max(1, second // unit)
    while fits(beyond * unit):
        low, beyond = beyond, beyond * 2
        if beyond > _MOST:
            return None
    while beyond - low > 1:
        middle = (low + beyond) // 2
        low, beyond = (middle, beyond) if fits(middle * unit) else (low, middle)
    return low * unit


def _requests(tape: Tape) -> Tape:
    rows = np.flatnonzero(~np.isin(tape.action, _SEGMENTS))
    columns = ("time", "action", "address", "size", "stream", "category", "phase", "step", "op", "module", "stack")
    return Tape.from_columns(
        {name: getattr(tape, name)[rows] for name in columns},
        meta=tape.meta,
        ops=tape.ops,
        modules=tape.modules,
        stacks=tape.stacks,
    )
