"""In which precision a model runs: autocast around its forward, no autocast at all, or weights in bf16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from memexplore.knobs.forward import device_of, forward_inside, inputs_through
from memexplore.knobs.knobs import Precision
from memexplore.knobs.report import Applied
from memexplore.virtual_gpu.patches.device_names import is_virtual

AUTOCAST = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}

_Autocast = torch.amp.autocast_mode.autocast


@contextlib.contextmanager
def autocasting(model: nn.Module, kind: Precision) -> Iterator[Applied]:
    """Run a model's forward in autocast, in the block; for FP16 a note tells of the scaler that the loop needs.

    >>> model = nn.Linear(2, 2)
    >>> with autocasting(model, Precision.BF16):
    ...     print(model(torch.ones(1, 2)).dtype)
    torch.bfloat16
    """
    device_type = device_of(model).type
    notes: tuple[str, ...] = ()
    if kind is Precision.FP16:
        notes = (
            f'fp16 needs torch.amp.GradScaler("{device_type}") around the loss and the optimizer of the loop, or small '
            "gradients become zero.",
        )
    with forward_inside(model, lambda: torch.autocast(device_type, dtype=AUTOCAST[kind])):
        yield Applied((f"{kind.value} autocast",), (), notes)


@contextlib.contextmanager
def no_autocast(model: nn.Module) -> Iterator[Applied]:
    """Switch autocast off in the block: that around the block, and every one that code enters in it.

    >>> model = nn.Linear(2, 2)
    >>> with no_autocast(model), torch.autocast("cpu", dtype=torch.bfloat16):
    ...     print(model(torch.ones(1, 2)).dtype)
    torch.float32
    """
    with _autocast_off(device_of(model).type):
        yield Applied(("no autocast",))


@contextlib.contextmanager
def _autocast_off(device_type: str) -> Iterator[None]:
    # All spellings (torch.autocast, torch.cuda.amp.autocast, the decorator) come to this class, and
    # torch has no switch above them.
    enter = _Autocast.__enter__

    def enter_disabled(context: Any) -> Any:
        asked, context._enabled = context._enabled, False
        try:
            return enter(context)
        finally:
            context._enabled = asked

    _Autocast.__enter__ = enter_disabled  # type: ignore[method-assign]
    try:
        with torch.autocast(device_type):
            yield
    finally:
        _Autocast.__enter__ = enter  # type: ignore[method-assign]


class _Cast(NamedTuple):
    """A tensor that is in bf16 for a while."""

    tensor: torch.Tensor
    dtype: torch.dtype
    before: torch.Tensor | None
    """Its values as they were, on the CPU; None where it has none."""


@contextlib.contextmanager
def all_bf16(model: nn.Module) -> Iterator[Applied]:
    """Have weights, buffers and inputs of a model in bf16, and autocast off, in the block.

    Afterwards they are of their own type again and hold what was trained; a value that did not change has all its
    digits back. For that the values from before wait on the CPU (as many bytes as the model has).

    >>> model = nn.Linear(2, 2)
    >>> before = model.weight.clone()
    >>> with all_bf16(model):
    ...     print(model(torch.ones(1, 2)).dtype)
    torch.bfloat16
    >>> torch.equal(model.weight, before)
    True
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    casts = [
        _Cast(tensor, tensor.dtype, None if is_virtual(tensor) else tensor.detach().to("cpu", copy=True))
        for tensor in tensors.values()
        if tensor.dtype is not torch.bfloat16
    ]
    note = "Make the optimizer inside the block: one made before has a state of another type than the weights."
    with _autocast_off(device_of(model).type), inputs_through(model, _to_bf16):
        try:
            for cast in casts:
                _recast(cast.tensor, torch.bfloat16)
            yield Applied(("all in bf16",), (), (note,))
        finally:
            for cast in casts:
                _put_back(cast)


def _to_bf16(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16() if value.is_floating_point() else value


def _recast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    with torch.no_grad():
        gradient = tensor.grad
        tensor.grad = None
        # The object stays the same, so that whoever holds it trains it.
        tensor.data = tensor.data.to(dtype)
        if gradient is not None:
            gradient.data = gradient.data.to(dtype)
            tensor.grad = gradient


def _put_back(cast: _Cast) -> None:
    _recast(cast.tensor, cast.dtype)
    if cast.before is None or is_virtual(cast.tensor):
        return
    with torch.no_grad():
        before = cast.before.to(cast.tensor.device)
        same = before.bfloat16().to(cast.dtype) == cast.tensor
        cast.tensor.copy_(torch.where(same, before, cast.tensor))
