"""Make `VirtualTensor`: a fake tensor that reads as a CUDA tensor in user code, and has no values.

`wrap` makes one of a meta tensor; its `device` is `cuda:0` to Python and `meta` to C++. `live_storages` has the
storages with memory on the device; `DeviceState` is the state that all virtual tensors read.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from memexplore.torch_internals.dispatch import (
    FAKE_DEVICE,
    FLATTEN,
    FakeTensor,
    FakeTensorMode,
    fake_device_of,
    make_subclass,
)
from memexplore.torch_internals.tensors import PARAMETER_MARK, nested_int, storage_key, untyped_storage
from memexplore.virtual_gpu.tensors.live_storages import storage_address, watch_empty
from memexplore.virtual_gpu.user_traceback import hide_own_frames
from memexplore.virtual_gpu.values import known_values, reading, real_tensors
from memexplore.virtual_gpu.values.value_reads import NotSimulated

CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")
META = torch.device("meta")
BACKEND = torch.device("privateuseone", 0)
"""The backend whose dispatch keys virtual tensors have: PrivateUse1, which need not be registered for that.

To C++ their device is `meta`, so autograd runs their backward in the calling thread and needs no device; to Python it
is `cuda:0`.
"""
_PRIM_DEVICE = torch.ops.prim.device.default


class _Mode(FakeTensorMode):
    """The fake mode of the process: one for all, so that virtual tensors of earlier cells work in later ones."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class _Calls(threading.local):
    """The running calls of a thread in which the user's code names a device that C++ names otherwise."""

    meta = 0
    """Number of running calls in which the user's code names the device `meta`."""
    cuda_on_meta = 0
    """Number of running calls in which the user's code names the device `cuda` for meta tensors of its own."""
    with_unknown = 0
    """Number of running calls that compute with an unknown number, so that their results are unknown."""


_nested_numbers = itertools.count(1 << 30)
"""Numbers of tensors of offsets; torch counts those of real ones from 0."""


class DeviceState:
    """State of the virtual GPU that every virtual tensor reads; one per process."""

    fake: _Mode | None = None
    in_fake_kernel = 0
    """Identifier of the thread in which torch's fake kernels run, which must see the meta device; 0 for none."""
    calls = _Calls()
    threads: AbstractSet[int] = frozenset()
    """Identifiers of the threads that have the dispatch mode of the virtual GPU that is on."""
    run_without_mode: Callable[..., Any] | None = None
    """Runs an op in any other thread; None while no virtual GPU is on."""
    cuda: torch.device = CUDA
    """Name of the virtual GPU: of another index in one rank of a distributed run (local_device.py)."""
    ranks = 1
    """Size of the default process group."""
    gpu_name: str | None = None
    """Name of the virtual GPU that is on, None while none is on."""


def in_fake_kernel() -> bool:
    """Return whether torch's fake kernels run in the calling thread."""
    return DeviceState.in_fake_kernel == threading.get_ident()


def fake_mode() -> FakeTensorMode:
    """Return the fake mode of the process, made at first use."""
    if DeviceState.fake is None:
        DeviceState.fake = _Mode(allow_non_fake_inputs=True)
        DeviceState.fake.cache_enabled = False
        DeviceState.fake.allow_meta = True
        # In torch 2.11 and 2.12 the thread that enters a fake mode first owns an object that all later ones use.
        with DeviceState.fake:
            pass
    return DeviceState.fake


def plain_fake_mode() -> FakeTensorMode:
    """Return a new fake mode for code that needs torch's own fake tensors, which looks for no GPU."""
    mode = _Mode()
    # The cache is that of all modes of the process, and keeps the index of the GPU of the first rank for `cuda`.
    mode.cache_enabled = False
    return mode


class VirtualTensor(FakeTensor):
    """A tensor of the virtual GPU; with `host` a CPU tensor without values, as of a module that is built under it."""

    host: bool = False
    nested_int_memo: Any = None
    """Symbol for the lengths that a tensor of offsets on the CPU had, of which this one is a copy."""

    @property  # type: ignore[misc]
    def device(self) -> torch.device:  # type: ignore[override, misc]
        if DeviceState.in_fake_kernel and in_fake_kernel():
            return META if self.fake_mode.in_kernel_invocation else fake_device_of(self)
        return HOST if self.host else DeviceState.cuda

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return not self.host

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.host

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return bool(DeviceState.in_fake_kernel) and in_fake_kernel()

    def get_device(self) -> int:  # type: ignore[override]
        return -1 if self.host else DeviceState.cuda.index

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        if dtype is None:
            name = str(real_tensors.empty(0, dtype=self.dtype).type())
            return name if self.host else name.replace("torch.", "torch.cuda.")
        if hasattr(dtype, "__name__"):
            # A class such as torch.LongTensor or torch.cuda.FloatTensor.
            dtype = f"{dtype.__module__}.{dtype.__name__}"
        if isinstance(dtype, str):
            target = real_tensors.empty(0).type(dtype.replace("torch.cuda.", "torch.")).dtype
            return self.to(DeviceState.cuda if "cuda" in dtype else HOST, target)
        return self.to(dtype)

    def is_pinned(self, *args: Any) -> bool:  # type: ignore[override]
        return False

    def pin_memory(self, *args: Any) -> VirtualTensor:  # type: ignore[override]
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        storage = untyped_storage(self)
        if not self.host and not storage.nbytes():
            watch_empty(storage)
        return storage

    def data_ptr(self) -> int:
        return address_of(self) + int(self.storage_offset()) * self.element_size()

    def get_nested_int(self, *, coeff: Any = 1) -> Any:
        """Return the symbol for the lengths that a tensor of offsets says, for nested tensors."""
        if self.nested_int_memo is not None:
            return self.nested_int_memo * coeff
        number = self.__dict__.setdefault("nested_number", next(_nested_numbers))
        return nested_int(number, coeff)

    # Values: see values.py.

    def item(self) -> Any:  # type: ignore[override]
        return reading.item(self)

    def tolist(self) -> Any:
        return reading.tolist(self)

    def numpy(self, *, force: bool = False) -> Any:  # type: ignore[override]
        if not self.host and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return reading.numpy(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **_: Any) -> Any:
        raise NotSimulated(reading.NO_DLPACK)

    def __bool__(self) -> bool:
        return reading.truth(self)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.__int__()

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        return reading.formatted(self, spec) if self.dim() == 0 else object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return reading.text(self)

    def __copy__(self) -> VirtualTensor:
        return _shallow_copy(self)  # type: ignore[return-value]

    def __deepcopy__(self, memo: dict[int, Any]) -> VirtualTensor:
        if id(self) in memo:
            return memo[id(self)]
        result = memo[id(self)] = _deep_copy(self, memo)
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if DeviceState.gpu_name is None:
            raise RuntimeError(
                "this tensor was made on a virtual GPU, which is off now, and has no values to save or copy: turn it "
                "on again (%memgpu NAME, or `with memexplore.virtual(NAME):`) or create the tensor and its model again"
            )
        device = "cpu" if self.host else "cuda:0"
        parameter = bool(getattr(self, PARAMETER_MARK, False))
        fields = (tuple(self.shape), self.stride(), self.dtype, device, self.requires_grad, parameter)
        known = known_values.of(self) if self.numel() else None
        if known is None:
            return saved_on_a_virtual_gpu_without_values, fields
        return saved_on_a_virtual_gpu_with_values, (known.resolve_conj().resolve_neg(), *fields)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is _PRIM_DEVICE:
            return META if in_fake_kernel() and args[0].fake_mode.in_kernel_invocation else fake_device_of(args[0])
        if any(kind is not cls and hasattr(kind, FLATTEN) for kind in types):
            return NotImplemented
        if in_fake_kernel():
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        run = DeviceState.run_without_mode
        if run is not None and threading.get_ident() not in DeviceState.threads:
            try:
                return run(func, types, args, kwargs)
            except torch.OutOfMemoryError as error:
                hide_own_frames(error)
                raise
        if func in _METADATA_OPS:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        if DeviceState.gpu_name is None:
            raise RuntimeError(
                "this tensor was made on a virtual GPU, which is off now, and has no values: turn it on again "
                "(%memgpu NAME, or `with memexplore.virtual(NAME):`) or create the tensor and its model again"
            )
        raise RuntimeError(f"{func} got a tensor of the virtual {DeviceState.gpu_name} while its modes are disabled")


# They read or copy metadata only, and work while no virtual GPU is on.
_METADATA_OPS = frozenset({torch.ops.aten.detach.default, torch.ops.aten.is_same_size.default})


class HostTensor(VirtualTensor):
    """A CPU tensor without values."""

    host = True


@functools.cache
def fields_of(host: bool) -> dict[str, Any]:
    """Return the attributes that FakeTensor's constructor sets one by one."""
    fake = fake_mode()
    model = FakeTensor(fake, torch.empty(0, device="meta"), HOST if host else META)
    # Before torch 2.13 the attribute had no underscore.
    return dict(model.__dict__) | {"host": host, FAKE_DEVICE: HOST if host else META}


@functools.cache
def _class_of(host: bool) -> type[VirtualTensor]:
    """Return the class of virtual tensors on the CPU or on the GPU.

    The attributes of FakeTensor are those of the class: libraries copy the `__dict__` of a tensor to other tensors.
    """
    kind = HostTensor if host else VirtualTensor
    for name, value in fields_of(host).items():
        setattr(kind, name, value)
    return kind


def wrap(elem: torch.Tensor, host: bool) -> VirtualTensor:
    """Return a virtual tensor over a meta tensor, sharing its storage; `host` makes it a CPU tensor."""
    try:
        return make_subclass(  # type: ignore[no-any-return]
            _class_of(host), elem, False, dispatch_device=host, device_for_backend_keys=HOST if host else BACKEND
        )
    except RuntimeError:
        if type(elem) is torch.Tensor:
            raise
        raise NotSimulated(
            "FakeTensorMode and the tracers that use it cannot run on a virtual GPU, whose tensors are fake already: "
            "leave them out, or profile on a real GPU"
        ) from None


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


saved_values: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
"""For each running `torch.load`: tensors on the device and their values, which are not yet read while it unpickles."""


def saved_on_a_virtual_gpu_with_values(values: torch.Tensor, *fields: Any) -> Any:
    """Unpickle a virtual tensor whose values were known; `fields` as for a tensor without values."""
    *_, device, gradient, parameter = fields
    target = map_locations[-1](None, device) if map_locations else device
    if DeviceState.gpu_name is not None and target.startswith("cuda"):
        result = saved_on_a_virtual_gpu_without_values(*fields)
        if saved_values:
            saved_values[-1].append((result, values))
        else:
            copy_values(result, values)
        return result
    return torch.nn.Parameter(values, gradient) if parameter else values.requires_grad_(gradient)


def copy_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values from the CPU into a tensor on the device."""
    with torch.no_grad():
        tensor.detach().copy_(values)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a virtual tensor's storage, 0 if it has no memory on the device."""
    return storage_address(untyped_storage(tensor))


# --- copies by `copy.copy` and `copy.deepcopy`, with the storages that those of a CUDA tensor have --------------------


def _shallow_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same storage, as `copy.copy` makes one: it pickles everything but the storage."""
    with torch.no_grad():
        return _marked_as(tensor, tensor.detach())


def _deep_copy(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Return a tensor in a copy of the tensor's whole storage: `Tensor.__deepcopy__` in torch/_tensor.py.

    Tensors that share a storage share its copy. Raises RuntimeError for a tensor that has a history.
    """
    if not tensor.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol: "
            "detach the tensor first"
        )
    with torch.no_grad():
        return _marked_as(tensor, tensor.detach().clone() if tensor.is_cpu else _in_copied_storage(tensor, memo))


def _in_copied_storage(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    storage = untyped_storage(tensor)
    count = storage.nbytes() // tensor.element_size()
    copied = memo.setdefault("torch", {})
    contents = copied.get(storage_key(storage))
    if contents is None:
        fills = tensor.is_contiguous() and tensor.numel() == count
        source = tensor.detach() if fills else tensor.detach().as_strided((count,), (1,), 0)
        contents = copied[storage_key(storage)] = source.clone()
        if fills:
            return contents
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    result = tensor.new_empty(0).set_(untyped_storage(contents), *layout)  # type: ignore[call-overload]
    return result.conj_physical() if tensor.is_conj() else result.neg() if tensor.is_neg() else result


def _marked_as(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return a leaf that is a parameter, and needs gradients, if a tensor is and does."""
    result.requires_grad_(tensor.requires_grad)
    if getattr(tensor, PARAMETER_MARK, False):
        setattr(result, PARAMETER_MARK, True)
    return result
