"""One run of a step with given knobs on a virtual GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from memexplore import capture
from memexplore.devices import Gpu
from memexplore.tape import Tape
from memexplore.virtual_gpu.modules import swap
from memexplore.virtual_gpu.plans import fake_host
from memexplore.virtual_gpu.tensor import VirtualTensor
from memexplore.whatif import loop
from memexplore.whatif.apply import Applied, apply
from memexplore.whatif.cost import Cost, measuring
from memexplore.whatif.knobs import Knobs, Precision
from memexplore.whatif.step import Step

STEPS = 2
"""The optimizer's state is there from the second step on, so the second is the one that all others are like."""


class Trial(NamedTuple):
    """What came of one setting; the tape ends with an `oom` row where it does not fit."""

    knobs: Knobs
    tape: Tape
    applied: Applied
    cost: Cost
    """Of all steps on the tape."""


def run(step: Step, knobs: Knobs | None = None, *, gpu: str | Gpu = "T4", release: str | None = None) -> Trial:
    """Run two steps with some knobs on a virtual GPU.

    `gpu` counts where the knobs name none; `release` is the torch release whose rules apply. The model comes back as it
    was.

    >>> linear = torch.nn.Linear(1024, 1024, bias=False)
    >>> trial = run(Step(linear, torch.zeros(4, 1024), loss=torch.mean, optimizer=torch.optim.SGD))
    >>> from memexplore.tape import Category
    >>> int(trial.tape.size[trial.tape.category == Category.PARAMETER].sum())  # 1024 * 1024 weights of 4 bytes
    4194304

    Raises what the step raises, but for running out of memory; ValueError for knobs that do not suit the step.
    """
    knobs = knobs or Knobs()
    applied = Applied()
    kept: list[Any] = []
    model = built(step)
    with (
        _undisturbed(),
        _as_it_was(model),
        capture.virtual(knobs.gpu or gpu, torch=release, settings=knobs.settings or "") as device,
        _on_host(model),
        contextlib.ExitStack() as stack,
    ):
        with (
            capture.record() as recording,
            measuring(device.mode) as meter,
            contextlib.suppress(torch.OutOfMemoryError),
        ):
            model.cuda()
            # The loop has an autocast of its own, around the loss as well.
            ours = knobs if knobs.precision not in loop.AUTOCAST else knobs.replace(precision=Precision.AS_WRITTEN)
            applied = stack.enter_context(apply(ours, model))
            applied += loop.train(step, knobs, model, STEPS, kept)
        kept.clear()
    return Trial(knobs, recording.tape, applied, meter.total())


def built(step: Step) -> torch.nn.Module:
    """The step's model, built on a virtual GPU where the step has a function that builds it."""
    if isinstance(step.model, torch.nn.Module):
        return step.model
    if not hasattr(step, "_built"):
        with capture.virtual("192GiB"):
            object.__setattr__(step, "_built", step.model())
    return step._built  # type: ignore[attr-defined]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the garbage collector from going over all that was there before: 150 ms in the middle of a run of 200 ms."""
    if gc.get_freeze_count():  # somebody else's doing
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Take the gradients away for the block; gradients, buffers and modes are the model's own again afterwards."""
    weights = [(weight, weight.grad, weight.requires_grad) for weight in model.parameters()]
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        for weight, _, _ in weights:
            weight.grad = None
        yield
    finally:
        for weight, gradient, needed in weights:
            weight.requires_grad_(needed)
            weight.grad = gradient
        for module, name, buffer in buffers:
            module._buffers[name] = buffer
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def _on_host(model: torch.nn.Module) -> Iterator[None]:
    """Have the virtual tensors of a model wait on the CPU for the block, whatever virtual GPU they were on.

    What an earlier virtual GPU holds of them costs nothing: it is placed only where it is used.
    """
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for weight in model.parameters():
            if isinstance(weight, VirtualTensor):
                other = torch.nn.Parameter(fake_host(weight.shape, weight.dtype), requires_grad=weight.requires_grad)
                swap(weight, other)
                swapped.append((weight, other))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if isinstance(buffer, VirtualTensor):
                    module._buffers[name] = fake_host(buffer.shape, buffer.dtype)
        yield
    finally:
        for weight, other in swapped:
            weight.grad = None
            swap(weight, other)
