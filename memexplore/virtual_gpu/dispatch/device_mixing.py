"""Tensors of two devices in one op: which ops CUDA accepts, and the error for the others.

In: an op and its tensors. Out: nothing, or a RuntimeError that says what to move.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.tensors import base_of
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor

_aten = torch.ops.aten

_COPIES = frozenset(
    {
        _aten.copy_.default,
        _aten.copy.default,
        _aten._to_copy.default,
        _aten._copy_from.default,
        _aten._foreach_copy_.default,
        _aten.set_.source_Tensor,
        _aten.equal.default,
    }
)
# Ops that accept further tensors on the CPU if the first is on the GPU.
_ACCEPT_CPU_TENSORS = frozenset(
    {
        _aten.index.Tensor,
        _aten.index_put.default,
        _aten.index_put_.default,
        _aten._index_put_impl_.default,
        _aten._pack_padded_sequence.default,
        _aten._ctc_loss.Tensor,
        _aten._ctc_loss_backward.Tensor,
        _aten._cudnn_ctc_loss.default,
        _aten._cudnn_ctc_loss.Tensor,
        _aten.tensor_split.tensor_indices_or_sections,
    }
)


def check(func: Any, tensors: list[torch.Tensor]) -> None:
    """Raise RuntimeError if an op gets tensors of both devices and CUDA does not accept them."""
    on_gpu = on_cpu = False
    for tensor in tensors:
        if isinstance(tensor, VirtualTensor) and not tensor.host:
            on_gpu = True
        elif tensor.dim() and not is_managed(tensor):
            on_cpu = True
    if not (on_gpu and on_cpu) or func in _COPIES:
        return
    if func in _ACCEPT_CPU_TENSORS and _is_on_gpu(tensors[0]):
        return
    raise error(func, tensors)


def is_managed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in CUDA's managed memory, as the states of bitsandbytes' paged optimizers are."""
    return bool(getattr(tensor, "is_paged", False))


def error(func: Any, tensors: list[torch.Tensor]) -> RuntimeError:
    """Return the error for tensors of both devices, which says what to move."""
    gpu = [tensor for tensor in tensors if _is_on_gpu(tensor)]
    cpu = [tensor for tensor in tensors if not _is_on_gpu(tensor) and tensor.dim()]
    weight = next((tensor for tensor in cpu if _is_parameter(tensor)), None)
    if weight is not None:
        advice = f"a parameter of shape {_shape(weight)} is on the CPU: move the model with model.to('cuda')"
    elif any(map(_is_parameter, gpu)) and cpu:
        advice = (
            f"the model is on the GPU and its data of shape {_shape(cpu[0])} is not: move the data with .to('cuda')"
        )
    elif cpu:
        advice = f"a tensor of shape {_shape(cpu[0])} is on the CPU: move it with .to('cuda')"
    else:
        advice = "move the model and its data to the same device with .to('cuda')"
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
        f"In {str(func).split('.')[1]}, {advice}"
    )


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, VirtualTensor) and not tensor.host


def _is_parameter(tensor: torch.Tensor) -> bool:
    base = tensor if base_of(tensor) is None else base_of(tensor)
    return isinstance(base, torch.nn.Parameter)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    base = tensor if base_of(tensor) is None else base_of(tensor)
    return tuple(base.shape)
