"""The knob `memory_format`: images and the weights of convolutions with channels last."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from memexplore.run.knobs.applying.forward import change_inputs
from memexplore.run.knobs.applying.loop import Loop, RunningLoop
from memexplore.run.knobs.applying.report import ApplyReport, Change
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knob import Application, Group, Knob, ModelCode, Stage, Untouched
from memexplore.run.knobs.values import OneOf

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu


class MemoryFormat(enum.Enum):
    """Memory format of images."""

    AS_WRITTEN = "as written"
    CHANNELS_LAST = "channels last"


class MemoryFormatKnob(Knob):
    """The order of the dimensions of images and of the weights of convolutions in memory."""

    name = "memory_format"
    costs = "equal results but for rounding"
    values = OneOf(MemoryFormat)
    place = 100
    group = Group.MODEL
    leaves = Untouched.ALL_BUT_ACTIVATIONS
    stage = Stage.LAYOUT
    adds_only_recomputation = True

    def phrase(self, value: Any) -> str:
        """Return the memory format."""
        return self.values.text(value)

    def apply(self, value: Any, application: Application) -> ApplyReport:
        """Change weights and buffers of four dimensions, and such inputs of the model."""
        model, log = application.model, application.log
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dim() == 4}
        for tensor in tensors.values():
            log.add(_change_layout, tensor, functools.partial(_with_stride, stride=tensor.stride()))
            _change_layout(tensor, _as_channels_last)
        change_inputs(log, model, _as_channels_last)
        notes = () if tensors else ("No weight has four dimensions: only inputs change their memory format.",)
        return ApplyReport((Change(self.name, self.phrase(value)),), (), notes)

    def change_loop(self, value: Any, loop: Loop) -> None:
        """Move images to the device in the memory format."""
        loop.memory_format = torch.channels_last

    def hidden(self, explored: Explored) -> str:
        """Return that the model is not one of images."""
        weights = () if explored.model is None else explored.model.parameters()
        is_of_images = explored.model is None or any(weight.dim() == 4 for weight in weights)
        return "" if is_of_images else "the model has no weights for images"

    def locked_in(self, value: Any, loop: RunningLoop) -> str:
        """Return what needs weights and its own tensors in one format."""
        if loop.no_model or not loop.layout_kept_by:
            return loop.no_model
        kept_by = loop.layout_kept_by
        return f"{kept_by} needs weights and its own tensors in one memory format: set it before, and start again."

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield the change of the weights."""
        yield "model.to(memory_format=torch.channels_last)"

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return channels last for images."""
        return (MemoryFormat.CHANNELS_LAST,) if explored.are_images else ()


def _as_channels_last(value: torch.Tensor) -> torch.Tensor:
    return value.to(memory_format=torch.channels_last) if value.dim() == 4 else value


def _with_stride(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if value.stride() == stride:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _change_layout(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the memory of a tensor and of its gradient; both stay the same objects."""
    for value in (tensor, tensor.grad):
        if value is not None:
            value.data = change(value.data)
