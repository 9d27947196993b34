"""Make the classes of `torch.cuda` for a virtual GPU: generators, device properties, the runtime, tensor types."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from numbers import Integral
from typing import Any, NoReturn

import torch

from memexplore.hardware.catalogue import Gpu
from memexplore.virtual_gpu.kernels.cuda_build import Build
from memexplore.virtual_gpu.patches.device_names import index_of, renamed
from memexplore.virtual_gpu.tensors.tensor import DeviceState
from memexplore.virtual_gpu.values.value_reads import NotSimulated

_L2 = (
    *(("T4", 4), ("P100", 4), ("V100", 6), ("A100", 40), ("A10", 6), ("A40", 6), ("L40", 96), ("L4", 48)),
    *(("H100", 50), ("H200", 50), ("GH200", 50), ("B200", 126), ("RTX 30", 6), ("RTX A", 6), ("RTX 4090", 72)),
    *(("RTX 4080", 64), ("RTX 40", 32), ("RTX 6000", 96), ("RTX 5090", 96), ("RTX PRO", 128), ("RTX 50", 48)),
)
"""MiB of the level-2 cache by the beginning of the catalogue key: architecture whitepapers of NVIDIA."""


class Properties:
    """The result of `torch.cuda.get_device_properties()` for a GPU of the catalogue.

    Sizes by compute capability: table 'Technical Specifications' of the CUDA C++ programming guide.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.name = self.gcnArchName = gpu.name
        self.major, self.minor = gpu.compute_capability
        self.total_memory = gpu.total
        self.multi_processor_count = gpu.multiprocessors
        self.is_integrated = self.is_multi_gpu_board = 0
        self.warp_size = 32
        self.max_threads_per_block = 1024
        self.max_threads_per_multi_processor = Build((2, 13), gpu.compute_capability).resident_threads
        self.shared_memory_per_block = 48 * 1024
        self.shared_memory_per_multiprocessor = _shared_memory(self.major, self.minor) * 1024
        # One KiB of each block is the system's from compute capability 8 on.
        self.shared_memory_per_block_optin = self.shared_memory_per_multiprocessor - 1024 * (self.major >= 8)
        self.regs_per_multiprocessor = 65536
        self.L2_cache_size = next((size for name, size in _L2 if gpu.key.startswith(name)), 4) * 1024**2
        # Kilohertz and bits; the product of clock and width is the bandwidth, with two transfers in each cycle.
        self.clock_rate = 1_500_000
        self.memory_bus_width = 256
        self.memory_clock_rate = int((gpu.bandwidth or 500e9) * 8 / 256 / 2 / 1000)
        self.pci_bus_id = self.pci_device_id = self.pci_domain_id = 0
        self.uuid = uuid.uuid5(uuid.NAMESPACE_OID, gpu.key)

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 1024**2}MB, multi_processor_count={self.multi_processor_count})"
        )


def _shared_memory(major: int, minor: int) -> int:
    """Return the KiB of shared memory of a multiprocessor."""
    if major == 7:
        return 64 if minor == 5 else 96
    if major == 8:
        return {0: 164, 7: 164}.get(minor, 100)
    if major in (9, 10, 11):
        return 228
    return 100 if major >= 12 else 64


class DeviceContext:
    """`with torch.cuda.device(0):`; the one device is always current."""

    def __init__(self, device: Any = None) -> None:
        self.idx = self.prev_idx = index_of(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class Nvtx:
    """NVTX, the profiler's ranges: every function does nothing and returns 0."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


class Cudart:
    """The functions of the CUDA runtime that `torch.cuda.cudart()` has; those without an effect return success."""

    class cudaError(int):  # noqa: N801
        """Error code of a function of the runtime."""

        success = 0

    def __init__(self, free_and_total: Callable[[], tuple[int, int]]) -> None:
        self._free_and_total = free_and_total

    def cudaMemGetInfo(self, device: int = 0) -> tuple[int, int]:  # noqa: N802
        """Return free and total bytes."""
        return self._free_and_total()

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        """Return the text of an error code."""
        return "no error" if code == 0 else "unrecognized error code"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *args: 0


_RealGenerator = torch.Generator


class _CudaGenerator(_RealGenerator):
    """A generator whose device is the GPU; it draws from a CPU generator, since virtual numbers have no values."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DeviceState.cuda


class _GeneratorMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _RealGenerator)


class Generator(metaclass=_GeneratorMeta):
    """`torch.Generator` while a virtual GPU is on."""

    def __new__(cls, device: Any = "cpu") -> Any:  # noqa: D102
        return _RealGenerator(device) if renamed(device) is device else _CudaGenerator()


class _TensorTypeMeta(type):
    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype


def made_by_type(sizes_or_data: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor on the GPU from the arguments of a class such as `torch.cuda.FloatTensor`."""
    first = sizes_or_data[0] if len(sizes_or_data) == 1 else None
    if isinstance(first, torch.Tensor):
        return first.to(DeviceState.cuda, dtype)
    if first is not None and not isinstance(first, Integral | torch.Size):
        # A list, or an array of numpy.
        return torch.tensor(first, dtype=dtype, device="cuda")
    return torch.empty(*(sizes_or_data or (0,)), dtype=dtype, device="cuda")


def tensor_type(name: str, dtype: torch.dtype) -> type:
    """Return a class such as `torch.cuda.FloatTensor`."""

    def make(cls: Any, *sizes_or_data: Any) -> torch.Tensor:
        return made_by_type(sizes_or_data, dtype)

    return _TensorTypeMeta(name, (), {"dtype": dtype, "__new__": make, "__module__": "torch.cuda"})


TENSOR_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}


def refused(feature: str, instead: str = "leave it out") -> type:
    """Return a class of `torch.cuda` whose use raises NotSimulated; `what` names it in the message."""

    def refuse(cls: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSimulated(f"{feature} cannot be simulated on a virtual GPU: {instead}, or profile on a real GPU")

    return type("Refused", (), {"__new__": refuse})
