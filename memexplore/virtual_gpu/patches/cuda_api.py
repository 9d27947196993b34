"""`torch.cuda` and `torch.accelerator` of a virtual GPU: the device goes in, functions by name come out.

Memory statistics come from the allocator model. There is one device, its work runs in order and takes no time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from memexplore.allocator import Allocator
from memexplore.gpu_catalogue import Gpu
from memexplore.torch_internals.cuda import EXCHANGE_DEVICE, IS_IN_BAD_FORK, LAZY_INIT, MAYBE_EXCHANGE_DEVICE
from memexplore.virtual_gpu.dispatch import runner
from memexplore.virtual_gpu.patches import cuda_objects
from memexplore.virtual_gpu.patches.cuda_objects import DeviceContext, Properties, VirtualEvent, VirtualStream
from memexplore.virtual_gpu.patches.device_names import renamed
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor

_READ_PROPERTIES = frozenset(
    "get_device_name get_device_properties mem_get_info memory_stats memory_stats_as_nested_dict memory_allocated "
    "max_memory_allocated memory_reserved max_memory_reserved memory_snapshot empty_cache "
    "set_per_process_memory_fraction".split()
)
"""Functions after which code may run differently on another GPU."""


class Device(Protocol):
    """The part of a virtual GPU that `torch.cuda` needs."""

    gpu: Gpu
    allocator: Allocator
    properties_read: bool

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache()`."""


def _pass(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _always(answer: Any) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return answer

    return function


def _of_device(answer: Callable[[], Any]) -> Callable[..., Any]:
    """Return `answer` as a function of a device, which it checks."""

    def function(device: Any = None) -> Any:
        renamed(device)
        return answer()

    return function


def functions(device: Device) -> dict[str, Any]:
    """Return the names of `torch.cuda` that are replaced while `device` is on, and their replacements."""
    gpu, allocator = device.gpu, device.allocator
    properties = Properties(gpu)
    stream = VirtualStream()

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

    def free_and_total() -> tuple[int, int]:
        return gpu.total - gpu.outside - allocator.reserved, gpu.total

    fraction = [1.0]

    def set_fraction(value: float, device: Any = None) -> None:
        renamed(device)
        fraction[0] = value
        allocator.set_memory_fraction(value)

    sync_mode = [0]

    def set_sync_mode(mode: int | str) -> None:
        sync_mode[0] = {"default": 0, "warn": 1, "error": 2}.get(mode, 0) if isinstance(mode, str) else mode

    def state(device: Any = None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    replacements: dict[str, Any] = {
        "is_available": _always(True),
        "is_initialized": _always(True),
        IS_IN_BAD_FORK.name: _always(False),
        LAZY_INIT.name: _pass,
        "init": _pass,
        "device_count": _always(1),
        "current_device": _always(0),
        "set_device": _of_device(_pass),
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
        "synchronize": _of_device(_pass),
        "ipc_collect": _pass,
        "get_sync_debug_mode": lambda: sync_mode[0],
        "set_sync_debug_mode": set_sync_mode,
        "empty_cache": lambda: device.empty_cache(),
        "get_allocator_backend": _always("native"),
        "host_memory_stats": dict,
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
        "mem_get_info": _of_device(free_and_total),
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda device=None: fraction[0],
        "memory_snapshot": lambda *args, **kwargs: allocator.snapshot(),
        "utilization": _always(0),
        "Stream": VirtualStream,
        "Event": VirtualEvent,
        "stream": cuda_objects.on_stream,
        "current_stream": _always(stream),
        "default_stream": _always(stream),
        "set_stream": _pass,
        "is_current_stream_capturing": _always(False),
        "current_blas_handle": _always(0),
        "manual_seed": _pass,
        "manual_seed_all": _pass,
        "seed": _pass,
        "seed_all": _pass,
        "initial_seed": _always(0),
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
        "set_rng_state": _pass,
        "set_rng_state_all": _pass,
        "default_generators": (cuda_objects.Generator("cuda"),),
        **{name: cuda_objects.tensor_type(name, dtype) for name, dtype in cuda_objects.TENSOR_TYPES.items()},
        **dict.fromkeys(("CUDAGraph", "graph", "make_graphed_callables"), cuda_objects.refused("a CUDA graph")),
        **dict.fromkeys(("MemPool", "use_mem_pool", "CUDAPluggableAllocator"), cuda_objects.refused("a memory pool")),
    }
    for name in _READ_PROPERTIES & replacements.keys():
        replacements[name] = _noting(device, replacements[name])
    return replacements


def _noting(device: Device, function: Callable[..., Any]) -> Callable[..., Any]:
    def note_and_call(*args: Any, **kwargs: Any) -> Any:
        device.properties_read = True
        with runner.lock:
            runner.free_waiting()
            return function(*args, **kwargs)

    return note_and_call


def accelerator(functions: dict[str, Any]) -> dict[str, Any]:
    """Return the names of `torch.accelerator` and their replacements, given those of `torch.cuda`."""
    return {
        **{name: functions[name] for name in MEMORY_NAMES},
        "current_accelerator": _always(torch.device("cuda")),
        "is_available": _always(True),
        "device_count": _always(1),
        "current_device_index": _always(0),
        "current_device_idx": _always(0),
        "set_device_index": _pass,
        "set_device_idx": _pass,
        "synchronize": _pass,
        "current_stream": _always(VirtualStream()),
        "set_stream": _pass,
    }


# Names that `torch.cuda.memory` and `torch.cuda.random` share with `torch.cuda`.
MEMORY_NAMES = (
    "empty_cache",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_accumulated_memory_stats",
    "mem_get_info",
    "set_per_process_memory_fraction",
    "get_per_process_memory_fraction",
    "get_allocator_backend",
    "memory_snapshot",
)
RANDOM_NAMES = (
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "initial_seed",
    "get_rng_state",
    "get_rng_state_all",
    "set_rng_state",
    "set_rng_state_all",
)


def record_stream(tensor: Any, stream: Any) -> None:
    """`Tensor.record_stream`: does nothing, because the virtual device runs in order."""
    if not isinstance(tensor, VirtualTensor):
        raise RuntimeError("record_stream needs a CUDA tensor")
