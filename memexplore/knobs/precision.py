"""Precision knob: the forward of a model in autocast or without any, or weights, buffers and inputs in bf16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from memexplore.knobs.choices import Precision
from memexplore.knobs.facts import Change, Note, NoteKind
from memexplore.knobs.forward import change_inputs, device_of, run_forward_inside
from memexplore.knobs.report import ApplyReport
from memexplore.knobs.scope import Off, Scope, inside, open_scope
from memexplore.knobs.undo import UndoLog
from memexplore.virtual_gpu.patches.device_names import is_virtual

AUTOCAST = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
"""The precisions that are an autocast, with its dtype."""


def set_precision(log: UndoLog, model: nn.Module, precision: Precision, device_type: str | None = None) -> ApplyReport:
    """Run a model's forward in a precision, on a type of device that is by default that of its weights.

    >>> log, model = UndoLog(), nn.Linear(2, 2)
    >>> set_precision(log, model, Precision.BF16).texts
    ('bf16 autocast',)
    >>> model(torch.ones(1, 2)).dtype
    torch.bfloat16
    >>> log.restore()
    """
    device_type = device_type or device_of(model).type
    if precision in AUTOCAST:
        return _autocast(log, model, precision, device_type)
    if precision is Precision.OFF:
        _disable_autocast(log, model, device_type)
        return ApplyReport((Change("precision", precision),))
    return _cast_to_bf16(log, model, device_type)


def _autocast(log: UndoLog, model: nn.Module, precision: Precision, device_type: str) -> ApplyReport:
    run_forward_inside(log, model, lambda: torch.autocast(device_type, dtype=AUTOCAST[precision]))
    needs_scaler = precision is Precision.FP16
    notes = (Note(NoteKind.GRAD_SCALER_NEEDED, (device_type,)),) if needs_scaler else ()
    return ApplyReport((Change("precision", precision),), (), notes)


def _disable_autocast(log: UndoLog, model: nn.Module, device_type: str) -> None:
    """Run a model's forward, and its recomputation in backward, without autocast, its own and the caller's."""
    scope = open_scope(log, Off.AUTOCAST)
    run_forward_inside(log, model, lambda: without_autocast(scope, device_type))


@contextlib.contextmanager
def without_autocast(scope: Scope, device_type: str) -> Iterator[None]:
    """Run the block inside a scope that switches autocast off, and end the autocast that is on before it."""
    with inside(scope), torch.autocast(device_type, enabled=False):
        yield


class _Cast(NamedTuple):
    """A tensor to be cast to bf16 and back."""

    tensor: torch.Tensor
    dtype: torch.dtype
    values: torch.Tensor | None
    """Its values before the cast, on the CPU; None for a virtual tensor, which has none."""


def _cast_to_bf16(log: UndoLog, model: nn.Module, device_type: str) -> ApplyReport:
    """Cast weights, buffers and inputs to bf16, and run the forward without autocast.

    Afterwards tensors have their dtype again and hold the trained values. An element that training left unchanged gets
    all its digits back, for which a copy of the model's values waits on the CPU.
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    casts = [
        _Cast(tensor, tensor.dtype, None if is_virtual(tensor) else tensor.detach().to("cpu", copy=True))
        for tensor in tensors.values()
        if tensor.dtype is not torch.bfloat16
    ]
    _disable_autocast(log, model, device_type)
    change_inputs(log, model, _as_bf16)
    for cast in casts:
        log.add(_restore, cast)
        _change_dtype(cast.tensor, torch.bfloat16)
    change = Change("precision", Precision.ALL_BF16)
    return ApplyReport((change,), (), (Note(NoteKind.OPTIMIZER_INSIDE_BLOCK),))


def _as_bf16(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16() if value.is_floating_point() else value


def _change_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Change the dtype of a tensor and of its gradient; both stay the same objects, which optimizers hold."""
    for value in (tensor, tensor.grad):
        if value is not None and value.dtype is not dtype:
            value.data = value.data.to(dtype)


def _restore(cast: _Cast) -> None:
    _change_dtype(cast.tensor, cast.dtype)
    if cast.values is None or is_virtual(cast.tensor):
        return
    # Detached, not under `no_grad`: an interrupt at its end would leave gradients disabled.
    trained, before = cast.tensor.detach(), cast.values.to(cast.tensor.device)
    untrained = before.bfloat16().to(cast.dtype) == trained
    trained.copy_(torch.where(untrained, before, trained))
