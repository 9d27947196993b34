"""`torch.profiler` and `torch.autograd.profiler` on the virtual GPU: they time the CPU, and a note says so.

With ``use_device="cuda"`` C++ would record an event of a real GPU around each op, and print a failure for each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memexplore.virtual_gpu.tensors import values

_NOTE = "torch.profiler times the CPU only: a virtual GPU runs no kernels"


def on_the_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``torch.autograd.profiler.profile.__init__`` that leaves the GPU out."""

    def initialize(profiler: Any, *args: Any, **options: Any) -> None:
        if options.get("use_device") == "cuda" or options.get("use_cuda"):
            values.note(_NOTE)
            options = {name: value for name, value in options.items() if name not in ("use_device", "use_cuda")}
            options["use_cpu"] = True
        original(profiler, *args, **options)

    return initialize
