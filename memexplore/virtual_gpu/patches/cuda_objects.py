"""Classes of `torch.cuda` on a virtual GPU: streams, events, generators, device properties, tensor types."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from memexplore.virtual_gpu.patches.device_names import renamed
from memexplore.virtual_gpu.tensors.tensor import CUDA
from memexplore.virtual_gpu.tensors.values import NotSimulated


class VirtualStream:
    """A CUDA stream of a device that runs all work in order, so that none is ever pending."""

    cuda_stream = 0
    stream_id = 0
    device = CUDA
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: no work is pending."""

    def wait_event(self, event: Any) -> None:
        """Return at once: no work is pending."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has happened already."""
        return event or VirtualEvent()

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the stream."""
        return False

    def __enter__(self) -> VirtualStream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class VirtualEvent:
    """A CUDA event. The virtual device has no clock: the time between two events is 0 ms."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Return at once: no work is pending."""

    def wait(self, stream: Any = None) -> None:
        """Return at once: no work is pending."""

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds between two events."""
        return 0.0


class Properties:
    """The result of `torch.cuda.get_device_properties()` for a GPU of the catalogue."""

    def __init__(self, gpu: Any) -> None:
        self.name = gpu.name
        self.major, self.minor = gpu.compute_capability
        self.total_memory = gpu.total
        self.multi_processor_count = gpu.multiprocessors
        self.is_integrated = 0
        self.is_multi_gpu_board = 0
        self.warp_size = 32
        self.max_threads_per_multi_processor = 1536 if self.major == 8 and self.minor != 0 else 2048
        self.shared_memory_per_block = 48 * 1024
        self.regs_per_multiprocessor = 65536
        self.gcnArchName = ""
        self.L2_cache_size = 0

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 1024**2}MB, multi_processor_count={self.multi_processor_count})"
        )


@contextlib.contextmanager
def on_stream(stream: Any = None) -> Iterator[None]:
    """`with torch.cuda.stream(stream):`."""
    yield


class DeviceContext:
    """`with torch.cuda.device(0):`; the one device is always current."""

    def __init__(self, device: Any = None) -> None:
        renamed(device)
        self.idx = self.prev_idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class Nvtx:
    """NVTX, the profiler's ranges: every function does nothing and returns 0."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


_RealGenerator = torch.Generator


class _CudaGenerator(_RealGenerator):
    """A generator whose device is the GPU; it draws from a CPU generator, since virtual numbers have no values."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA


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


def tensor_type(name: str, dtype: torch.dtype) -> type:
    """Return a class such as `torch.cuda.FloatTensor`."""

    def make(cls: Any, *sizes_or_data: Any) -> torch.Tensor:
        if len(sizes_or_data) == 1 and isinstance(sizes_or_data[0], list | tuple):
            return torch.tensor(sizes_or_data[0], dtype=dtype, device="cuda")
        return torch.empty(*(sizes_or_data or (0,)), dtype=dtype, device="cuda")

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


def refused(what: str) -> type:
    """Return a class of `torch.cuda` whose use raises NotSimulated; `what` names it in the message."""

    def refuse(cls: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotSimulated(f"{what} cannot be simulated on a virtual GPU: leave it out, or profile on a real GPU")

    return type("Refused", (), {"__new__": refuse})
