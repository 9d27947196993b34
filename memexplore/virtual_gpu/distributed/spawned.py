"""`torch.multiprocessing.spawn` and `start_processes`: one process of them runs here, where the virtual GPU is.

A new process would have no virtual GPU. It is the process of this rank (`--rank`), else the first one. In: the
arguments of torch's functions. Out: what `join` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.multiprocessing as multiprocessing

from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors import values
from memexplore.virtual_gpu.tensors.tensor import DeviceState


def patches() -> list[Patch]:
    """Return the patches of both functions."""
    return [Replace(multiprocessing, name, _run) for name in ("spawn", "start_processes")]


class _Ended:
    """The processes of `spawn(join=False)`, which have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *timeouts: Any) -> bool:
        """Return that all processes have ended."""
        return True

    def pids(self) -> list[int]:
        """Return the process ids: none was started."""
        return []


def _run(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *rest: Any, **options: Any
) -> _Ended | None:
    number = DeviceState.cuda.index if DeviceState.cuda.index < nprocs else 0
    if nprocs > 1:
        which = f"number {number}" if number else "the first one"
        values.assume(f"of {nprocs} processes {which} ran, in the process of the virtual GPU")
    fn(number, *args)
    return None if join else _Ended()
