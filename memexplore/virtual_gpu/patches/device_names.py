"""Replace `cuda` in the arguments of torch functions by the virtual device: a function mode.

C++ gets `meta`, a device that every build of torch has. The dispatch mode then takes `meta` for the virtual device,
except in calls in which the user's own code says `meta`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memexplore.torch_internals.cuda import device_constructors, device_module
from memexplore.torch_internals.dispatch import (
    DisableTorchFunction,
    OpOverload,
    disable_current_modes,
    function_mode_stack,
)
from memexplore.torch_internals.tensors import without_functorch
from memexplore.virtual_gpu.patches import wrappers
from memexplore.virtual_gpu.patches.contents_elsewhere import SET_DATA
from memexplore.virtual_gpu.tensors import local_device, methods, pinned_memory
from memexplore.virtual_gpu.tensors.tensor import META, DeviceState, fake_cpu_tensor, is_on_gpu, is_virtual
from memexplore.virtual_gpu.user_traceback import hide_own_frames
from memexplore.virtual_gpu.values import real_tensors, virtual_numbers
from memexplore.virtual_gpu.values.value_reads import NotSimulated

_Tensor = torch.Tensor


def renamed(device: Any) -> Any:
    """Return `meta` for `cuda` in any spelling, such as ``0`` or ``"cuda:0"``; return any other value unchanged.

    Raises RuntimeError for the index of a second GPU.
    """
    if isinstance(device, str):
        if not device.startswith("cuda"):
            return device
        device = torch.device(device)
    elif isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        device = torch.device("cuda", device)
    elif not isinstance(device, torch.device) or device.type != "cuda":
        return device
    if device.index is not None:
        local_device.use(device.index)
    return META


def index_of(device: Any) -> int:
    """Return the index that a name of a GPU has: that of the virtual GPU where the name has none.

    Raises RuntimeError for the index of a GPU that the machine does not have.
    """
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    if not isinstance(index, int) or index < 0:
        return DeviceState.cuda.index
    local_device.check(index)
    return index


def _is_device_name(value: Any) -> bool:
    return isinstance(value, str | torch.device)


def _to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    if device is None and len(args) > 1 and (_is_device_name(args[1]) or type(args[1]) is int):
        device = args[1]
        args = (args[0], renamed(device), *args[2:])
    elif device is not None:
        kwargs = {**kwargs, "device": renamed(device)}
    else:
        return _Tensor.to(*args, **kwargs)
    if _is_meta(device):
        return _to_users_meta(args, kwargs)
    if args[0].layout is not torch.strided and not is_virtual(args[0]):
        if args[0].layout is torch.sparse_coo:
            return _sparse_to(args[0], device, args[1:], kwargs)
        if args[0].layout is not torch.jagged and renamed(device) is not device:
            raise NotSimulated(
                f"a tensor of layout {args[0].layout} cannot be simulated on a virtual GPU: use torch.sparse_coo, or "
                "profile on a real GPU"
            )
    if args[0].is_meta and not wrappers.is_on_gpu(args[0]) and renamed(device) is not device:
        raise NotImplementedError(
            "Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() instead of "
            "torch.nn.Module.to() when moving module from meta to a different device."
        )
    return _Tensor.to(*args, **kwargs)


def _sparse_to(source: torch.Tensor, device: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move a real sparse tensor by its indices and values: on the virtual GPU they are not one C++ tensor."""
    dtype = kwargs.get("dtype") or next((value for value in args if isinstance(value, torch.dtype)), source.dtype)
    coalesced = source.detach().coalesce()
    moved = _to((coalesced.indices(), device), {}), _to((coalesced.values(), device, dtype), {})
    result = torch.sparse_coo_tensor(*moved, source.shape, is_coalesced=True, check_invariants=False)
    return result.requires_grad_(source.requires_grad)


def _to_users_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_virtual(args[0]):
        return _on_users_meta(_Tensor.to, args, kwargs)
    # To C++ a virtual tensor is on `meta` already: it would return the tensor itself.
    dtype = kwargs.get("dtype") or next((value for value in args[1:] if isinstance(value, torch.dtype)), None)
    return _on_users_meta(torch.empty_like, args[:1], {"device": META, "dtype": dtype})


def _cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    device = rest.pop(0) if rest else kwargs.pop("device", None)
    if rest:
        kwargs["non_blocking"] = rest[0]
    return _to((tensor, DeviceState.cuda if device is None else device), kwargs)


def _from_data(make: Callable[..., torch.Tensor]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a handler of `torch.tensor` and similar functions, which makes a CPU tensor and moves it.

    C++ does the same, and no mode sees the move.
    """

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.pop("pin_memory", False):
            made = handle(args, {**kwargs})
            return pinned_memory.mark(made) if made.device.type == "cpu" else made
        data = args[0] if args else kwargs["data"]
        device = kwargs.get("device")
        if device is None and (device := _default_device()) is not None:
            if isinstance(data, torch.Tensor) and DeviceState.is_default_type_cuda:
                device = data.device  # which a default device does not leave, but the default type does
            kwargs["device"] = device
        elif device is None and isinstance(data, torch.Tensor):
            device = data.device
        target = renamed(device)
        if virtual_numbers.within(data):
            return _unknown(make(*args, **{**kwargs, "device": "cpu"}), target)
        if not is_virtual(data) and target is device:
            return make(*args, **kwargs)
        gradient = kwargs.pop("requires_grad", False)
        if isinstance(data, torch.Tensor):
            result = data.detach().to(device=target, dtype=kwargs.get("dtype"), copy=make is torch.tensor)
            return result.requires_grad_(gradient) if gradient else result
        return make(*args, **{**kwargs, "device": "cpu"}).to(target).requires_grad_(gradient)

    return handle


@contextlib.contextmanager
def _with_unknown_numbers() -> Iterator[None]:
    DeviceState.calls.with_unknown += 1
    try:
        yield
    finally:
        DeviceState.calls.with_unknown -= 1


def _unknown(like: torch.Tensor, target: Any) -> torch.Tensor:
    """Return a tensor of unknown values like one on the CPU."""
    if target is None or torch.device(target).type == "cpu":
        with disable_current_modes(), DisableTorchFunction():
            result = fake_cpu_tensor(like.shape, like.dtype)
        return result.requires_grad_(like.requires_grad)
    with _with_unknown_numbers():
        return like.detach().to(target).requires_grad_(like.requires_grad)


def _new_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, data = args
    device = kwargs.get("device")
    kwargs = {"dtype": tensor.dtype, **kwargs, "device": tensor.device if device is None else device}
    return _HANDLERS[torch.tensor]((data,), kwargs)


def _new(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.new` with sizes, data, a storage or a tensor, of which it makes an alias (legacy_tensor_new in C++)."""
    tensor, *rest = args
    if len(rest) == 3 and isinstance(rest[0], torch.Tensor):
        # `new` of a sparse tensor, as SparseAdam of torch 2.11 calls it.
        return torch.sparse_coo_tensor(*rest, check_invariants=False)
    if not is_virtual(tensor) or kwargs:
        return _Tensor.new(*args, **kwargs)
    first = rest[0] if len(rest) == 1 else None
    if isinstance(first, torch.Tensor):
        return first.detach()
    if isinstance(first, list | tuple) and not isinstance(first, torch.Size):
        return _new_tensor((tensor, first), {})
    if isinstance(first, torch.TypedStorage):
        # Shared memory, in which a worker of a DataLoader puts a batch together.
        return tensor.new_empty(real_tensors.empty(0, dtype=tensor.dtype).set_(first).numel())
    return tensor.new_empty(first if isinstance(first, torch.Size) else rest or [0])


def _share_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if is_virtual(args[0]) else _Tensor.share_memory_(args[0])


def _type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kind: Any = args[1] if len(args) > 1 else kwargs.get("dtype")
    if getattr(kind, "__module__", None) == "torch.cuda":
        kind = f"torch.cuda.{kind.__name__}"
    if isinstance(kind, str) and "cuda" in kind:
        dtype = real_tensors.empty(0).type(kind.replace("torch.cuda.", "torch.")).dtype
        return _Tensor.to(args[0], META, dtype)
    return _Tensor.type(*args, **kwargs)


def _property_of_wrapped(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a handler of a property, for which a wrapper of `torch.func` has the value of the tensor inside it."""
    descriptor = getattr(_Tensor, name)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inner = without_functorch(args[0])
        if inner is not args[0]:
            return getattr(inner, name)
        return wrappers.place(inner, name, descriptor.__get__)

    return read


def _called(function: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    return lambda args, kwargs: function(*args, **kwargs)


_PLACE = ("device", "is_cuda", "is_cpu", "is_meta")
_HANDLERS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    _Tensor.to: _to,
    _Tensor.cuda: _cuda,
    _Tensor.new: _new,
    _Tensor.new_tensor: _new_tensor,
    _Tensor.share_memory_: _share_memory,
    **dict.fromkeys(methods.keys_of("pin_memory"), _called(pinned_memory.pinned)),
    **dict.fromkeys(methods.keys_of("is_pinned"), _called(pinned_memory.is_pinned)),
    **dict.fromkeys(methods.keys_of("type"), _type),
    **{key: _property_of_wrapped(name) for name in _PLACE for key in methods.keys_of(name)},
    torch.tensor: _from_data(torch.tensor),
    torch.as_tensor: _from_data(torch.as_tensor),
    torch.asarray: _from_data(torch.asarray),
}


class DeviceRenaming(TorchFunctionMode):
    """Function mode that replaces `cuda` in the arguments of every torch function.

    `set_data` is `tensor.data = other` where the device changes, or one of both is an inference tensor; `handlers` are
    further functions to call in place of functions of torch.
    """

    on = True
    """Whether the virtual GPU is on: a thread that outlives its block still has the mode."""

    def __init__(
        self, set_data: Callable[[torch.Tensor, torch.Tensor], None], handlers: dict[Any, Callable[..., Any]]
    ) -> None:
        super().__init__()
        self._other_device = set_data
        self._handlers = {**_HANDLERS, **handlers, SET_DATA: self._set_data}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            if not self.on:
                return func(*args, **(kwargs or {}))
            reads_unknown = (
                virtual_numbers.Read.floats
                and not DeviceState.calls.with_unknown
                and virtual_numbers.among((*args, *kwargs.values()) if kwargs else args)
            )
            if reads_unknown:
                with _with_unknown_numbers():
                    return self.__torch_function__(func, types, args, kwargs)
            handler = self._handlers.get(func)
            if handler is not None:
                return handler(args, dict(kwargs) if kwargs else {})
            default = device_module.CURRENT_DEVICE
            if (
                default is not None
                and default.type == "cuda"
                and func in device_constructors()
                and (not kwargs or kwargs.get("device") is None)
                and _has_default_device()
            ):
                kwargs = {**(kwargs or {}), "device": default}
            if not kwargs:
                return func(*args)
            if kwargs.get("generator") is not None:
                _check_generator(args, kwargs)
            device = kwargs.get("device")
            if device is not None:
                # A dispatch mode of the user passes on what C++ calls `meta`, its name of the virtual device.
                if _is_meta(device) and not isinstance(func, OpOverload):
                    return _on_users_meta(func, args, kwargs)
                target = renamed(device)
                if target is not device:
                    kwargs = {**kwargs, "device": target}
                    if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
                        return _from_users_meta(func, args, kwargs)
            return func(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            hide_own_frames(error)
            raise

    def _set_data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`tensor.data = other`."""
        tensor, other = args
        same_class = is_virtual(tensor) == is_virtual(other) and tensor.device == other.device
        if same_class and (not is_virtual(tensor) or tensor.is_inference() == other.is_inference()):
            SET_DATA(tensor, other)
        else:
            self._other_device(tensor, other)


def in_backward(renaming: DeviceRenaming, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, the entry of the autograd engine, with `renaming` on while it runs.

    torch turns a function mode off inside the functions that the mode handles, such as `Tensor.backward`. A checkpoint
    that recomputes its block and the backward of a `Function` run there, and their code may say `cuda` too.
    """

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if any(mode is renaming for mode in function_mode_stack()):
            return run(*args, **kwargs)
        with renaming:
            return run(*args, **kwargs)

    return run_backward


def _check_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError for a generator of another device than that of the op: check_generator in ATen."""
    device, generator = kwargs.get("device"), kwargs["generator"].device.type
    if device is not None:
        expected = "cuda" if renamed(device) is not device else torch.device(device).type
    else:
        expected = "cuda" if args and is_on_gpu(args[0]) else "cpu"
    if expected != generator and expected != "meta":
        raise RuntimeError(f"Expected a '{expected}' device type for generator but found '{generator}'")


def _default_device() -> torch.device | None:
    default = device_module.CURRENT_DEVICE
    return default if default is not None and default.type == "cuda" and _has_default_device() else None


def _has_default_device() -> bool:
    """Return whether the calling thread has a default device: each thread has its own, CURRENT_DEVICE is the last."""
    return any(type(mode) is device_module.DeviceContext for mode in function_mode_stack())


def _is_meta(device: Any) -> bool:
    return device.type == "meta" if isinstance(device, torch.device) else device == "meta"


def _from_users_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function whose device argument is `cuda` on the user's own meta tensors."""
    calls = DeviceState.calls
    calls.cuda_on_meta += 1
    try:
        return func(*args, **kwargs)
    finally:
        calls.cuda_on_meta -= 1


def _on_users_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function whose device argument is `meta`: elsewhere that is C++'s name of the virtual device."""
    calls = DeviceState.calls
    calls.meta += 1
    try:
        return func(*args, **kwargs)
    finally:
        calls.meta -= 1
