"""Copy the training step of a watched model into another process, where it is a `Step`.

Of weights and optimizer state only shapes are sent. The loss is computed by the lines of the loop where these are
understood; else it is the loss that the model returns, or a substitute.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from memexplore.live.code_step import CodeLoss, CodeStep
from memexplore.live.model_pickler import ModelPickler
from memexplore.live.observed import ObservedCall, TensorLike, leaves
from memexplore.live.parts import parts_of, samples_of
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.precision import Precision
from memexplore.run.programs import batches
from memexplore.run.programs.step import Step
from memexplore.virtual_gpu.tensors.tensor import fake_cpu_tensor

_MOST_MICRO_BATCHES = 2
"""From the second micro-batch on, gradients exist and all are alike."""
_LARGE = 1 << 20
"""Bytes from which a tensor of the batch has no values."""
TRAINING_STEP = "training_step"
"""The method of Lightning's modules that returns the loss."""
LOSS_ASSUMED = (
    "The loss is not known: the mean squared error of the model's outputs stands for it, which keeps no tensor of its "
    "own for backward."
)
LINES_FAILED = "The lines of the loop that compute the loss cannot be run ({}): the model's output is taken instead."
NO_KEYWORDS = "The model's keyword arguments are not known: name the model in mx.watch(model)."


def _no_loss(model: Any, batch: Any) -> Any:
    raise NotImplementedError


def pack(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """Return a model and its optimizer as bytes; weights and state are packed as shapes.

    Raises `UnsendableStepError` for a model that cannot be pickled.
    """
    step = Step(model, torch.zeros(1, device="cpu"), compute_loss=_no_loss, optimizer=optimizer)
    return step.packed(ModelPickler)


def pack_code(code: CodeLoss) -> bytes:
    """Return lines and their values as bytes; weights of theirs on a GPU, and large ones, are packed as shapes.

    Raises what cloudpickle raises for a value that cannot be sent.
    """
    file = io.BytesIO()
    ModelPickler(file, {}).dump(code)
    return file.getvalue()


class Copied(NamedTuple):
    """A step that can be run with knobs."""

    step: Step
    assumed: tuple[str, ...]
    """What was not known of the step, as sentences."""


def step_of(
    packed: Step,
    call: ObservedCall,
    micro_batches: int,
    knobs: Knobs,
    code: CodeLoss | None = None,
) -> Copied:
    """Return the step of an unpacked model with the inputs of a call, in `micro_batches` as the loop itself makes them.

    `code` calls the model and computes the loss; without it the loss is what the model returns.
    The accumulation of the knobs splits the batch, which is on the device, as `InLoop.micro_batches` does.
    The autocast around the call is the loop's own, which counts where the knobs leave the precision as written.
    """
    inputs = {"args": call.args, "kwargs": call.kwargs or {}, "values": {} if code is None else code.values}
    on_device = {tensor.device for tensor in _tensors(inputs)} - {"cpu"}
    tensors: list[torch.Tensor] = []
    first = next((tensor for tensor in _tensors(inputs) if tensor.shape), None)
    part = first.shape[0] if first is not None else 0
    samples = round(part / call.share) if call.share < 1 else part

    def place(value: TensorLike) -> Any:
        tensor = _tensor(value, part, samples)
        if on_device and value.device == "cpu":
            # Such as lengths: the model gets them on the CPU, whatever its device.
            return _Fixed(tensor)
        tensors.append(tensor)
        return _Placed(len(tensors) - 1)

    placed = _mapped(place, inputs)
    cast = call.autocast if knobs.precision is Precision.AS_WRITTEN else None
    count = min(micro_batches, _MOST_MICRO_BATCHES)
    run = _Call(call.method, cast, call.held) if code is None else CodeStep(code, cast)
    replay = Replay(placed, run, count, knobs.accumulation or 1)
    step = dataclasses.replace(packed, batch=tensors, compute_loss=replay, samples=samples or None)
    return Copied(step, (NO_KEYWORDS,) if call.kwargs is None else ())


class _Placed(NamedTuple):
    position: int


class _Fixed(NamedTuple):
    tensor: torch.Tensor


def _tensors(value: Any) -> Iterator[TensorLike]:
    if isinstance(value, TensorLike):
        yield value
    elif isinstance(value, dict | tuple | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, TensorLike):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(function, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_mapped(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _tensor(value: TensorLike, part: int, samples: int) -> torch.Tensor:
    """Return a tensor of the whole batch: with the values, with ones, or without values where it is large."""
    shape = value.shape
    if samples != part and shape and shape[0] == part:
        shape = (samples, *shape[1:])
    elif value.values is not None:
        return torch.from_numpy(value.values).requires_grad_(value.requires_grad)
    if torch.Size(shape).numel() * value.dtype.itemsize >= _LARGE:
        return fake_cpu_tensor(shape, value.dtype).requires_grad_(value.requires_grad)
    # Reading a value on the virtual GPU gives 1 as well.
    return torch.ones(shape, dtype=value.dtype).requires_grad_(value.requires_grad)


class _Call:
    """Calls a model and returns the loss that it returns, else a substitute."""

    def __init__(self, method: str, cast: tuple[str, torch.dtype] | None, held: tuple[bool, ...]) -> None:
        self._method, self._cast, self._parts_held = method, cast, held
        self.assumes_loss = False
        self._output: list[Any] = []
        """What variables of a loop hold of the last output until the next one is there."""

    def __call__(self, model: nn.Module, args: Any, kwargs: Any, values: dict[str, Any]) -> torch.Tensor:
        call = getattr(model, TRAINING_STEP) if self._method == TRAINING_STEP else model
        if self._cast is None:
            return self._loss_of(self._kept(call(*args, **kwargs)))
        with torch.autocast(self._cast[0], dtype=self._cast[1]):
            return self._loss_of(self._kept(call(*args, **kwargs)))

    def _kept(self, output: Any) -> Any:
        self._output = [leaf for leaf, is_held in zip(leaves(output), self._parts_held, strict=False) if is_held]
        return output

    def end(self) -> None:
        """Drop the last output."""
        self._output = []

    def _loss_of(self, output: Any) -> torch.Tensor:
        own = batches.own_loss(output)
        if own is not None and own.requires_grad:
            return own
        self.assumes_loss = True
        outputs = [tensor for tensor in batches.tensors(batches.criterion_input(output)) if tensor.requires_grad]
        if not outputs:
            raise TypeError("the model returned no tensor with gradients")
        # The copy is one number; the loss itself keeps the memory of all squares.
        losses = [nn.functional.mse_loss(result, result.detach()).clone() for result in outputs]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


class Replay:
    """A `compute_loss` that calls the model as the loop did."""

    def __init__(self, placed: dict[str, Any], run: _Call | CodeStep, count: int, split: int) -> None:
        self._placed, self._run = placed, run
        self._count, self._split = count, split

    @property
    def assumes_loss(self) -> bool:
        """Whether the last call took a substitute for the loss."""
        return isinstance(self._run, _Call) and self._run.assumes_loss

    def __call__(self, model: nn.Module, batch: list[torch.Tensor]) -> Any:
        """Return the loss of a batch, or of each of its parts."""
        if self._split > 1 and samples_of(batch) > 1:
            return (self._loss(model, part) * share for part, share in parts_of(batch, self._split))
        if self._count == 1:
            return self._loss(model, batch)
        return (self._loss(model, batch) for _ in range(self._count))

    def _loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = self._run(model, **_filled(batch, self._placed))
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"the lines of the loop return a {type(loss).__name__} for the loss")
        return loss

    def end(self) -> None:
        """Drop what variables of the loop hold."""
        self._run.end()


def _filled(batch: list[torch.Tensor], value: Any) -> Any:
    if isinstance(value, _Placed):
        return batch[value.position]
    if isinstance(value, _Fixed):
        return value.tensor
    if isinstance(value, dict):
        return {key: _filled(batch, part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [_filled(batch, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def assumed_in(step: Step) -> tuple[str, ...]:
    """Return what a step that was run assumed about its loss, as sentences."""
    return (LOSS_ASSUMED,) if getattr(step.compute_loss, "assumes_loss", False) else ()
