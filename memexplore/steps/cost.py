"""The cost of a run: FLOPs and bytes of every op, and the least time that a GPU needs for them.

In: the ops of a virtual GPU while `measuring` is on. Out: a `Cost`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from memexplore.gpu_catalogue import Gpu
from memexplore.virtual_gpu.dispatch.mode import VirtualMode
from memexplore.virtual_gpu.dispatch.work import CheckedWorks, Work, seconds_on


class Cost(NamedTuple):
    """The work of every kernel of a run: FLOPs and bytes moved."""

    works: tuple[Work, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention (a multiply-add counts as two)."""
        return sum(work.flops for work in self.works)

    def seconds(self, gpu: Gpu) -> float:
        """Return the seconds on a GPU by the roofline model: good for ratios of two settings, too short as a time."""
        return sum(map(seconds_on(gpu), self.works))


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


class Meter:
    """The work of the ops of a run so far."""

    def __init__(self) -> None:
        self.works: list[Work] = [] if _check is None else CheckedWorks(_check)

    def total(self) -> Cost:
        """Return the cost so far."""
        return Cost(tuple(self.works))


@contextlib.contextmanager
def measuring(mode: VirtualMode) -> Iterator[Meter]:
    """Collect the work of the ops that run on a virtual GPU in the block."""
    meter = Meter()
    before, mode.work_log = mode.work_log, meter.works
    try:
        yield meter
    finally:
        mode.work_log = before
