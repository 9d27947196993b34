"""Private names of `torch.cuda` and of the default device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

from memexplore.torch_internals.table import (
    NO_VIRTUAL_GPU,
    Attribute,
    look_up,
    look_up_or_none,
    replaceable,
)

# --- torch.cuda -----------------------------------------------------------------------------------------------------

IS_IN_BAD_FORK = replaceable("torch.cuda._is_in_bad_fork", "answered while a virtual GPU is on", NO_VIRTUAL_GPU)
LAZY_INIT = replaceable("torch.cuda._lazy_init", "a build for the CPU refuses", NO_VIRTUAL_GPU)
EXCHANGE_DEVICE = replaceable("torch.cuda._exchange_device", "a build for the CPU has no devices", NO_VIRTUAL_GPU)
MAYBE_EXCHANGE_DEVICE = replaceable(
    "torch.cuda._maybe_exchange_device", "a build for the CPU has no devices", NO_VIRTUAL_GPU
)
CUDART = replaceable("torch.cuda._cudart", "the CUDA runtime; a build for the CPU has none", "`torch.cuda.cudart()`")
_CUDA_FUNCTIONS = (
    "_cuda_getDevice _cuda_getDeviceCount _cuda_setDevice _cuda_exchangeDevice _cuda_maybeExchangeDevice "
    "_cuda_getCurrentRawStream _cuda_getCurrentStream _cuda_getDefaultStream _cuda_isCurrentStreamCapturing "
    "_cuda_synchronize _cuda_emptyCache _cuda_init"
)


def _of_cuda_builds(names: str, why: str, if_missing: str) -> tuple[Attribute, ...]:
    """Return names of `torch._C`, given in one text, that only builds for CUDA have."""
    return tuple(
        replaceable(f"torch._C.{name}", why, if_missing, needed=lambda: torch.version.cuda is not None)
        for name in names.split()
    )


CUDA_FUNCTIONS = _of_cuda_builds(
    _CUDA_FUNCTIONS,
    "other libraries call it; a build for the CPU lacks it",
    "libraries such as bitsandbytes on a virtual GPU",
)
GRAPH_TREE_NAMES = _of_cuda_builds(
    "_cuda_CUDAAllocator_AllocatorState _set_cached_tensors_enabled",
    "the module of CUDA graphs imports it when the compiler is reset; a build for the CPU lacks it",
    "`torch.compiler.reset()` on a virtual GPU",
)
CLEAR_CUBLAS_WORKSPACES = Attribute(torch._C, "_cuda_clearCublasWorkspaces")
CUDA_DEVICE_TYPE = 1
"""c10::DeviceType::CUDA, as a stream's `device_type`."""
SUPPORTED_ACTIVITIES = replaceable(
    "torch.autograd.profiler._supported_activities",
    "a build for the CPU would record CUDA events around each op, and print an error for each",
    "`torch.profiler` with CUDA activity on a virtual GPU",
)
NVTX = replaceable("torch.cuda.nvtx._nvtx", "a build for the CPU has no NVTX", "code with NVTX ranges on a virtual GPU")
_HISTORY = "history of a real GPU; its replacement answers on a virtual one"
RECORD_HISTORY = replaceable("torch.cuda.memory._record_memory_history", _HISTORY, "recording on a real GPU")
SNAPSHOT = replaceable("torch.cuda.memory._snapshot", _HISTORY, "snapshots on a virtual GPU")
DUMP_SNAPSHOT = replaceable("torch.cuda.memory._dump_snapshot", _HISTORY, "recording on a real GPU")
HISTORY_IS_ON = replaceable(
    "torch._C._cuda_isHistoryEnabled",
    "a history that the user records keeps its settings; a build for the CPU lacks it",
    "`watch` on a real GPU ends a history that the user records",
    needed=lambda: torch.version.cuda is not None,
)
ON_INIT = replaceable(
    "torch.cuda._lazy_call",
    "a history begins when the GPU is first used, and initialises no GPU",
    "`%memoom on` has no history of a real GPU",
)


_SETTINGS = "settings of the allocator that a program makes while it runs"
SET_ALLOCATOR_SETTINGS = replaceable("torch._C._accelerator_setAllocatorSettings", _SETTINGS, NO_VIRTUAL_GPU)
GET_ALLOCATOR_SETTINGS = replaceable(
    "torch._C._accelerator_getAllocatorSettings",
    _SETTINGS,
    NO_VIRTUAL_GPU,
    needed=lambda: TorchVersion(torch.__version__) >= "2.13",  # torch 2.11 has only the other one
)


def history_is_on() -> bool:
    """Return whether the allocator of the GPU records its history now."""
    return bool(getattr(*HISTORY_IS_ON, lambda: False)())


clear_cublas_workspaces: Callable[[], None] | None = look_up_or_none(
    "torch._C._cuda_clearCublasWorkspaces",
    "frees cuBLAS workspaces before a run; builds for the CPU lack it",
    "workspaces of earlier runs count in a run on a real GPU",
    needed=lambda: torch.version.cuda is not None,
)

# --- default device -------------------------------------------------------------------------------------------------

device_module: Any = look_up(
    "torch.utils._device",
    "`torch.set_default_device` and `with torch.device(...)`: CURRENT_DEVICE",
    "`torch.set_default_device('cuda')` on a virtual GPU",
    probe=lambda module: hasattr(module, "CURRENT_DEVICE"),
)
device_constructors: Callable[[], set[Any]] = look_up(
    "torch.utils._device._device_constructors",
    "functions that the default device is an argument of",
    "`torch.set_default_device('cuda')` on a virtual GPU",
    probe=lambda constructors: torch.empty in constructors(),
)
global_device_context: Any = look_up(
    "torch._GLOBAL_DEVICE_CONTEXT",
    "the default device that is restored; `torch.get_default_device` does not distinguish CPU from none",
    "the default device is not restored after a virtual GPU",
)
