"""Let `torch.profiler` run on a virtual GPU: it times the CPU, and says that it has nothing of the GPU."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch.profiler
from torch.autograd import profiler

from memexplore.torch_internals import memory_access
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.live_storages import storages
from memexplore.virtual_gpu.values import notes

_NO_TIMES = "torch.profiler times the CPU only: a virtual GPU runs no kernels"
_NO_MEMORY = (
    "torch.profiler counts no memory of a virtual GPU, and as memory of the CPU that of memexplore's own work: use "
    "torch.cuda.memory or the tape"
)
_TIMELINE = "export_memory_timeline"


def rows() -> list[Replace]:
    """Return the replaced methods of the profilers."""
    profile: Any = torch.profiler.profile
    return [
        Replace(profiler.profile, "__init__", _without_gpu(profiler.profile.__init__)),
        Replace(memory_access.Reading, "by_profiler", False),
        Replace(*memory_access.PROFILER_START, _reading(True, memory_access.PROFILER_START.value)),
        Replace(profiler.profile, "__exit__", _reading(False, profiler.profile.__exit__)),
        *(
            Replace(profile, name, _of_cpu_only(getattr(profile, name)))
            # Deprecated: a later release may not have it.
            for name in filter(functools.partial(hasattr, profile), [_TIMELINE])
        ),
    ]


def _without_gpu(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``torch.autograd.profiler.profile.__init__`` that leaves the GPU out.

    With ``use_device="cuda"`` C++ would record an event of a real GPU around each op, and print a failure for each.
    """

    def initialize(profile: Any, *args: Any, **options: Any) -> None:
        if options.get("profile_memory"):
            notes.add(_NO_MEMORY)
        if options.get("use_device") == "cuda" or options.get("use_cuda"):
            notes.add(_NO_TIMES)
            options = {name: value for name, value in options.items() if name not in ("use_device", "use_cuda")}
            options["use_cpu"] = True
        original(profile, *args, **options)

    return initialize


def _reading(reads: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the beginning or the end of a profile, between which torch reads addresses to tell tensors apart."""

    @functools.wraps(original)
    def switch(*args: Any) -> Any:
        memory_access.Reading.by_profiler = reads
        memory_access.update_reading(storages())
        return original(*args)

    return switch


def _of_cpu_only(original: Callable[..., None]) -> Callable[..., None]:
    """Return `export_memory_timeline` that writes no file for the GPU, and says so.

    So does torch where matplotlib is not installed.
    """

    @functools.wraps(original)
    def export_memory_timeline(self: Any, path: str, device: Any = None) -> None:
        has_what_torch_needs = self.record_shapes and self.profile_memory and self.with_stack
        if not has_what_torch_needs or (device is not None and not str(device).startswith("cuda")):
            return original(self, path, device)
        sentence = (
            f"{path} was not written: torch.profiler has neither times nor memory of a virtual GPU, which runs no "
            "kernels; `memexplore run` shows its memory over time, and torch.cuda.memory saves snapshots of it"
        )
        notes.add(sentence)
        warnings.warn(sentence, UserWarning, stacklevel=2)
        return None

    return export_memory_timeline
