"""The smallest larger GPU of the catalogue for a step that does not fit the given GPU."""

from __future__ import annotations

from memexplore import gpu_catalogue
from memexplore.capture import release_or_installed
from memexplore.gpu_catalogue import Gpu
from memexplore.knobs.knobs import Knobs
from memexplore.search import candidates
from memexplore.search.run_log import RunLog
from memexplore.steps.outcome import Outcome


def smallest_larger_gpu(log: RunLog, release: str | None) -> tuple[list[Knobs], Outcome | None]:
    """Run the step on larger GPUs; return the setting of the smallest on which it fits as written, as a list.

    Where the step as written fits none, the setting that trains the same in the least memory is tried there too, unless
    it fits the given GPU; then the second value is the outcome of the step as written on the largest GPU.
    """
    if log.as_written.fits:
        return [], None
    gpus = [gpu_catalogue.find(name).for_release(release_or_installed(release)) for name in gpu_catalogue.gpus().index]
    gpus = [gpu for gpu in gpus if gpu.capacity > log.gpu.capacity]
    fitting = _smallest_fitting(log, Knobs(), gpus)
    if fitting is not None or not gpus:
        return ([] if fitting is None else [fitting]), None
    on_largest = log.outcomes.get(Knobs(gpu=gpus[-1].key))
    same_training = [knobs for knobs in log.points() if not candidates.altered(knobs, log.model)]
    smallest = min(same_training, key=lambda knobs: log.outcomes[knobs].peak_reserved)
    fitting = None if log.outcomes[smallest].fits else _smallest_fitting(log, smallest, gpus)
    return ([] if fitting is None else [fitting]), on_largest


def _smallest_fitting(log: RunLog, knobs: Knobs, gpus: list[Gpu]) -> Knobs | None:
    """Return the setting on the smallest GPU on which it fits; the largest GPU is run in any case."""
    # Weights, gradients and optimizer state are equal on all GPUs, the rest on GPUs that run the same kernels.
    large_enough = [gpu for gpu in gpus if gpu.capacity > log.outcomes[knobs].constant]
    first = {gpu.compute_capability: gpu for gpu in reversed(large_enough)}
    log.run(knobs.replace(gpu=gpu.key) for gpu in [*first.values(), gpus[-1]])
    needed = {
        capability: outcome.peak_allocated
        for capability, gpu in first.items()
        if (outcome := log.outcomes.get(knobs.replace(gpu=gpu.key)))
    }
    for gpu in large_enough:
        if gpu.capacity < needed.get(gpu.compute_capability, 0):
            continue
        setting = knobs.replace(gpu=gpu.key)
        log.run([setting])
        outcome = log.outcomes.get(setting)
        if outcome is not None and outcome.fits:
            return setting
    return None
