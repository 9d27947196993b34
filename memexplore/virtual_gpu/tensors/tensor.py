"""Make virtual tensors: plain tensors of torch that read as CUDA tensors in user code, and have no values.

`wrap` makes one of a meta tensor: an object of the class `torch.Tensor`, as a CUDA tensor is, whose ops C++ sends to
Python. Its `device` is `cuda:0` to Python (methods.py) and `meta` to C++. `live_storages` has the storages with memory
on the device; `DeviceState` is the state that all virtual tensors read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeGuard

import torch

from memexplore.torch_internals.dispatch import FLATTEN, DisableTorchFunction, make_subclass
from memexplore.torch_internals.memory_access import refuse_memory_access, set_storage
from memexplore.torch_internals.tensors import (
    has_python_key,
    raw_is_cpu,
    set_conj,
    set_neg,
    storage_key,
    untyped_storage,
)
from memexplore.virtual_gpu.tensors.live_storages import host_storages, storage_address, watch_without_block
from memexplore.virtual_gpu.user_traceback import hide_own_frames
from memexplore.virtual_gpu.values.value_reads import NotSimulated

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
CUDA = torch.device("cuda", 0)
HOST = torch.device("cpu")
META = torch.device("meta")
BACKEND = torch.device("privateuseone", 0)
"""The backend whose dispatch keys virtual tensors have: PrivateUse1, which need not be registered for that.

To C++ their device is `meta`, so autograd runs their backward in the calling thread and needs no device; to Python it
is `cuda:0`.
"""
_PRIM_DEVICE = torch.ops.prim.device.default


class _Calls(threading.local):
    """The running calls of a thread in which the user's code names a device that C++ names otherwise."""

    meta = 0
    """Number of running calls in which the user's code names the device `meta`."""
    cuda_on_meta = 0
    """Number of running calls in which the user's code names the device `cuda` for meta tensors of its own."""
    with_unknown = 0
    """Number of running calls that compute with an unknown number, so that their results are unknown."""


class DeviceState:
    """State of the virtual GPU that every virtual tensor reads; one per process."""

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
    is_default_type_cuda = False
    """Whether the default tensor type (`torch.set_default_tensor_type`) is a CUDA one."""


def _by_class(function: Callable[[type], bool]) -> Callable[[type], bool]:
    """Keep a function's answers for classes as long as the classes live."""
    answers: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

    def answer(kind: type) -> bool:
        known = answers.get(kind)
        if known is None:
            known = answers[kind] = function(kind)
        return known

    return answer


@_by_class
def inherits_dispatch(kind: type) -> bool:
    """Return whether a class of tensors has no dispatch of its own, so that its instances may be virtual tensors."""
    owner = next((base for base in kind.__mro__ if "__torch_dispatch__" in vars(base)), None)
    return owner is _Tensor and not hasattr(kind, FLATTEN)


def is_virtual(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a virtual tensor: on the virtual GPU, or on the CPU without values.

    It is an object of a class of real tensors, whose ops C++ sends to Python (its dispatch key `Python`).
    """
    kind = type(value)
    if kind is _Tensor or kind is _Parameter:
        return has_python_key(value)  # type: ignore[no-any-return]
    return issubclass(kind, _Tensor) and has_python_key(value) and inherits_dispatch(kind)


def is_on_gpu(*values: Any) -> bool:
    """Return whether all of some values are tensors on the virtual GPU."""
    return all(is_virtual(value) and not is_on_host(value) for value in values)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether a virtual tensor is one on the CPU: its device is `cpu` to C++ too."""
    with DisableTorchFunction():
        # C++ would ask Python about the device of tensors on the CPU. A sparse tensor has no storage.
        known = tensor.layout is torch.strided and storage_key(untyped_storage(tensor)) in host_storages
        return known or raw_is_cpu(tensor)


class _Made(torch.Tensor):
    """The class that virtual tensors are made as, for C++ to give them the key `Python`; `wrap` then replaces it."""

    @staticmethod
    def __torch_dispatch__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return dispatch(func, types, args, kwargs)


def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run an op on virtual tensors where no mode takes it: in a thread without the mode, or while the GPU is off."""
    if func is _PRIM_DEVICE:
        # C++ asks for the device of tensors on the CPU only.
        return HOST
    if any(kind is not _Tensor and hasattr(kind, FLATTEN) for kind in types):
        return NotImplemented
    run = DeviceState.run_without_mode
    if run is not None and threading.get_ident() not in DeviceState.threads:
        try:
            return run(func, types, args, kwargs)
        except torch.OutOfMemoryError as error:
            hide_own_frames(error)
            raise
    # Both read or copy metadata only, and work while no virtual GPU is on.
    if func is torch.ops.aten.detach.default and args[0].layout is torch.strided:
        return wrap(meta_alias(args[0]), is_on_host(args[0]))
    if func is torch.ops.aten.is_same_size.default:
        return args[0].shape == args[1].shape
    if DeviceState.gpu_name is None:
        raise RuntimeError(
            "this tensor was made on a virtual GPU, which is off now, and has no values: turn it on again "
            "(%memgpu NAME, or `with memexplore.virtual(NAME):`) or create the tensor and its model again"
        )
    raise RuntimeError(f"{func} got a tensor of the virtual {DeviceState.gpu_name} while its modes are disabled")


def meta_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of torch in the storage of a virtual one, with its layout."""
    with torch.inference_mode(tensor.is_inference()):
        return plain_alias(tensor, META)


def plain_alias(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of torch in the storage of another, with its layout, on the device that C++ knows for it."""
    result = torch.empty(0, dtype=tensor.dtype, device=device)
    set_storage(result, untyped_storage(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride())
    if tensor.dtype.is_complex and tensor.is_conj():
        set_conj(result, True)
    if tensor.is_neg():
        set_neg(result, True)
    return result


def wrap(elem: torch.Tensor, host: bool) -> torch.Tensor:
    """Return a virtual tensor over a meta tensor, sharing its storage; `host` makes it a CPU tensor."""
    try:
        result = make_subclass(
            _Made, elem, False, dispatch_device=host, device_for_backend_keys=HOST if host else BACKEND
        )
    except RuntimeError:
        if type(elem) is _Tensor:
            raise
        raise NotSimulated(
            "FakeTensorMode and the tracers that use it cannot run on a virtual GPU, whose tensors are fake already: "
            "leave them out, or profile on a real GPU"
        ) from None
    # The layouts of the two classes are equal, and the dispatch key stays.
    result.__class__ = _Tensor
    return result  # type: ignore[no-any-return]


def wrap_new(elem: torch.Tensor, host: bool) -> torch.Tensor:
    """Return a virtual tensor over a meta tensor whose storage is new and gets no block on the GPU."""
    watch_without_block(untyped_storage(elem), host)
    if elem.numel():
        refuse_memory_access(elem)
    return wrap(elem, host)


def fake_cpu_tensor(
    shape: Sequence[int], dtype: torch.dtype | None = None, stride: Sequence[int] | None = None
) -> torch.Tensor:
    """Return a CPU tensor that takes no memory, such as a parameter of a module built while the virtual GPU is on.

    `dtype` defaults to torch's default dtype, `stride` to that of a contiguous tensor.
    """
    dtype = dtype or torch.get_default_dtype()
    if stride is not None:
        return wrap_new(torch.empty_strided(shape, stride, dtype=dtype, device="meta"), host=True)
    return wrap_new(torch.empty(shape, dtype=dtype, device="meta"), host=True)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of a virtual tensor's storage, 0 if it has no memory on the device."""
    return storage_address(untyped_storage(tensor))
