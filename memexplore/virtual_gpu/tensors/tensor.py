"""VirtualTensor: a fake tensor that answers user code as a CUDA tensor would, and has no values."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memexplore.torch_internals.dispatch import FAKE_DEVICE, FakeTensor, FakeTensorMode, fake_device_of, make_subclass
from memexplore.torch_internals.tensors import PARAMETER_MARK, storage_key, untyped_storage
from memexplore.virtual_gpu.tensors import values

CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")
META = torch.device("meta")
BACKEND = torch.device("privateuseone", 0)
"""Whose dispatch keys virtual tensors have: PrivateUse1's, which nobody has to register for that.

To C++ they say they are on `meta`, so autograd runs their backward in the calling thread and needs no device behind
them; to Python they say `cuda:0`.
"""
_PRIM_DEVICE = torch.ops.prim.device.default


class _Mode(FakeTensorMode):
    """The one fake mode of the process: virtual tensors of earlier cells stay usable in later ones."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class DeviceState:
    """State of the virtual GPU that every virtual tensor reads; one per process."""

    fake: _Mode | None = None
    in_fake_kernel = False
    """True while torch's own fake kernels run: they must see the device under the mask."""
    meta_calls = 0
    """How many calls are open in which the user's own code says `meta` and means it."""
    cuda_calls_on_meta = 0
    """How many calls are open in which it says `cuda` of meta tensors of its own."""
    gpu_name: str | None = None
    """Name of the virtual GPU that is on, None while all are off."""


def fake_mode() -> FakeTensorMode:
    """The process-wide fake mode, made at first use."""
    if DeviceState.fake is None:
        DeviceState.fake = _Mode(allow_non_fake_inputs=True)
        DeviceState.fake.cache_enabled = False
        DeviceState.fake.allow_meta = True
    return DeviceState.fake


class VirtualTensor(FakeTensor):
    """A tensor of the virtual GPU, or (`host`) the CPU side of one: parameters of a module that was built under it."""

    host: bool

    @property  # type: ignore[misc]
    def device(self) -> torch.device:  # type: ignore[override, misc]
        if DeviceState.in_fake_kernel:
            return META if self.fake_mode.in_kernel_invocation else fake_device_of(self)
        return HOST if self.host else CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return not self.host

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.host

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return DeviceState.in_fake_kernel

    def get_device(self) -> int:  # type: ignore[override]
        return -1 if self.host else 0

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        if dtype is None:
            name = str(torch.empty(0, dtype=self.dtype).type())
            return name if self.host else name.replace("torch.", "torch.cuda.")
        if isinstance(dtype, str):
            target = torch.empty(0).type(dtype.replace("torch.cuda.", "torch.")).dtype
            return self.to(CUDA if "cuda" in dtype else HOST, target)
        return self.to(dtype)

    def is_pinned(self, *args: Any) -> bool:  # type: ignore[override]
        return False

    def pin_memory(self, *args: Any) -> VirtualTensor:  # type: ignore[override]
        return self

    def data_ptr(self) -> int:
        return address_of(self) + int(self.storage_offset()) * self.element_size()

    # Values: one documented rule, see values.py.

    def item(self) -> Any:  # type: ignore[override]
        return values.item(self)

    def tolist(self) -> Any:
        return values.tolist(self)

    def numpy(self, *, force: bool = False) -> Any:  # type: ignore[override]
        if not self.host and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return values.numpy(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __bool__(self) -> bool:
        return values.truth(self)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.__int__()

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        return format(values.number(torch.float32), spec) if self.dim() == 0 and spec else values.text(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return values.text(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol: "
                "detach the tensor first"
            )
        with torch.no_grad():
            result = self.detach().clone()
        result.requires_grad_(self.requires_grad)
        if getattr(self, PARAMETER_MARK, False):
            setattr(result, PARAMETER_MARK, True)
        memo[id(self)] = result
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        device = "cpu" if self.host else "cuda:0"
        parameter = bool(getattr(self, PARAMETER_MARK, False))
        fields = (tuple(self.shape), self.stride(), self.dtype, device, self.requires_grad, parameter)
        return saved_on_a_virtual_gpu_without_values, fields

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is _PRIM_DEVICE:
            return META if args[0].fake_mode.in_kernel_invocation else fake_device_of(args[0])
        if DeviceState.in_fake_kernel or func in _ALWAYS:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        if DeviceState.gpu_name is None:
            raise RuntimeError(
                "this tensor was made on a virtual GPU, which is off now, and has no values: turn it on again "
                "(%memgpu NAME, or `with memexplore.virtual(NAME):`) or make the tensor and its model anew"
            )
        raise RuntimeError(
            f"{func} got a tensor of the virtual {DeviceState.gpu_name} in a thread without the virtual GPU: "
            "use the tensor in the thread that turned the virtual GPU on"
        )


# Answered while everything is off too: reading a tensor's metadata changes nothing.
_ALWAYS = frozenset({torch.ops.aten.detach.default, torch.ops.aten.is_same_size.default})

_template: dict[str, Any] = {}


def _fields(host: bool) -> dict[str, Any]:
    """The attributes FakeTensor sets one by one in its constructor; copied at once they cost a tenth."""
    fake = fake_mode()
    model = FakeTensor(fake, torch.empty(0, device="meta"), HOST if host else META)
    # Before torch 2.13 the attribute had no underscore.
    return dict(model.__dict__) | {"host": host, FAKE_DEVICE: HOST if host else META}


def wrap(elem: torch.Tensor, host: bool) -> VirtualTensor:
    """Make a virtual tensor over a meta tensor, sharing its storage."""
    key = "host" if host else "gpu"
    fields = _template.get(key)
    if fields is None:
        fields = _template[key] = _fields(host)
    result = make_subclass(
        VirtualTensor, elem, False, dispatch_device=host, device_for_backend_keys=HOST if host else BACKEND
    )
    result.__dict__.update(fields)
    return result  # type: ignore[return-value]


def fake_cpu_tensor(
    shape: Sequence[int], dtype: torch.dtype | None = None, stride: Sequence[int] | None = None
) -> VirtualTensor:
    """Return a CPU tensor that takes no memory, such as a parameter of a module built while the virtual GPU is on.

    `dtype` defaults to torch's default dtype, `stride` to that of a contiguous tensor.
    """
    dtype = dtype or torch.get_default_dtype()
    if stride is not None:
        return wrap(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), host=True)
    return wrap(torch.empty(shape, dtype=dtype, device="meta"), host=True)


map_locations: list[Callable[[Any, str], str]] = []
"""For each running `torch.load`: a function of a storage and the device it was saved on, which returns its device."""


def saved_on_a_virtual_gpu_without_values(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str, gradient: bool, parameter: bool
) -> Any:
    """Unpickle a virtual tensor. Its name is what `torch.load` prints where no virtual GPU is on.

    Raises ValueError where no virtual GPU is on.
    """
    if DeviceState.gpu_name is None:
        raise ValueError(
            f"this file holds a tensor of shape {shape} ({dtype}) that was saved on a virtual GPU and has no values; "
            "it can be loaded on a virtual GPU only"
        )
    target = map_locations[-1](None, device) if map_locations else device
    if target.startswith("cuda"):
        result: Any = torch.empty_strided(shape, stride, dtype=dtype, device="cuda")
    else:
        result = fake_cpu_tensor(shape, dtype, stride)
    return torch.nn.Parameter(result, gradient) if parameter else result.requires_grad_(gradient)


class StorageRef(weakref.ref[Any]):
    """A weak reference to a storage with its place on the device, told when the storage dies."""

    __slots__ = ("address", "key", "origin", "size")
    address: int
    key: int
    """The storage's C++ address, its identity while it lives."""
    size: int
    origin: Any
    """Where it came from, in words, for recordings that begin later."""


live_storages: dict[int, StorageRef] = {}
"""Every storage alive on the virtual GPU, in the order in which they were allocated."""


def address_of(tensor: torch.Tensor) -> int:
    """The address of a virtual tensor's storage, 0 where it has no memory on the device."""
    ref = live_storages.get(storage_key(untyped_storage(tensor)))
    return ref.address if ref is not None else 0
