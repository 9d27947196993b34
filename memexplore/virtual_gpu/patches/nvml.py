"""Make `pynvml`, the Python binding of the driver's library for management, answer for the virtual GPU.

The package (nvidia-ml-py) keeps its constants and errors where it is installed; where it is not, a module stands in for
it. What a virtual GPU cannot know, such as its temperature, is an unknown number; functions about anything else raise
`NVMLError_NotSupported`, as they do for a GPU without it.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn, Protocol

import torch

from memexplore.hardware.nvidia_smi import State, driver_version
from memexplore.virtual_gpu.patches import install
from memexplore.virtual_gpu.patches.install import Insert, Patch, Replace
from memexplore.virtual_gpu.values import notes, virtual_numbers

NAME = "pynvml"
_ERRORS = {1: "Uninitialized", 2: "InvalidArgument", 3: "NotSupported", 6: "NotFound", 9: "DriverNotLoaded"}
_ERRORS |= {12: "LibraryNotFound", 13: "FunctionNotFound", 999: "Unknown"}
_CONSTANTS = {"NVML_TEMPERATURE_GPU": 0, "NVML_SUCCESS": 0, "NVML_VALUE_NOT_AVAILABLE": -1}
_CONSTANTS |= {f"NVML_CLOCK_{name}": number for number, name in enumerate(("GRAPHICS", "SM", "MEM", "VIDEO"))}
_CONSTANTS |= {f"NVML_ERROR_{name.upper()}": number for number, name in _ERRORS.items()}
_CONSTANTS |= {"NVML_ERROR_NOT_SUPPORTED": 3, "NVML_ERROR_NOT_FOUND": 6}


class Device(Protocol):
    """The part of a virtual GPU that NVML tells of."""

    properties_read: bool

    def state(self) -> State:
        """Return the GPU and its process as `nvidia-smi` shows them."""


def unknown(what: str) -> Any:
    """Return the number that stands for what a sensor of a GPU measures."""
    notes.assume(f"{what} is not known of a virtual GPU: it counts as 1")
    return virtual_numbers.number(torch.int64)


def patches(device: Device) -> tuple[list[Patch], Callable[[], object]]:
    """Return the patches of `pynvml`, and what installs them when the program imports it, where it is installed."""
    imported = sys.modules.get(NAME)
    if imported is not None:
        return [*_rows(imported, device)], lambda: None
    if importlib.util.find_spec(NAME) is None:
        return [Insert(sys.modules, NAME, _stand_in(device))], lambda: None
    return [], lambda: install.add(_rows(sys.modules[NAME], device))


def _rows(module: Any, device: Device) -> list[Replace]:
    functions = _functions(module, device)
    others = [name for name in vars(module) if name.startswith(("nvmlDevice", "nvmlSystem", "nvmlUnit"))]
    refused = dict.fromkeys(others, _not_supported(module))

    def pointer(name: str) -> Callable[..., Any]:
        if name not in functions:
            raise module.NVMLError_FunctionNotFound()
        return functions[name]

    # The function by which the package finds those of the library; gpustat asks it which versions there are.
    found_by = {"_nvmlGetFunctionPointer": pointer}
    return [Replace(module, name, function) for name, function in {**refused, **functions, **found_by}.items()]


def _not_supported(module: Any) -> Callable[..., NoReturn]:
    def function(*args: Any, **kwargs: Any) -> NoReturn:
        raise module.NVMLError_NotSupported()

    return function


def _functions(module: Any, device: Device) -> dict[str, Callable[..., Any]]:
    def state() -> State:
        device.properties_read = True
        return device.state()

    def by_index(index: int) -> int:
        if not 0 <= index < state().count:
            raise module.NVMLError_InvalidArgument()
        return index

    def memory(handle: Any, version: Any = None) -> Any:
        gpu = state()
        return types.SimpleNamespace(total=gpu.total, free=gpu.total - gpu.used, used=gpu.used, reserved=0)

    def processes(handle: Any) -> list[Any]:
        gpu = state()
        own = types.SimpleNamespace(pid=gpu.pid, usedGpuMemory=gpu.used, gpuInstanceId=None, computeInstanceId=None)
        return [own] if gpu.used else []

    def cuda_version() -> int:
        major, minor = map(int, state().cuda.split("."))
        return major * 1000 + minor * 10

    return {
        **dict.fromkeys(("nvmlInit", "nvmlInitWithFlags", "nvmlShutdown"), lambda *flags: None),
        "nvmlDeviceGetCount": lambda: state().count,
        "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: 0,
        "nvmlDeviceGetHandleByPciBusId": lambda bus: 0,
        **dict.fromkeys(("nvmlDeviceGetIndex", "nvmlDeviceGetMinorNumber"), lambda handle: handle),
        "nvmlDeviceGetName": lambda handle: state().name,
        "nvmlDeviceGetUUID": lambda handle: state().uuid_of(handle),
        **dict.fromkeys(("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"), memory),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: state().capability,
        **dict.fromkeys((f"nvmlDeviceGetComputeRunningProcesses{version}" for version in _VERSIONS), processes),
        **dict.fromkeys(
            (f"nvmlDeviceGetGraphicsRunningProcesses{version}" for version in _VERSIONS), lambda handle: []
        ),
        "nvmlSystemGetProcessName": lambda pid: state().process,
        "nvmlSystemGetDriverVersion": lambda: driver_version(state().cuda),
        "nvmlSystemGetNVMLVersion": lambda: f"{state().cuda.partition('.')[0]}.{driver_version(state().cuda)}",
        **dict.fromkeys(("nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2"), cuda_version),
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(
            gpu=unknown("the utilization"), memory=unknown("the utilization")
        ),
        "nvmlDeviceGetTemperature": lambda handle, sensor=0: unknown("the temperature"),
        "nvmlDeviceGetPowerUsage": lambda handle: unknown("the power draw"),
        "nvmlDeviceGetClockInfo": lambda handle, clock=0: unknown("the clock rate"),
        "nvmlDeviceGetFanSpeed": lambda handle: unknown("the speed of the fan"),
    }


_VERSIONS = "", "_v2", "_v3"


def _stand_in(device: Device) -> types.ModuleType:
    """Return a module with the functions of the package that programs call most."""
    module: Any = types.ModuleType(NAME, "The driver's library for management, answering for a virtual GPU.")
    module.__spec__ = ModuleSpec(NAME, None)
    module.NVMLError = _NvmlError
    for number, name in _ERRORS.items():
        setattr(module, f"NVMLError_{name}", type(f"NVMLError_{name}", (_NvmlError,), {"value": number}))
    vars(module).update(_CONSTANTS)
    vars(module).update(_functions(module, device))

    def other(name: str) -> Any:
        if name.startswith("nvml"):
            return _not_supported(module)
        raise AttributeError(f"module {NAME!r} has no attribute {name!r}")

    module.__getattr__ = other
    return module


class _NvmlError(Exception):
    value = 999

    def __str__(self) -> str:
        return type(self).__name__.removeprefix("NVMLError_")
