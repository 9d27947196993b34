"""The knob `precision`: autocast or none, or weights, buffers and inputs in bf16."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from memexplore.run.knobs.applying.forward import change_inputs, run_forward_inside
from memexplore.run.knobs.applying.loop import Loop, RunningLoop
from memexplore.run.knobs.applying.report import ApplyReport, Change
from memexplore.run.knobs.applying.scope import AUTOCAST, Feature, switch_off
from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knob import Application, Estimate, Group, Knob, ModelCode, Stage, Untouched
from memexplore.run.knobs.values import OneOf
from memexplore.tape import Phase
from memexplore.virtual_gpu.tensors.tensor import is_virtual

if TYPE_CHECKING:
    from memexplore.hardware.catalogue import Gpu
    from memexplore.run.knobs.knobs import Knobs


class Precision(enum.Enum):
    """Precision of the step; `FP16` has a `GradScaler`, `ALL_BF16` has no fp32 weights."""

    AS_WRITTEN = "as written"
    OFF = "off"
    FP16 = "fp16"
    BF16 = "bf16"
    ALL_BF16 = "all bf16"


CASTS = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
"""The precisions that are an autocast, with its dtype."""
_AUTOCAST_TIME, _AUTOCAST_SHARE = 0.4, 0.6
"""Time, and share of the activations, about."""
_DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
_OPTIONS = {
    Precision.OFF: "fp32, no autocast",
    Precision.FP16: "fp16 autocast",
    Precision.BF16: "bf16 autocast",
    Precision.ALL_BF16: "everything in bf16",
}
_NEW_OPTIMIZER = "Weights in bf16 need a new optimizer: cast the model and start again."
_NO_AUTOCAST = (
    "The loop does not use live.autocast(), live.backward(loss) and live.step(optimizer): write them in the loop, see "
    "help(live.autocast)."
)
_SCALER_NEEDED = (
    'fp16 needs torch.amp.GradScaler("{}") for the loss and the optimizer of the loop, or small gradients become zero.'
)
_OPTIMIZER_AFTER = "Make the optimizer after the model is in bf16, or its state has another type than the weights."


class PrecisionKnob(Knob):
    """Autocast to fp16 (with a `GradScaler`) or bf16, no autocast, or everything in bf16 without fp32 weights."""

    name = "precision"
    costs = "other rounding, mostly faster"
    values = OneOf(Precision)
    place = 30
    group = Group.MODEL
    is_primary = True
    stage = Stage.PRECISION

    def phrase(self, value: Any) -> str:
        """Return the precision."""
        if value is Precision.ALL_BF16:
            return "all in bf16"
        return "no autocast" if value is Precision.OFF else f"{value.value} autocast"

    def apply(self, value: Any, application: Application) -> ApplyReport:
        """Run the forward of the model in autocast or without any; for `ALL_BF16`, cast the model and its inputs."""
        log, model, device_type = application.log, application.model, application.device.type
        notes: tuple[str, ...] = ()
        if value in CASTS:
            run_forward_inside(log, model, lambda: torch.autocast(device_type, dtype=CASTS[value]))
            notes = (_SCALER_NEEDED.format(device_type),) if value is Precision.FP16 else ()
        if value is Precision.ALL_BF16:
            _cast_to_bf16(log, model)
            notes = (_OPTIMIZER_AFTER,)
        if self.off(value):
            switch_off(log, model, device_type, *self.off(value))
        return ApplyReport((Change(self.name, self.phrase(value)),), (), notes)

    def of_model(self, value: Any) -> Any:
        """Return nothing for an autocast: in the loop it covers the loss as well."""
        return Precision.AS_WRITTEN if value in CASTS else value

    def off(self, value: Any) -> tuple[Feature, ...]:
        """Return the autocast that the program enters itself."""
        return (AUTOCAST,) if value in (Precision.OFF, Precision.ALL_BF16) else ()

    def change_loop(self, value: Any, loop: Loop) -> None:
        """Put autocast around forward pass and loss, with a scaler for fp16; or cast the inputs."""
        if value in CASTS:
            loop.around_forward.append(lambda device_type: torch.autocast(device_type, dtype=CASTS[value]))
        loop.scales_loss = value is Precision.FP16
        loop.dtype = torch.bfloat16 if value is Precision.ALL_BF16 else None

    def phrase_in_loop(self, value: Any, loop: Loop) -> str:
        """Return the autocast; a report of the model says the others."""
        if value not in CASTS:
            return ""
        return self.phrase(value) + " with GradScaler" * (loop.scales_loss and loop.trains)

    def written(self, explored: Explored) -> str:
        """Return the type of the weights; with the word "weights" where the forward pass casts, as autocast does."""
        model, tape = explored.model, explored.tape
        if model is None or tape is None:
            return ""
        kinds = dict.fromkeys(weight.dtype for weight in model.parameters() if weight.is_floating_point())
        if not kinds:
            return ""
        text = " and ".join(_DTYPES.get(kind, str(kind).removeprefix("torch.")) for kind in kinds)
        casts = tape.ops.index("aten::_to_copy") if "aten::_to_copy" in tape.ops else -1
        is_cast = casts >= 0 and bool(((tape.op == casts) & (tape.phase == Phase.FORWARD)).any())
        return f"{text} weights" if is_cast else text

    def option(self, value: Any) -> str:
        """Return the precision in full."""
        return _OPTIONS.get(value, self.values.text(value))

    def asks_loop_for(self, value: Any) -> tuple[str, ...]:
        """Return autocast, and the scaler of fp16."""
        if value is Precision.FP16:
            return self.name, "fp16"
        return (self.name,) if value in CASTS else ()

    def locked_in(self, value: Any, loop: RunningLoop) -> str:
        """Return how a loop gets autocast; the weights of a loop that runs keep their type."""
        if value is Precision.ALL_BF16:
            return _NEW_OPTIMIZER
        if value is Precision.OFF:
            return loop.no_model
        return "" if loop.follows >= set(self.asks_loop_for(value)) else _NO_AUTOCAST

    def model_lines(self, value: Any, code: ModelCode) -> Iterator[str]:
        """Yield the cast of the model."""
        if value is Precision.ALL_BF16:
            yield "model.bfloat16()"

    def alters_training(self, value: Any, model: nn.Module | None, knobs: Knobs) -> bool:
        """Return whether there are no fp32 weights; autocast is designed to train the same."""
        return value is Precision.ALL_BF16

    def training_text(self, value: Any, knobs: Knobs) -> str:
        """Return what it means for the training."""
        return "Weights are rounded to bf16 after each update, which loses updates below 1/256 of a weight."

    def candidates(self, explored: Explored, gpu: Gpu) -> Iterable[Any]:
        """Return what the GPU has units for; a cell may scale no loss, and keeps its weights."""
        if gpu.compute_capability < (8, 0):  # no units for bf16
            return () if explored.model is None else (Precision.FP16,)
        return (Precision.BF16,) if explored.model is None else (Precision.BF16, Precision.ALL_BF16)

    def estimate(self, value: Any, estimate: Estimate) -> None:
        """Halve all, or cast activations and keep a copy of the weights in 16 bits, as autocast does."""
        if value is Precision.ALL_BF16:
            estimate.time = _AUTOCAST_TIME * 0.9
            estimate.activations /= 2
            estimate.constant, estimate.fixed = estimate.constant // 2, estimate.fixed // 2
            estimate.gradients, estimate.states = estimate.gradients // 2, estimate.states // 2
        else:
            estimate.time = _AUTOCAST_TIME
            estimate.activations = estimate.activations * _AUTOCAST_SHARE + estimate.weights / 2

    def untouched(self, value: Any) -> Untouched:
        """Return all but activations, nothing without fp32 weights."""
        return Untouched.NOTHING if value is Precision.ALL_BF16 else Untouched.ALL_BUT_ACTIVATIONS


class _Cast(NamedTuple):
    """A tensor to be cast to bf16 and back."""

    tensor: torch.Tensor
    dtype: torch.dtype
    values: torch.Tensor | None
    """Its values before the cast, on the CPU; None for a virtual tensor, which has none."""


def _cast_to_bf16(log: UndoLog, model: nn.Module) -> None:
    """Cast weights, buffers and inputs to bf16.

    Afterwards tensors have their dtype again and hold the trained values. An element that training left unchanged gets
    all its digits back, for which a copy of the model's values waits on the CPU.
    """
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()}
    casts = [
        _Cast(tensor, tensor.dtype, None if is_virtual(tensor) else tensor.detach().to("cpu", copy=True))
        for tensor in tensors.values()
        if tensor.dtype is not torch.bfloat16
    ]
    change_inputs(log, model, _as_bf16)
    for cast in casts:
        log.add(_restore, cast)
        _change_dtype(cast.tensor, torch.bfloat16)


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
