"""Replace names of `torch` itself: devices by number, streams, events, the default tensor type, the version.

They are those of a CUDA build of torch on a machine with one GPU, and so are the functions of torch's C++ module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.tunable

from memexplore.torch_internals.cuda import (
    CLEAR_CUBLAS_WORKSPACES,
    CUDA_DEVICE_TYPE,
    CUDA_FUNCTIONS,
    GRAPH_TREE_NAMES,
    SUPPORTED_ACTIVITIES,
)
from memexplore.virtual_gpu.dispatch import runner
from memexplore.virtual_gpu.patches import cuda_objects, streams
from memexplore.virtual_gpu.patches.cuda_api import Device
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.tensor import DeviceState
from memexplore.virtual_gpu.values.value_reads import NotSimulated

_CUDA_OF_RELEASE = (((2, 15), "13.2"), ((2, 11), "13.0"), ((2, 8), "12.8"), ((2, 7), "12.6"), ((2, 5), "12.4"))
"""The first torch release of those with a CUDA version, as the package index has them."""
_CUDNN = 91900
"""The version of cuDNN in the wheels of torch 2.13."""
_Device = torch.device


def rows(device: Device, functions: dict[str, Any]) -> list[Replace]:
    """Return the replacements in `torch` and its Python modules; `functions` are those of `torch.cuda`."""
    backends = torch.backends
    return [
        Replace(torch, "Stream", streams.of_any_device("Stream", torch.Stream, functions["Stream"])),
        Replace(torch, "Event", streams.of_any_device("Event", torch.Event, functions["Event"])),
        Replace(torch, "set_default_tensor_type", _set_default_tensor_type(torch.set_default_tensor_type)),
        Replace(torch.version, "cuda", cuda_version(device.release)),
        Replace(backends.cuda, "is_built", lambda: True),
        *(
            Replace(backends.cuda, name, _workspace_size(device.workspaces.size))
            for name in ("cublas_workspace_size", "blas_workspace_size")
            if hasattr(backends.cuda, name)
        ),
        *(Replace(torch.cuda.tunable, name, _tunable(name)) for name in torch.cuda.tunable.__all__),
        Replace(
            *SUPPORTED_ACTIVITIES, lambda: {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
        ),
        Replace(backends.cudnn, "is_available", lambda: True),
        Replace(backends.cudnn, "version", lambda: _CUDNN),
        *([] if _numbers_are_cuda() else [Replace(torch, "device", _DeviceByNumber)]),
    ]


def cuda_version(release: str) -> str:
    """Return the version of CUDA that torch has: that of the installed build, or of the build of a release."""
    numbers = tuple(map(int, release.split(".")[:2]))
    return torch.version.cuda or next((version for first, version in _CUDA_OF_RELEASE if numbers >= first), "12.1")


def _workspace_size(size: int) -> Callable[..., int]:
    """Return `torch.backends.cuda.cublas_workspace_size`."""

    def workspace_size(new: int | None = None) -> int:
        if new is not None:
            raise NotSimulated(
                "a new size of the cuBLAS workspace cannot be simulated on a virtual GPU: set "
                "CUBLAS_WORKSPACE_CONFIG before it is turned on"
            )
        return size

    return workspace_size


def _tunable(name: str) -> Any:
    """Return a function of `torch.cuda.tunable`: nothing is tuned."""
    if name.endswith("is_enabled"):
        return lambda: False
    return cuda_objects.refused("a tunable operator")


def _numbers_are_cuda() -> bool:
    """Return whether `torch.device(0)` is a CUDA device, as it is in builds with CUDA only."""
    try:
        return torch.device(0).type == "cuda"
    except RuntimeError:
        return False


class _DeviceType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Device)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Device)


class _DeviceByNumber(metaclass=_DeviceType):
    """`torch.device`, for which a number is a CUDA device."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is int:
            return _Device("cuda", args[0])
        return _Device(*args, **kwargs)


_DeviceByNumber.__name__ = _DeviceByNumber.__qualname__ = "device"
_DeviceByNumber.__module__ = "torch"


def _set_default_tensor_type(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `torch.set_default_tensor_type`, for which a CUDA type sets the default device."""

    def set_default_tensor_type(kind: Any) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        if not name.startswith("torch.cuda."):
            torch.set_default_device(None)
            DeviceState.is_default_type_cuda = False
            return original(kind)
        dtype = cuda_objects.TENSOR_TYPES.get(name.removeprefix("torch.cuda."))
        if dtype is None or not dtype.is_floating_point:
            raise TypeError(f"only floating-point types are supported as the default type, not {name}")
        torch.set_default_dtype(dtype)
        torch.set_default_device("cuda")
        DeviceState.is_default_type_cuda = True
        return None

    return set_default_tensor_type


def rows_of_c(run: runner.PlanRunner, functions: dict[str, Any]) -> list[Replace]:
    """Return the replacements in torch's C++ module that other libraries call: bitsandbytes, triton, DeepSpeed.

    Builds of torch for the CPU lack these functions. `functions` are those of `torch.cuda`.
    """

    def stream(index: int = 0) -> tuple[int, int, int]:
        return functions["current_stream"]().stream_id, 0, CUDA_DEVICE_TYPE

    def clear_workspaces() -> None:
        with runner.lock:
            run.free_workspaces()

    replacements: dict[str, Callable[..., Any]] = {
        "getDevice": lambda: 0,
        "getDeviceCount": lambda: 1,
        "setDevice": lambda index: None,
        "exchangeDevice": lambda index: 0,
        "maybeExchangeDevice": lambda index: 0,
        "getCurrentRawStream": lambda index=0: functions["current_stream"]().cuda_stream,
        "getCurrentStream": stream,
        "getDefaultStream": lambda index=0: (0, 0, CUDA_DEVICE_TYPE),
        "isCurrentStreamCapturing": lambda: False,
        "synchronize": lambda: None,
        "emptyCache": functions["empty_cache"],
        "init": lambda: None,
    }
    return [
        Replace(*CLEAR_CUBLAS_WORKSPACES, clear_workspaces),
        *(Replace(*function, replacements[function.name.rpartition("_")[2]]) for function in CUDA_FUNCTIONS),
        # A name that is there stays: the module that imports it keeps it after the block.
        *(Replace(*name, _none) for name in GRAPH_TREE_NAMES if not hasattr(*name)),
    ]


def _none(*args: Any) -> None:
    """Stand for a function of CUDA graphs, which never run on a virtual GPU."""
