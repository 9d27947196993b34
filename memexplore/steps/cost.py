"""What a run would cost in time: FLOPs and bytes of every op, and how long a GPU needs for them at best."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from memexplore.gpu_catalogue import Gpu
from memexplore.virtual_gpu.dispatch.mode import VirtualMode
from memexplore.virtual_gpu.dispatch.work import Work

LAUNCH = 5e-6
"""Seconds that a kernel takes at least: launched one by one from Python, as eager PyTorch does."""
PCIE = 24e9
"""Bytes per second between GPU and CPU: PCIe 4.0 x16 as measured with pinned memory."""


class Cost(NamedTuple):
    """FLOPs and bytes moved, and kernels launched."""

    works: tuple[Work, ...] = ()

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention (a multiply-add counts as two)."""
        return sum(work.flops for work in self.works)

    def seconds(self, gpu: Gpu) -> float:
        """Seconds on a GPU where each kernel is bound by arithmetic, by memory or by its launch: the roofline model.

        Williams, Waterman and Patterson 2009. Good for ratios between two settings, too short as a time.
        """
        bandwidth = gpu.bandwidth or 500e9
        plain = gpu.flops.fp32 or 1e13
        # Without units for it, bf16 is computed in fp32.
        rates = {torch.float16: gpu.flops.fp16 or plain, torch.bfloat16: gpu.flops.bf16 or plain}
        total = 0.0
        for work in self.works:
            if work.host:
                total += work.bytes / PCIE
            elif work.bytes:
                total += max(work.flops / rates.get(work.dtype, plain), work.bytes / bandwidth, LAUNCH)
        return total


class _Interruptible(list[Work]):
    """A list that asks before it takes anything."""

    def __init__(self, ask: Callable[[], object]) -> None:
        super().__init__()
        self._ask = ask

    def append(self, work: Work) -> None:
        self._ask()
        super().append(work)


_ask: Callable[[], object] | None = None


@contextlib.contextmanager
def interruptible(ask: Callable[[], object]) -> Iterator[None]:
    """Have a function called before every op that is measured in the block; what it raises ends the run."""
    global _ask
    before, _ask = _ask, ask
    try:
        yield
    finally:
        _ask = before


class Meter:
    """Notes the work of every op while it is on."""

    def __init__(self) -> None:
        self.works: list[Work] = [] if _ask is None else _Interruptible(_ask)

    def total(self) -> Cost:
        """The cost so far."""
        return Cost(tuple(self.works))


@contextlib.contextmanager
def measuring(mode: VirtualMode) -> Iterator[Meter]:
    """Note the work of what runs on a virtual GPU in the block."""
    meter = Meter()
    before, mode.work_log = mode.work_log, meter.works
    try:
        yield meter
    finally:
        mode.work_log = before
