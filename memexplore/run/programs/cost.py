"""The cost of a run: FLOPs and bytes of every op, bytes sent to other GPUs, and the least time that both need."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from memexplore.hardware.catalogue import Gpu
from memexplore.hardware.links import links_of
from memexplore.virtual_gpu.device import VirtualGpu
from memexplore.virtual_gpu.dispatch.work import CheckedWorks, Work, seconds_on
from memexplore.virtual_gpu.kernels.traffic import Traffic
from memexplore.virtual_gpu.tensors.local_device import GPUS_OF_A_NODE


class Cost(NamedTuple):
    """The work of every kernel of a run: FLOPs and bytes moved; and what every collective sends."""

    works: tuple[Work, ...] = ()
    traffic: tuple[Traffic, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention (a multiply-add counts as two)."""
        return sum(work.flops for work in self.works)

    def seconds(self, gpu: Gpu) -> float:
        """Return the seconds on a GPU by the roofline model: good for ratios of two settings, too short as a time."""
        return sum(map(seconds_on(gpu), self.works))

    @property
    def sent(self) -> int:
        """Bytes that this GPU sends to others."""
        return sum(transfer.sent for transfer in self.traffic)

    def link_seconds(self, gpu: Gpu) -> float:
        """Return the seconds of what a GPU sends: through its node, or through the network between nodes.

        >>> from memexplore.hardware.catalogue import find
        >>> Cost((), (Traffic("allreduce_", 450_000_000, (0, 1)),)).link_seconds(find("H100"))  # NVLink, 450 GB/s
        0.001
        """
        links = links_of(gpu.key, gpu.compute_capability)
        return sum(
            transfer.sent / (links.network if _spans_nodes(transfer.ranks) else links.node).bytes_per_second
            for transfer in self.traffic
        )


def _spans_nodes(ranks: tuple[int, ...]) -> bool:
    return len({rank // GPUS_OF_A_NODE for rank in ranks}) > 1


class ProgramEnded(BaseException):
    """Ends a run as if the program had come to its end. A BaseException, so that `except Exception` cannot catch it.

    The check of `interruptible` may raise it.
    """


_check: Callable[[], object] | None = None


@contextlib.contextmanager
def interruptible(check: Callable[[], object]) -> Iterator[None]:
    """Call a function before every op of a measured run in the block; an exception that it raises ends the run."""
    global _check
    before, _check = _check, check
    try:
        yield
    finally:
        _check = before


def is_interruptible() -> bool:
    """Return whether a block of `interruptible` is running."""
    return _check is not None


class Meter:
    """The work of the ops of a run so far."""

    def __init__(self) -> None:
        self.works: list[Work] = [] if _check is None else CheckedWorks(_check)
        self.traffic: list[Traffic] = []

    def total(self) -> Cost:
        """Return the cost so far."""
        return Cost(tuple(self.works), tuple(self.traffic))


@contextlib.contextmanager
def measuring(gpu: VirtualGpu | None) -> Iterator[Meter]:
    """Collect the work of the ops that run on a virtual GPU in the block, and what the collectives send.

    On a real device, which is None, nothing is collected.
    """
    meter = Meter()
    if gpu is None:
        yield meter
        return
    runner = gpu.runner
    before = runner.work_log, runner.traffic_log
    runner.work_log, runner.traffic_log = meter.works, meter.traffic
    try:
        yield meter
    finally:
        runner.work_log, runner.traffic_log = before
