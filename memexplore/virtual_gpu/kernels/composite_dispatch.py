"""Register the composite kernels (rules of kind COMPOSITE) with torch's dispatcher.

A composite op branches on the device in C++. A virtual tensor reports `meta` to C++, so C++ would take another branch
than a CUDA build does. The kernels are registered on AutogradPrivateUse1, a key that only virtual tensors of the device
have; for tensors of another PrivateUse1 backend they call C++. A DTensor has the keys of meta tensors: for it the
kernels are registered on AutogradMeta, until the virtual GPU is turned off.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    destroy_library,
    kernel_lookup_of,
)
from memexplore.virtual_gpu.kernels import table
from memexplore.virtual_gpu.tensors.tensor import BACKEND, DeviceState, is_on_gpu
from memexplore.virtual_gpu.values import notes

AUTOCAST_NOTE = (
    "autocast does not reach DTensors (tensor parallelism), whose ops keep the dtype of the tensors inside: convert "
    "the model to that dtype, or profile on a real GPU"
)
_aten = torch.ops.aten
_registered: list[torch.library.Library] = []
# Composite for backends without a kernel of their own; CUDA has one, and autograd a formula that calls it.
_WITH_CUDA_KERNEL = ("silu_backward", "mish_backward", "_fused_rms_norm")


def decomposed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a composite op as C++ decomposes it."""
    return kernel_lookup_of(op)(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _where(accepts: Callable[[Any], bool], op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that runs `kernel` for a call with a tensor that `accepts` returns True for, else C++."""
    refusal = table.find(op, table.Kind.REFUSAL)

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        tensors = (entry for value in args for entry in (value if isinstance(value, list) else (value,)))
        if DeviceState.gpu_name is None or not any(map(accepts, tensors)):
            return decomposed(op, *args, **kwargs)
        if refusal is not None:
            refusal(*args, **kwargs)
        return kernel(*args, **kwargs)

    return dispatch


def kernel_of(op: Any) -> Callable[..., Any]:
    """Return the kernel of a composite op for virtual tensors without the keys of autograd, as of inference mode."""
    rule = table.find(op, table.Kind.COMPOSITE)
    return functools.partial(decomposed, op) if rule is None else _where(is_on_gpu, op, rule)


def has_cuda_kernel(name: str) -> bool:
    """Whether CUDA has a kernel of its own for an op that other backends run as a composite."""
    return name in _WITH_CUDA_KERNEL


def _is_distributed(value: Any) -> bool:
    if not type(value).__module__.startswith("torch.distributed.") or not value.is_cuda:
        return False
    if torch.is_autocast_enabled(BACKEND.type):
        notes.add(AUTOCAST_NOTE)
    return True


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("an op of the virtual GPU reached a backend that does not exist: please report it as a bug")


def register() -> None:
    """Register the composite kernels with torch, once in a process."""
    if _registered:
        return
    autograd = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    for op, kernel in table.of_kind(table.Kind.COMPOSITE).items():
        autograd.impl(op, _where(is_on_gpu, op, kernel))
    backend = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in _WITH_CUDA_KERNEL:
        # A registered kernel makes autograd use its formula; the dispatch mode answers before the kernel is called.
        backend.impl(name, _unreachable)
    _registered.extend((autograd, backend))


class _FusedRmsNorm(torch.autograd.Function):
    """`_fused_rms_norm` of a DTensor: on meta tensors torch has no kernel of it, and takes it apart before DTensor."""

    @staticmethod
    def forward(context: Any, source: Any, shape: Any, weight: Any, eps: Any) -> Any:
        with _below_autograd():
            result, roots = _aten._fused_rms_norm.default(source, shape, weight, eps)
        context.save_for_backward(source, weight, roots)
        context.shape = shape
        context.mark_non_differentiable(roots)
        return result, roots

    @staticmethod
    def backward(context: Any, gradient: Any, _: Any) -> Any:  # type: ignore[override]
        source, weight, roots = context.saved_tensors
        wanted = [context.needs_input_grad[0], context.needs_input_grad[2]]
        with _below_autograd():
            results = _aten._fused_rms_norm_backward.default(gradient, source, context.shape, roots, weight, wanted)
        return results[0], None, results[1], None


def _below_autograd() -> Any:
    return ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutogradMeta))


def _fused_rms_norm(source: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    return _FusedRmsNorm.apply(source, shape, weight, eps)


_of_distributed: list[torch.library.Library] = []
"""Registrations for DTensors."""


def register_for_distributed() -> None:
    """Register the composite kernels for DTensors, until `unregister_for_distributed`."""
    unregister_for_distributed()
    kernels = {**table.of_kind(table.Kind.COMPOSITE), _aten._fused_rms_norm.default: _fused_rms_norm}
    autograd = torch.library.Library("aten", "IMPL", "AutogradMeta")
    # Before the first kernel: an interrupt may follow.
    _of_distributed.append(autograd)
    with warnings.catch_warnings():
        # torch warns that it has kernels for this key: those by which every composite op is taken apart.
        warnings.simplefilter("ignore")
        for op, kernel in kernels.items():
            autograd.impl(op, _where(_is_distributed, op, kernel))


def unregister_for_distributed() -> None:
    """End the registrations for DTensors. May be interrupted and repeated."""
    for library in _of_distributed:
        destroy_library(library)
    _of_distributed.clear()
