"""Threads other than the one that turned the virtual GPU on: code there that names `cuda` raises a clear error.

The modes of torch that make `cuda` the virtual GPU belong to one thread, and the recorder attributes memory to the
modules and lines of one thread. `torch.cuda` answers questions in every thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memexplore.torch_internals.cuda import LAZY_INIT
from memexplore.virtual_gpu.patches.device_names import renamed
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import DeviceState
from memexplore.virtual_gpu.tensors.value_loops import NotSimulated

_MOVES = (torch.Tensor.to, torch.Tensor.type)


def patches() -> list[Patch]:
    """Patches that refuse `cuda` in other threads, for the thread that calls this."""
    owner = threading.get_ident()

    def initialise() -> None:
        """Stand in for `torch.cuda._lazy_init`, which C++ calls before it makes a tensor on `cuda`."""
        if threading.get_ident() != owner:
            raise _refusal()

    return [
        Replace(LAZY_INIT.owner, LAZY_INIT.name, initialise),
        Replace(threading.Thread, "start", _starting(threading.Thread.start)),
    ]


def _starting(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(start)
    def start_refusing(thread: threading.Thread) -> None:
        run = thread.run

        def run_refusing() -> None:
            restore_run()
            with _Refusing():
                run()

        replacement = Replace(thread, "run", run_refusing)
        restore_run = replacement.undo()
        replacement.install()
        try:
            start(thread)
        except BaseException:
            # A thread starts once only: `run` is as before if it has started already.
            restore_run()
            raise

    return start_refusing


class _Refusing(TorchFunctionMode):
    """Refuses `cuda` in the arguments of torch functions while a virtual GPU is on.

    A build with CUDA calls `_lazy_init` once in a process only, so a real GPU would be used without this mode.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DeviceState.gpu_name is not None and _names_cuda(func, args, kwargs or {}):
            raise _refusal()
        return func(*args, **(kwargs or {}))


def _names_cuda(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if func is torch.Tensor.cuda:
        return True
    names = [kwargs.get("device"), *(args[1:2] if func in _MOVES else ())]
    return any(
        (isinstance(name, str) and name.startswith("torch.cuda.")) or renamed(name) is not name for name in names
    )


def _refusal() -> NotSimulated:
    return NotSimulated(
        f"the thread {threading.current_thread().name} uses cuda, and the virtual {DeviceState.gpu_name} serves only "
        "the thread that turned it on; use cuda in that thread, or profile on a real GPU"
    )
