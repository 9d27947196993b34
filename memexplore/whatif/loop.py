"""The training loop around a step: micro-batches, autocast, gradient scaler, optimizer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from memexplore.whatif.apply import Applied
from memexplore.whatif.knobs import Knobs, Mode, Optimizer, Precision, Update, ZeroGrad
from memexplore.whatif.step import Step

AUTOCAST = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}

_CLASSES: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
    Optimizer.SGD: functools.partial(torch.optim.SGD, lr=1e-3),
    Optimizer.MOMENTUM: functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    Optimizer.ADAM: functools.partial(torch.optim.Adam, lr=1e-3),
    Optimizer.ADAMW: functools.partial(torch.optim.AdamW, lr=1e-3),
    Optimizer.ADAFACTOR: functools.partial(torch.optim.Adafactor, lr=1e-3),
}


def optimizer_of(step: Step, knobs: Knobs) -> Callable[..., torch.optim.Optimizer]:
    """What makes the step's optimizer from parameters, with the knobs' choice and update."""
    made: Callable[..., torch.optim.Optimizer]
    if knobs.optimizer is not Optimizer.AS_WRITTEN:
        made = _CLASSES[knobs.optimizer]
    elif step.optimizer is None:
        made = torch.optim.AdamW
    elif isinstance(step.optimizer, torch.optim.Optimizer):
        made = functools.partial(type(step.optimizer), **step.optimizer.defaults)
    else:
        made = step.optimizer
    ways = {Update.FOREACH: {"foreach": True}, Update.FUSED: {"fused": True}, Update.PER_TENSOR: {"foreach": False}}
    return functools.partial(made, **ways.get(knobs.update, {}))


def to_cuda(batch: Any) -> Any:
    """A batch on the GPU."""
    return pytree.tree_map(lambda value: value.cuda() if isinstance(value, torch.Tensor) else value, batch)


def train(step: Step, knobs: Knobs, model: torch.nn.Module, steps: int, kept: list[Any]) -> Applied:
    """Train a model that is on the GPU already; `kept` gets what is to outlive the recording."""
    batch = step.batch_of(knobs.batch, knobs.input_size)
    count = knobs.accumulation or 1
    if knobs.mode is Mode.INFERENCE:
        model.eval()
        for _ in range(steps):
            with torch.no_grad(), _autocast(knobs):
                for part in step.micro_batches(batch, count):
                    loss = step.loss_of(model, to_cuda(part))
        return Applied()
    optimizer = optimizer_of(step, knobs)([weight for weight in model.parameters() if weight.requires_grad])
    scaler = torch.amp.GradScaler("cuda", enabled=knobs.precision is Precision.FP16)
    kept += [optimizer, scaler]
    for _ in range(steps):
        for part in step.micro_batches(batch, count):
            with _autocast(knobs):
                loss = step.loss_of(model, to_cuda(part)) / count if count > 1 else step.loss_of(model, to_cuda(part))
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=knobs.zero_grad is not ZeroGrad.TO_ZERO)
    kept.append(loss)
    return Applied()


def _autocast(knobs: Knobs) -> contextlib.AbstractContextManager[Any]:
    dtype = AUTOCAST.get(knobs.precision)
    return torch.autocast("cuda", dtype=dtype) if dtype is not None else contextlib.nullcontext()
