"""A step that does not fit one GPU on several: the fewest of the given kind, and the cheapest set that can be rented.

In: the log of a search, which has run the step as written. Out: searches (`run_log.Runs`) for settings that fit.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from memexplore.hardware import catalogue
from memexplore.hardware.catalogue import Gpu
from memexplore.hardware.rented import RentedSet
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.strategy import Strategy
from memexplore.run.search import candidates
from memexplore.run.search.estimates import cannot_fit
from memexplore.run.search.run_log import RunLog
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE

_COUNTS = tuple(count for count in (2, 4, 8) if count <= GPUS_OF_A_NODE)
_RECOMPUTED = Knobs(checkpoint="every 1")
_FEWEST_ACTIVATIONS = 4
"""Other kernels need no less than this fraction of the bytes of activations."""


def fewest_gpus(log: RunLog) -> Generator[list[Knobs], None, Knobs | None]:
    """Return the setting with the fewest GPUs of the given kind on which the step fits, sharded; None without one.

    The step as written comes first. Where it fits no node, the setting that trains the same in the least memory is
    tried, then checkpointing of every block, unless these fit one GPU.
    """
    for knobs in _to_shard(log):
        for count in _COUNTS:
            setting = _sharded(knobs, count)
            if _least(log, knobs, count) > log.gpu.capacity:
                continue
            yield [setting]
            if _fits(log, setting):
                return setting
    return None


def cheapest_rented(
    log: RunLog, sets: Sequence[RentedSet], release: str
) -> Generator[list[Knobs], None, tuple[Knobs, RentedSet] | None]:
    """Return the cheapest of the sets on which the step fits, and the setting there; None without one.

    `sets` are in ascending price. On several GPUs the step is sharded. The settings are those of `fewest_gpus`.
    """
    for knobs in _to_shard(log):
        failed: dict[str, int] = {}
        for each in sets:
            gpu = catalogue.find(each.gpu).for_release(release)
            given = gpu.capacity == log.gpu.capacity and gpu.key == log.gpu.key
            of_gpu = knobs if given else knobs.replace(gpu=gpu.key)
            setting = of_gpu if each.gpus == 1 else _sharded(of_gpu, each.gpus)
            kernels = 1 if given else _FEWEST_ACTIVATIONS
            if each.gpus <= failed.get(gpu.key, 0) or _least(log, knobs, each.gpus, kernels) > gpu.capacity:
                continue
            if each.gpus == 1 and _known_need(log, knobs, gpu) > gpu.capacity:
                continue
            yield [setting]
            if _fits(log, setting):
                return setting, each
            failed[gpu.key] = each.gpus
    return None


def _to_shard(log: RunLog) -> Iterable[Knobs]:
    """Yield the settings to run on several GPUs: none where the step fits one."""
    if log.as_written.fits:
        return
    yield Knobs()
    same_training = [knobs for knobs in log.points() if not candidates.altered(knobs, log.model)]
    smallest = min(same_training, key=lambda knobs: log.outcomes[knobs].needed)
    if smallest != Knobs() and not log.outcomes[smallest].fits:
        yield smallest
    # Where it cannot be enough for one GPU, checkpointing was not run alone.
    if _RECOMPUTED not in log.outcomes and cannot_fit(log.points()[Knobs()], _RECOMPUTED, log.gpu.capacity):
        yield _RECOMPUTED


def _sharded(knobs: Knobs, count: int) -> Knobs:
    return knobs.replace(gpus=count, strategy=Strategy.FSDP2)


def _least(log: RunLog, knobs: Knobs, count: int, kernels: int = 1) -> float:
    """Return bytes that each of several GPUs needs at least: its shard, and the activations of its own batch."""
    if knobs not in log.outcomes:
        return log.need(Knobs()).constant / count
    need = log.need(knobs)
    return need.constant / count + need.activations / kernels


_OTHER_SCRATCH = 0.9
"""GPUs of one compute capability run the same kernels; with more multiprocessors some take more scratch memory."""


def _known_need(log: RunLog, knobs: Knobs, gpu: Gpu) -> float:
    """Return bytes that a setting needs at least on a GPU, by its runs on GPUs with the same kernels; 0 if unknown."""
    if "compute_capability" in gpu.estimated:
        return 0
    needed = (
        one.peak_allocated
        for setting, one in log.outcomes.items()
        if setting.gpu is not None
        and setting.replace(gpu=None) == knobs
        and catalogue.find(setting.gpu).compute_capability == gpu.compute_capability
    )
    return max(needed, default=0) * _OTHER_SCRATCH


def _fits(log: RunLog, setting: Knobs) -> bool:
    return setting in log.outcomes and log.outcomes[setting].fits
