"""Code that says `cuda` means the virtual device: one function mode renames devices in arguments.

C++ is told `meta`, which every build of torch has; the dispatch mode then knows it for the virtual device, except where
the user's own words were `meta`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memexplore.torch_internals.cuda import device_constructors, device_module
from memexplore.torch_internals.dispatch import function_mode_stack
from memexplore.virtual_gpu.tensors.tensor import CUDA, META, DeviceState, VirtualTensor

_Tensor = torch.Tensor


def renamed(device: Any) -> Any:
    """What C++ is told for `cuda` in any spelling; anything else as it is.

    Raises RuntimeError for a second GPU: the virtual device is one.
    """
    if isinstance(device, str):
        if not device.startswith("cuda"):
            return device
        device = torch.device(device)
    elif isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        device = torch.device("cuda", device)
    elif not isinstance(device, torch.device) or device.type != "cuda":
        return device
    if device.index not in (None, 0):
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: the code asks for {device}, the virtual GPU is one device, cuda:0"
        )
    return META


def _named(value: Any) -> bool:
    return isinstance(value, str | torch.device)


def _to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    if device is None and len(args) > 1 and (_named(args[1]) or type(args[1]) is int):
        device = args[1]
        args = (args[0], renamed(device), *args[2:])
    elif device is not None:
        kwargs = {**kwargs, "device": renamed(device)}
    else:
        return _Tensor.to(*args, **kwargs)
    if _is_meta(device):
        return _to_meta(args, kwargs)
    if args[0].is_meta and renamed(device) is not device:
        raise NotImplementedError(
            "Cannot copy out of meta tensor; no data! Please use torch.nn.Module.to_empty() instead of "
            "torch.nn.Module.to() when moving module from meta to a different device."
        )
    return _Tensor.to(*args, **kwargs)


def _to_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_virtual(args[0]):
        return _really_meta(_Tensor.to, args, kwargs)
    # C++ takes a virtual tensor for a meta tensor already, and would hand it back.
    dtype = kwargs.get("dtype") or next((value for value in args[1:] if isinstance(value, torch.dtype)), None)
    return _really_meta(torch.empty_like, args[:1], {"device": META, "dtype": dtype})


def _cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    device = rest.pop(0) if rest else kwargs.pop("device", None)
    if rest:
        kwargs["non_blocking"] = rest[0]
    return _to((tensor, CUDA if device is None else device), kwargs)


def _from_data(make: Callable[..., torch.Tensor]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """`torch.tensor` and its like: C++ makes them on the CPU and moves them where no mode sees it, so we move them."""

    def made(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs.pop("pin_memory", None)
        data = args[0] if args else kwargs["data"]
        device = kwargs.get("device")
        if device is None and isinstance(data, torch.Tensor):
            device = data.device
        if device is None:
            device = _default_device()
        told = renamed(device)
        if type(data) is not VirtualTensor and told is device:
            return make(*args, **kwargs)
        gradient = kwargs.pop("requires_grad", False)
        if isinstance(data, torch.Tensor):
            result = data.detach().to(device=told, dtype=kwargs.get("dtype"), copy=make is torch.tensor)
            return result.requires_grad_(gradient) if gradient else result
        return make(*args, **{**kwargs, "device": "cpu"}).to(told).requires_grad_(gradient)

    return made


def _new_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, data = args
    device = kwargs.get("device")
    kwargs = {"dtype": tensor.dtype, **kwargs, "device": tensor.device if device is None else device}
    return _HANDLERS[torch.tensor]((data,), kwargs)


def _new(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.new`, the old way to make a tensor like another: sizes, or data, or an alias (legacy_tensor_new)."""
    tensor, *given = args
    if not is_virtual(tensor) or kwargs:
        return _Tensor.new(*args, **kwargs)
    first = given[0] if len(given) == 1 else None
    if isinstance(first, torch.Tensor):
        return first.detach()
    if isinstance(first, list | tuple) and not isinstance(first, torch.Size):
        return _new_tensor((tensor, first), {})
    return tensor.new_empty(first if isinstance(first, torch.Size) else given or [0])


def _pin_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Pinned memory is host memory outside the device: the copy matters to nobody here.
    return args[0]


def _share_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if is_virtual(args[0]) else _Tensor.share_memory_(args[0])


def _type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 and isinstance(args[1], str) and "cuda" in args[1]:
        dtype = torch.empty(0).type(args[1].replace("torch.cuda.", "torch.")).dtype
        return _Tensor.to(args[0], META, dtype)
    return _Tensor.type(*args, **kwargs)


_HANDLERS: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    _Tensor.to: _to,
    _Tensor.cuda: _cuda,
    _Tensor.new: _new,
    _Tensor.new_tensor: _new_tensor,
    _Tensor.pin_memory: _pin_memory,
    _Tensor.share_memory_: _share_memory,
    _Tensor.type: _type,
    torch.tensor: _from_data(torch.tensor),
    torch.as_tensor: _from_data(torch.as_tensor),
    torch.asarray: _from_data(torch.asarray),
}
_SET_DATA = _Tensor.data.__set__  # type: ignore[attr-defined]


class Renaming(TorchFunctionMode):
    """Renames `cuda` in the arguments of every torch function to the device under the mask."""

    def __init__(self, exchange: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self._exchange = exchange
        self._handlers = {**_HANDLERS, _SET_DATA: self._set_data}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(args, dict(kwargs) if kwargs else {})
        default = device_module.CURRENT_DEVICE
        if default is not None and default.type == "cuda" and func in device_constructors():
            kwargs = {"device": default, **(kwargs or {})}
            if kwargs["device"] is None:
                kwargs["device"] = default
        if not kwargs:
            return func(*args)
        device = kwargs.get("device")
        if device is not None:
            if _is_meta(device):
                return _really_meta(func, args, kwargs)
            told = renamed(device)
            if told is not device:
                kwargs = {**kwargs, "device": told}
                if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
                    return _really_cuda(func, args, kwargs)
        return func(*args, **kwargs)

    def _set_data(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`tensor.data = other`, where one of them is virtual: the object becomes what the other is."""
        tensor, other = args
        if is_virtual(tensor) == is_virtual(other) and tensor.device == other.device:
            _SET_DATA(tensor, other)
        else:
            self._exchange(tensor, other)


def in_backward(renaming: Renaming, run: Callable[..., Any]) -> Callable[..., Any]:
    """The entry of the autograd engine, with the renaming on while it runs.

    A function mode is off inside `Tensor.backward`, since that went through it; so it would be for a checkpoint that
    recomputes its block and for the backward of a `Function`, whose code says `cuda` too.
    """

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if any(mode is renaming for mode in function_mode_stack()):
            return run(*args, **kwargs)
        with renaming:
            return run(*args, **kwargs)

    return run_backward


def _default_device() -> torch.device | None:
    default = device_module.CURRENT_DEVICE
    return default if default is not None and default.type == "cuda" else None


def _is_meta(device: Any) -> bool:
    return device.type == "meta" if isinstance(device, torch.device) else device == "meta"


def _really_cuda(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call on the user's own meta tensors whose words say `cuda`."""
    DeviceState.cuda_calls_on_meta += 1
    try:
        return func(*args, **kwargs)
    finally:
        DeviceState.cuda_calls_on_meta -= 1


def _really_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call whose own words say `meta`: elsewhere that is how C++ calls the virtual device."""
    DeviceState.meta_calls += 1
    try:
        return func(*args, **kwargs)
    finally:
        DeviceState.meta_calls -= 1


def is_virtual(value: Any) -> bool:
    """Whether a value is a tensor of the virtual GPU, or of a module built under it."""
    return type(value) is VirtualTensor
