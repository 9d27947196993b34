"""Knobs onto a model, real or virtual, and off again."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from memexplore.knobs import adapters, precision
from memexplore.knobs.checkpoints.checkpointing import checkpointed
from memexplore.knobs.forward import device_of, forward_inside, inputs_through
from memexplore.knobs.inplace.legal import in_place
from memexplore.knobs.inplace.sites import Sites
from memexplore.knobs.knobs import Checkpoint, InPlace, Knobs, MemoryFormat, Mode, Offload, Precision
from memexplore.knobs.report import Applied, LeftOut
from memexplore.torch_internals.modules import BatchNorm

__all__ = ["OF_THE_LOOP", "Applied", "LeftOut", "apply"]

OF_THE_LOOP = tuple("batch accumulation optimizer update zero_grad input_size settings gpu variables".split())
"""Fields that say something about the training loop or the machine, and nothing about the model."""


@contextlib.contextmanager
def apply(knobs: Knobs, model: nn.Module, sites: Sites | None = None) -> Iterator[Applied]:
    """Put knobs onto a model for the block, and take them off again, after an exception too.

    The model is on the CPU, a GPU or a virtual one. `sites` are the places where activations may overwrite their input
    (`inplace.legal_sites`); without them the model's first call is rehearsed. Make the optimizer inside the
    block: weights may be new or of another type there. Knobs of the loop (`OF_THE_LOOP`) are for the loop to follow;
    the notes name those that were given.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    >>> with apply(Knobs(precision="all bf16", frozen="0"), model) as applied:
    ...     print(applied.texts, model(torch.ones(1, 8)).dtype)
    ('2 weights frozen', 'all in bf16') torch.bfloat16
    >>> [(weight.dtype, weight.requires_grad) for weight in model[0].parameters()]
    [(torch.float32, True), (torch.float32, True)]

    Raises ValueError for a layer that the model does not have, with names that are close.
    """
    adapters.check_names(model, (*knobs.frozen, *knobs.lora, *knobs.checkpoint.layers))
    applied = Applied((), (), (*_for_the_loop(knobs), *micro_batch_notes(knobs, model)))
    with contextlib.ExitStack() as stack:
        for part in _parts(knobs, model, sites):
            applied += stack.enter_context(part)
        yield applied


def _parts(knobs: Knobs, model: nn.Module, sites: Sites | None) -> Iterator[contextlib.AbstractContextManager[Applied]]:
    """What is put on, in this order; each is made when those before it are on."""
    if knobs.frozen:
        yield adapters.frozen(model, knobs.frozen)
    if knobs.lora:
        yield adapters.adapted(model, knobs.lora, knobs.lora_rank)
    if knobs.precision is Precision.ALL_BF16:
        yield precision.all_bf16(model)
    if knobs.memory_format is MemoryFormat.CHANNELS_LAST:
        yield _channels_last(model)
    if knobs.inplace is not InPlace.AS_WRITTEN:
        yield in_place(model, knobs.inplace, sites)
    if knobs.checkpoint != Checkpoint():
        yield checkpointed(model, knobs.checkpoint)
    if knobs.offload is Offload.SAVED_TENSORS:
        yield _offloading(model)
    if knobs.precision in precision.AUTOCAST:
        yield precision.autocasting(model, knobs.precision)
    if knobs.precision is Precision.OFF:
        yield precision.no_autocast(model)
    if knobs.mode is Mode.INFERENCE:
        yield _inference(model)


def of_model(knobs: Knobs) -> Knobs:
    """The knobs that a model can follow, those of the loop as written.

    >>> of_model(Knobs(batch=4, offload="saved tensors on the CPU")).changed()
    {'offload': <Offload.SAVED_TENSORS: 'saved tensors on the CPU'>}
    """
    defaults = Knobs()
    return knobs.replace(**{name: getattr(defaults, name) for name in OF_THE_LOOP})


def micro_batch_notes(knobs: Knobs, model: nn.Module) -> tuple[str, ...]:
    """A note where batch norm makes micro-batches different from the whole batch."""
    normed = any(isinstance(module, BatchNorm) for module in model.modules())
    if not normed or (knobs.accumulation or 1) == 1 or knobs.mode is Mode.INFERENCE:
        return ()
    return ("Batch norm sees one micro-batch at a time: losses and gradients are not those of the whole batch.",)


def _for_the_loop(knobs: Knobs) -> tuple[str, ...]:
    given = knobs.changed()
    return tuple(
        f"{Knobs(**{name: given[name]})} belongs to the training loop: apply changes the model alone."
        for name in OF_THE_LOOP
        if name in given
    )


@contextlib.contextmanager
def _channels_last(model: nn.Module) -> Iterator[Applied]:
    before = [
        (tensor, tensor.stride())
        for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
        if tensor.dim() == 4
    ]
    notes = () if before else ("No weight has four dimensions: only inputs change their memory format.",)
    with inputs_through(model, _channels_last_of):
        try:
            for tensor, _ in before:
                _change(tensor, _channels_last_of)
            yield Applied(("channels last",), (), notes)
        finally:
            for tensor, stride in before:
                _change(tensor, functools.partial(_strided, stride=stride))


def _channels_last_of(value: torch.Tensor) -> torch.Tensor:
    return value.to(memory_format=torch.channels_last) if value.dim() == 4 else value


def _strided(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if value.stride() == stride:
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _change(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change a tensor and its gradient; the objects stay the same."""
    with torch.no_grad():
        for value in (tensor, tensor.grad):
            if value is not None:
                value.data = change(value.data)


@contextlib.contextmanager
def _offloading(model: nn.Module) -> Iterator[Applied]:
    if device_of(model).type == "cpu":
        # There `save_on_cpu` keeps the tensor itself, and a result that its own node holds is never freed.
        yield Applied(("saved tensors on the CPU",), (), ("The model is on the CPU: nothing had to be moved there.",))
        return
    with forward_inside(model, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True)):
        yield Applied(("saved tensors on the CPU",))


@contextlib.contextmanager
def _inference(model: nn.Module) -> Iterator[Applied]:
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with forward_inside(model, torch.no_grad):
            yield Applied(("inference",))
    finally:
        for module, training in before:
            module.training = training
