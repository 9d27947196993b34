"""The smallest larger GPU of the catalogue for a step that does not fit the given GPU."""

from __future__ import annotations

import itertools
from collections.abc import Generator

from memexplore.hardware import catalogue
from memexplore.hardware.catalogue import Gpu
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.outcome import Outcome
from memexplore.run.search import candidates
from memexplore.run.search.run_log import RunLog


def smallest_larger_gpu(log: RunLog, release: str) -> Generator[list[Knobs], None, tuple[list[Knobs], Outcome | None]]:
    """Run the step on larger GPUs; return the setting of the smallest on which it fits as written, as a list.

    Where the step as written fits none, the setting that trains the same in the least memory is tried there too, unless
    it fits the given GPU; then the second value is the outcome of the step as written on the largest GPU.
    """
    if log.as_written.fits:
        return [], None
    gpus = [gpu for gpu in catalogue.offered(release) if gpu.capacity > log.gpu.capacity]
    fitting = yield from _smallest_fitting(log, Knobs(), gpus)
    if fitting is not None or not gpus:
        return ([] if fitting is None else [fitting]), None
    on_largest = log.outcomes.get(Knobs(gpu=gpus[-1].key))
    same_training = [knobs for knobs in log.points() if not candidates.altered(knobs, log.model)]
    smallest = min(same_training, key=lambda knobs: log.outcomes[knobs].needed)
    fitting = None if log.outcomes[smallest].fits else (yield from _smallest_fitting(log, smallest, gpus))
    return ([] if fitting is None else [fitting]), on_largest


_FEWEST = 4
"""Other kernels need no less than this fraction of the bytes: GPUs with less memory are not tried."""


def _smallest_fitting(log: RunLog, knobs: Knobs, gpus: list[Gpu]) -> Generator[list[Knobs], None, Knobs | None]:
    """Return the setting on the smallest GPU on which it fits; where it fits none, the largest GPU is run too."""
    outcome = log.outcomes[knobs]
    # Weights, gradients and optimizer state are equal on all GPUs, the rest on GPUs that run the same kernels.
    least = max(outcome.constant, outcome.peak_allocated / _FEWEST)
    large_enough = [gpu for gpu in gpus if gpu.capacity > least]
    needed: dict[tuple[int, int], int] = {}
    if "compute_capability" not in log.gpu.estimated:
        needed[log.gpu.compute_capability] = outcome.peak_allocated
    while True:
        possible = [gpu for gpu in large_enough if gpu.capacity >= needed.get(gpu.compute_capability, 0)]
        waiting: list[Gpu] = []
        for gpu in possible:
            on_gpu = log.outcomes.get(knobs.replace(gpu=gpu.key))
            if on_gpu is not None and on_gpu.fits:
                if not waiting:
                    return knobs.replace(gpu=gpu.key)
                break
            if on_gpu is None and knobs.replace(gpu=gpu.key) not in log.errors:
                waiting.append(gpu)
        if not waiting:
            break
        # The smallest, and beside it one with other kernels: what that needs excludes others.
        beside = (gpu for gpu in waiting if gpu.compute_capability != waiting[0].compute_capability)
        yield [knobs.replace(gpu=gpu.key) for gpu in (waiting[0], *itertools.islice(beside, 1))]
        for gpu in waiting:
            if (on_gpu := log.outcomes.get(knobs.replace(gpu=gpu.key))) is not None:
                needed[gpu.compute_capability] = on_gpu.peak_allocated
    yield [knobs.replace(gpu=gpus[-1].key)]
    return None
