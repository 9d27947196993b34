"""Make the functions of `torch.cuda` and `torch.accelerator` for a virtual GPU, by name.

Memory statistics come from the allocator model. There is one device, its work runs in order and takes no time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from memexplore.allocator import Allocator
from memexplore.hardware.catalogue import Gpu
from memexplore.hardware.nvidia_smi import State
from memexplore.torch_internals.cuda import CUDART, EXCHANGE_DEVICE, IS_IN_BAD_FORK, LAZY_INIT, MAYBE_EXCHANGE_DEVICE
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.dispatch import runner
from memexplore.virtual_gpu.kernels.cublas_workspace import Workspaces
from memexplore.virtual_gpu.patches import cuda_objects, nvml, streams
from memexplore.virtual_gpu.patches.cuda_objects import Cudart, DeviceContext, Properties, refused
from memexplore.virtual_gpu.patches.device_names import index_of
from memexplore.virtual_gpu.patches.program_settings import ProgramSettings
from memexplore.virtual_gpu.tensors import local_device
from memexplore.virtual_gpu.tensors.live_storages import live_storages
from memexplore.virtual_gpu.tensors.tensor import DeviceState, is_virtual
from memexplore.virtual_gpu.values.value_reads import NotSimulated

_READ_PROPERTIES = frozenset(
    "get_device_name get_device_properties mem_get_info memory_stats memory_stats_as_nested_dict memory_allocated "
    "max_memory_allocated memory_reserved max_memory_reserved memory_snapshot empty_cache "
    "set_per_process_memory_fraction".split()
)
"""Functions after which code may run differently on another GPU."""


_INITIALIZE = frozenset(
    "init current_device set_device synchronize get_device_name get_device_capability "
    "get_device_properties can_device_access_peer is_bf16_supported mem_get_info set_per_process_memory_fraction "
    "get_per_process_memory_fraction reset_peak_memory_stats reset_accumulated_memory_stats current_stream "
    "default_stream get_rng_state initial_seed ipc_collect current_blas_handle".split()
)
"""Functions that initialise CUDA: with the first of them PyTorch reads the settings of the allocator."""


class Device(Protocol):
    """The part of a virtual GPU that `torch.cuda` needs."""

    gpu: Gpu
    release: str
    allocator: Allocator
    runner: runner.PlanRunner
    workspaces: Workspaces
    properties_read: bool
    generator: torch.Generator
    program_settings: ProgramSettings

    def state(self) -> State:
        """Return the GPU and its process as `nvidia-smi` shows them."""

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`."""


def _pass(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _always(answer: Any) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return answer

    return function


def _current_device() -> int:
    return DeviceState.cuda.index


def _of_device(answer: Callable[[], Any]) -> Callable[..., Any]:
    """Return `answer` as a function of a device, which it checks."""

    def function(device: Any = None) -> Any:
        index_of(device)
        return answer()

    return function


def functions(device: Device) -> dict[str, Any]:
    """Return the names of `torch.cuda` that are replaced while `device` is on, and their replacements."""
    replacements = {
        **_device_functions(device),
        **_statistics(device),
        **_limit_functions(device),
        **_block_functions(device.runner),
        **_random_functions(device.generator),
        **streams.functions(),
        **{name: cuda_objects.tensor_type(name, dtype) for name, dtype in cuda_objects.TENSOR_TYPES.items()},
        **_refused_functions(),
    }
    for name in _READ_PROPERTIES & replacements.keys():
        replacements[name] = _noting(device, replacements[name])
    for name in _INITIALIZE & replacements.keys():
        replacements[name] = _initializing(device.program_settings, replacements[name])
    return replacements


_SENSORS = {
    **dict.fromkeys(("utilization", "memory_usage"), "the utilization"),
    "temperature": "the temperature",
    "power_draw": "the power draw",
    "clock_rate": "the clock rate",
}


def _device_functions(device: Device) -> dict[str, Any]:
    """Functions about the device, its initialization and its libraries."""
    properties = Properties(device.gpu)
    sync_mode = [0]

    def set_sync_mode(mode: int | str) -> None:
        sync_mode[0] = {"default": 0, "warn": 1, "error": 2}.get(mode, 0) if isinstance(mode, str) else mode

    return {
        "is_available": _always(True),
        "is_initialized": _always(True),
        IS_IN_BAD_FORK.name: _always(False),
        LAZY_INIT.name: _pass,
        "init": _pass,
        "device_count": local_device.count,
        "current_device": _current_device,
        "set_device": lambda device: local_device.set_index(index_of(device)),
        "device": DeviceContext,
        "device_of": DeviceContext,
        EXCHANGE_DEVICE.name: _always(0),
        MAYBE_EXCHANGE_DEVICE.name: _always(0),
        "get_device_name": _of_device(_always(properties.name)),
        "get_device_capability": _of_device(_always((properties.major, properties.minor))),
        "get_device_properties": _of_device(_always(properties)),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or properties.major >= 8,
        "get_arch_list": _always([f"sm_{properties.major}{properties.minor}"]),
        "can_device_access_peer": _always(False),
        "synchronize": _of_device(partial(streams.finished, None)),
        "ipc_collect": _pass,
        "get_sync_debug_mode": lambda: sync_mode[0],
        "set_sync_debug_mode": set_sync_mode,
        **{name: _of_device(partial(nvml.unknown, what)) for name, what in _SENSORS.items()},
        "current_blas_handle": _always(0),
        "current_solver_handle": _always(0),
    }


def _statistics(device: Device) -> dict[str, Any]:
    """Functions that tell what the allocator counted, and that reset it."""
    allocator = device.allocator

    def nested() -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in allocator.stats().items():
            *parents, last = name.split(".")
            group = result
            for parent in parents:
                group = group.setdefault(parent, {})
            group[last] = value
        return result

    def stat(name: str) -> Callable[..., int]:
        return _of_device(lambda: allocator.stats().get(name, 0))

    return {
        "get_allocator_backend": _always("native"),
        "host_memory_stats": dict,
        "host_memory_stats_as_nested_dict": dict,
        "reset_peak_host_memory_stats": _pass,
        "reset_accumulated_host_memory_stats": _pass,
        "memory_stats": _of_device(allocator.stats),
        "memory_stats_as_nested_dict": _of_device(nested),
        "memory_allocated": stat("allocated_bytes.all.current"),
        "max_memory_allocated": stat("allocated_bytes.all.peak"),
        "memory_reserved": stat("reserved_bytes.all.current"),
        "max_memory_reserved": stat("reserved_bytes.all.peak"),
        "memory_cached": stat("reserved_bytes.all.current"),
        "max_memory_cached": stat("reserved_bytes.all.peak"),
        "reset_peak_memory_stats": _of_device(allocator.reset_peak_stats),
        "reset_max_memory_allocated": _of_device(allocator.reset_peak_stats),
        "reset_max_memory_cached": _of_device(allocator.reset_peak_stats),
        "reset_accumulated_memory_stats": _of_device(allocator.reset_accumulated_stats),
        "memory_snapshot": lambda *args, **kwargs: allocator.snapshot(),
    }


def _limit_functions(device: Device) -> dict[str, Any]:
    """Functions about the memory of the whole GPU and the part of it that the process may take."""
    gpu, allocator, device_state = device.gpu, device.allocator, device.state
    fraction: list[float] = []
    """What the program has set last."""

    def free_and_total() -> tuple[int, int]:
        return gpu.total - gpu.outside - allocator.reserved, gpu.total

    def set_fraction(value: float, device: Any = None) -> None:
        index_of(device)
        fraction[:] = [value]
        allocator.set_memory_fraction(value)

    def get_fraction(device: Any = None) -> float:
        return fraction[0] if fraction else 1.0 if allocator.limit is None else allocator.limit / gpu.total

    def processes(device: Any = None) -> str:
        index_of(device)
        used = device_state().used
        if not used:
            return "GPU:0\nno processes are running"
        return f"GPU:0\nprocess {os.getpid():>10d} uses {used / 1024**2:>12.3f} MB GPU memory"

    return {
        "mem_get_info": _of_device(free_and_total),
        CUDART.name: Cudart(free_and_total),
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": get_fraction,
        "list_gpu_processes": processes,
        "device_memory_used": _of_device(lambda: gpu.outside + allocator.reserved),
        "empty_cache": lambda: device.empty_cache(),
    }


def _block_functions(plan_runner: runner.PlanRunner) -> dict[str, Any]:
    """Functions that allocate and free blocks without a tensor."""

    def allocate(size: int, device: Any = None, stream: Any = None) -> int:
        index_of(device)
        with runner.lock:
            return plan_runner.allocate(size, "caching_allocator_alloc")

    def delete(address: int) -> None:
        with runner.lock:
            plan_runner.free(address)

    def enable_caching(value: bool = True) -> None:
        if not value:
            raise NotSimulated(
                "a GPU without the caching allocator cannot be simulated on a virtual GPU: leave it enabled, "
                "or profile on a real GPU"
            )

    return {
        "caching_allocator_alloc": allocate,
        "caching_allocator_delete": delete,
        "caching_allocator_enable": enable_caching,
    }


def _random_functions(generator: torch.Generator) -> dict[str, Any]:
    def set_state(state: torch.Tensor, device: Any = None) -> None:
        index_of(device)
        generator.set_state(state)

    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all"), lambda seed: generator.manual_seed(int(seed))),
        **dict.fromkeys(("seed", "seed_all"), lambda: generator.seed()),
        "initial_seed": generator.initial_seed,
        "get_rng_state": _of_device(generator.get_state),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": set_state,
        "set_rng_state_all": lambda states: set_state(states[0]),
        "default_generators": (generator,),
    }


def _refused_functions() -> dict[str, Any]:
    """Functions and classes for which a virtual GPU has no model: each call raises NotSimulated."""
    return {
        **dict.fromkeys((name for name in _GRAPHS if hasattr(torch.cuda, name)), refused("a CUDA graph")),
        **dict.fromkeys(("MemPool", "use_mem_pool"), refused("a memory pool")),
        **dict.fromkeys(("CUDAPluggableAllocator", "change_current_allocator"), refused("another allocator")),
        "GreenContext": refused("a green context"),
        **dict.fromkeys(_STORAGES, refused("a storage without a tensor", "make a tensor")),
    }


_STORAGES = tuple(
    name for name, value in vars(torch.cuda).items() if name.endswith("Storage") and isinstance(value, type)
)
_GRAPHS = ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle", "export_dot", "export_graph_data")


def _noting(device: Device, function: Callable[..., Any]) -> Callable[..., Any]:
    def note_and_call(*args: Any, **kwargs: Any) -> Any:
        device.properties_read = True
        with runner.lock:
            runner.free_waiting()
            return function(*args, **kwargs)

    return note_and_call


def accelerator(functions: dict[str, Any]) -> dict[str, Any]:
    """Return the names of `torch.accelerator` and their replacements, given those of `torch.cuda`."""
    names = (
        "empty_cache memory_stats memory_allocated max_memory_allocated memory_reserved max_memory_reserved "
        "reset_peak_memory_stats reset_accumulated_memory_stats is_available device_count current_stream set_stream "
        "synchronize"
    ).split()
    return {
        **{name: functions[name] for name in names},
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": _current_device,
        "current_device_idx": _current_device,
        "set_device_index": functions["set_device"],
        "set_device_idx": functions["set_device"],
        "device_index": DeviceContext,
        "get_memory_info": functions["mem_get_info"],
        "get_device_capability": _of_device(lambda: {"supported_dtypes": set(_DTYPES)}),
        "empty_host_cache": _pass,
        "Graph": functions["CUDAGraph"],
    }


def _initializing(settings: ProgramSettings, function: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_and_call(*args: Any, **kwargs: Any) -> Any:
        with runner.lock:
            settings.initialize()
        return function(*args, **kwargs)

    return initialize_and_call


_DTYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype) and value.itemsize)
"""What `getDeviceCapability` of c10/cuda lists: every dtype."""


def record_stream(tensor: Any, stream: Any) -> None:
    """`Tensor.record_stream`: the virtual device runs in order, so that a free never waits; recordings note the use."""
    if not is_virtual(tensor):
        raise RuntimeError("record_stream needs a CUDA tensor")
    running = runner.active()
    ref = live_storages.get(storage_key(untyped_storage(tensor)))
    if running is not None and running.observer is not None and ref is not None and ref.address:
        running.observer.used_on(ref.address, stream.cuda_stream)
