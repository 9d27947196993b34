"""Keep the contents of a tensor that `tensor.data = other` moves to another device, and may move back before backward.

In C++ `set_data` keeps the tensor, so the node that adds to its gradient finds it on whichever device it is (FSDP1 with
`CPUOffload`: on the GPU in forward and backward, on the CPU between). The contents of a virtual tensor are of another
C++ class on another device, so there are two, and each keeps its node and its gradient; a tensor that comes back gets
its contents of before. Source: VariableHooks::set_data in torch/csrc/autograd/variable.cpp.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from memexplore.torch_internals.dispatch import disable_current_modes
from memexplore.virtual_gpu.tensors.tensor import is_virtual, wrap
from memexplore.virtual_gpu.values import real_tensors

SET_DATA: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GRADIENT: Any = torch.Tensor.grad


def _nothing() -> None:
    return None


@functools.cache
def _empty(dtype: torch.dtype, host: bool) -> torch.Tensor:
    with disable_current_modes(), torch.inference_mode(False):
        return wrap(real_tensors.empty(0, dtype=dtype, device="meta"), host)


def _without_memory(tensor: torch.Tensor) -> None:
    # Of another dtype: torch then forgets the node that adds to the gradient, as it does when the device changes. A
    # graph that has the node keeps it.
    SET_DATA(tensor, _empty(torch.float16 if tensor.dtype != torch.float16 else torch.float32, tensor.is_cpu))


class ContentsElsewhere:
    """For each tensor that changed its device: the tensor object that has its contents of before, without memory."""

    def __init__(self) -> None:
        self._before = WeakIdKeyDictionary()
        self._read: tuple[Callable[[], Any], Callable[[], Any]] = (_nothing, _nothing)
        """The tensor whose gradient was read last, and the gradient."""

    def keep(self, tensor: torch.Tensor, before: torch.Tensor) -> None:
        """Keep the contents that `tensor` had on its device of before, without their memory."""
        self._before.pop(tensor, None)
        if not before.requires_grad:
            self.move_gradient(tensor)
            return
        if not is_virtual(before):
            # The user's own, which is restored when the virtual GPU is turned off.
            return
        before.__dict__.clear()
        _without_memory(before)
        self._before[tensor] = before

    def back(self, tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor | None:
        """Return the contents that `tensor` had on the device of `data`, with that data; None if it had none."""
        before = self._before.get(tensor)
        if before is None or is_virtual(before) != is_virtual(data) or before.is_cpu != data.is_cpu:
            return None
        SET_DATA(before, data)
        before.__class__ = type(tensor)
        return before.requires_grad_(tensor.requires_grad)  # type: ignore[no-any-return]

    def move_gradient(self, gradient: torch.Tensor) -> None:
        """Give a gradient that changed its device (`tensor.grad.data = other`) to the contents on that device."""
        tensor, read = (reference() for reference in self._read)
        if read is not gradient or tensor is None or tensor not in self._before:
            return
        before = self._before[tensor]
        if gradient.device == before.device:
            # FSDP1 without synchronization: the full gradient of a parameter that is a shard on the CPU again.
            _GRADIENT.__set__(tensor, None)
            SET_DATA(before, gradient.data)
            _GRADIENT.__set__(before, gradient)
            _without_memory(before)
        elif gradient.device == tensor.device and gradient.shape == tensor.shape:
            _GRADIENT.__set__(before, None)
            _GRADIENT.__set__(tensor, gradient)

    def forget(self) -> None:
        """Forget all contents: the virtual GPU is turned off."""
        self._before.clear()

    def handlers(self) -> dict[Any, Callable[..., Any]]:
        """Return what `tensor.grad` does."""
        return {
            _GRADIENT.__get__: self._gradient,
            _GRADIENT.__set__: self._set_gradient,
            _GRADIENT.__delete__: self._delete_gradient,
        }

    def _gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        gradient = _GRADIENT.__get__(*args)
        if args[0] in self._before:
            if gradient is None:
                gradient = _GRADIENT.__get__(self._before[args[0]])
            if gradient is not None:
                self._read = weakref.ref(args[0]), weakref.ref(gradient)
        return gradient  # type: ignore[no-any-return]

    def _set_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _GRADIENT.__set__(*args)
        self._forget_gradient(args[0])

    def _delete_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _GRADIENT.__delete__(*args)
        self._forget_gradient(args[0])

    def _forget_gradient(self, tensor: torch.Tensor) -> None:
        if tensor in self._before:
            _GRADIENT.__set__(self._before[tensor], None)
