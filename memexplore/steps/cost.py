"""The cost of a run: FLOPs and bytes of every op, and the least time that a GPU needs for them.

In: the ops of a virtual GPU while `measuring` is on. Out: a `Cost`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from memexplore.gpu_catalogue import Gpu
from memexplore.virtual_gpu.dispatch.mode import VirtualMode
from memexplore.virtual_gpu.dispatch.work import Work

LAUNCH = 5e-6
"""Least seconds of a kernel that is launched from Python, as in eager PyTorch."""
PCIE = 24e9
"""Bytes per second between GPU and CPU: PCIe 4.0 x16, measured with pinned memory."""


class Cost(NamedTuple):
    """The work of every kernel of a run: FLOPs and bytes moved."""

    works: tuple[Work, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention (a multiply-add counts as two)."""
        return sum(work.flops for work in self.works)

    def seconds(self, gpu: Gpu) -> float:
        """Return the seconds on a GPU by the roofline model: arithmetic, memory or the launch bounds each kernel.

        Source: Williams, Waterman and Patterson 2009. Good for ratios between two settings; too short as a time.
        """
        bandwidth = gpu.bandwidth or 500e9
        fp32 = gpu.flops.fp32 or 1e13
        # A GPU without units for bf16 computes it in fp32.
        rates = {torch.float16: gpu.flops.fp16 or fp32, torch.bfloat16: gpu.flops.bf16 or fp32}
        total = 0.0
        for work in self.works:
            if work.host:
                total += work.bytes / PCIE
            elif work.bytes:
                total += max(work.flops / rates.get(work.dtype, fp32), work.bytes / bandwidth, LAUNCH)
        return total


class _CheckedList(list[Work]):
    """A list that calls a function before each append."""

    def __init__(self, check: Callable[[], object]) -> None:
        super().__init__()
        self._check = check

    def append(self, work: Work) -> None:
        self._check()
        super().append(work)


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
        self.works: list[Work] = [] if _check is None else _CheckedList(_check)

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
