"""`apply`: the knobs of a model put onto it for a block, and a report of what they changed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from memexplore.knobs import adapters, precision
from memexplore.knobs.checkpoints.checkpointing import set_checkpoints
from memexplore.knobs.facts import Change, Note, NoteKind
from memexplore.knobs.forward import change_inputs, device_of, run_forward_inside
from memexplore.knobs.inplace.in_place import set_in_place
from memexplore.knobs.inplace.sites import Sites
from memexplore.knobs.knobs import Checkpoint, Knobs, Mode, Precision
from memexplore.knobs.report import ApplyReport
from memexplore.knobs.scope import Off, Reach, inside, open_scope
from memexplore.knobs.undo import UndoLog, undone_after
from memexplore.torch_internals.modules import BatchNorm

LOOP_FIELDS = (
    "batch",
    "accumulation",
    "optimizer",
    "update",
    "zero_grad",
    "input_size",
    "settings",
    "gpu",
    "variables",
)
"""Fields of `Knobs` that concern the training loop or the machine, and not the model."""


def apply(knobs: Knobs, model: nn.Module, sites: Sites | None = None) -> contextlib.AbstractContextManager[ApplyReport]:
    """Put knobs onto a model for a block and take them off afterwards, after an exception or an interrupt too.

    The model is on the CPU, a GPU or a virtual one; other models, the loss and other threads are unaffected (see
    `knobs.scope`). `sites` are the activations that may overwrite their input (`inplace.legal_sites`); without them the
    model's first call is run on fake tensors to find them. Make the optimizer inside the block: weights may be new or
    of another dtype there. Fields of the training loop (`LOOP_FIELDS`) are left to the loop; notes name those given.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    >>> with apply(Knobs(precision="all bf16", frozen="0"), model) as report:
    ...     print(report.texts, model(torch.ones(1, 8)).dtype)
    ('2 weights frozen', 'all in bf16') torch.bfloat16
    >>> [(weight.dtype, weight.requires_grad) for weight in model[0].parameters()]
    [(torch.float32, True), (torch.float32, True)]

    Raises ValueError, with similar names, for a layer that the model does not have.
    """
    return undone_after(lambda log: _put_on(log, knobs, model, sites, Reach.FORWARD))


def apply_to_step(
    knobs: Knobs, model: nn.Module, sites: Sites | None = None
) -> contextlib.AbstractContextManager[ApplyReport]:
    """Do what `apply` does, for a step that is run alone: saved-tensor hooks are on for the loss as well."""
    return undone_after(lambda log: _put_on(log, knobs, model, sites, Reach.STEP))


def _put_on(log: UndoLog, knobs: Knobs, model: nn.Module, sites: Sites | None, reach: Reach) -> ApplyReport:
    adapters.check_names(model, (*knobs.frozen, *knobs.lora, *knobs.checkpoint.layers))
    report = ApplyReport((), (), (*_loop_field_notes(knobs), *micro_batch_notes(knobs, model)))
    changed = knobs.changed()
    for field, put_on in MODEL_FIELDS.items():
        if field in changed:
            report += put_on(Target(log, model, knobs, sites, reach))
    return report


class Target(NamedTuple):
    """What a knob is put onto."""

    log: UndoLog
    """Restores the model."""
    model: nn.Module
    knobs: Knobs
    sites: Sites | None
    reach: Reach


def of_model(knobs: Knobs) -> Knobs:
    """Return knobs with the fields of the training loop as written.

    >>> of_model(Knobs(batch=4, offload="saved tensors on the CPU")).changed()
    {'offload': <Offload.SAVED_TENSORS: 'saved tensors on the CPU'>}
    """
    defaults = Knobs()
    return knobs.replace(**{name: getattr(defaults, name) for name in LOOP_FIELDS})


@contextlib.contextmanager
def training_loop_scope(knobs: Knobs, device: torch.device) -> Iterator[None]:
    """Extend to a whole training loop what `apply` switches off in a model's forward.

    Inside the block, in this thread, the checkpoints and the autocast of the loop's own code, such as a loss function,
    are switched off where the knobs say so for the model.
    """
    off = Off.NOTHING
    if knobs.checkpoint != Checkpoint():
        off |= Off.CHECKPOINTS
    if knobs.precision in (Precision.OFF, Precision.ALL_BF16):
        off |= Off.AUTOCAST
    if off is Off.NOTHING:
        yield
        return
    with undone_after(lambda log: open_scope(log, off)) as scope:
        if Off.AUTOCAST in off:
            with precision.without_autocast(scope, device.type):
                yield
        else:
            with inside(scope):
                yield


def micro_batch_notes(knobs: Knobs, model: nn.Module) -> tuple[Note, ...]:
    """Return a note if batch norm makes training on micro-batches differ from training on the whole batch."""
    normed = any(isinstance(module, BatchNorm) for module in model.modules())
    if not normed or (knobs.accumulation or 1) == 1 or knobs.mode is Mode.INFERENCE:
        return ()
    return (Note(NoteKind.BATCH_NORM_PER_MICRO_BATCH),)


def _loop_field_notes(knobs: Knobs) -> Iterator[Note]:
    given = knobs.changed()
    for name in LOOP_FIELDS:
        if name in given:
            yield Note(NoteKind.LOOP_FIELD, (str(Knobs(**{name: given[name]})),))


# --- the knobs that need no module of their own ---------------------------------------------------------------------


def _set_memory_format(target: Target) -> ApplyReport:
    model, log = target.model, target.log
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dim() == 4}
    for tensor in tensors.values():
        log.add(_change_layout, tensor, functools.partial(_with_stride, stride=tensor.stride()))
        _change_layout(tensor, _as_channels_last)
    change_inputs(log, model, _as_channels_last)
    notes = () if tensors else (Note(NoteKind.NO_IMAGE_WEIGHTS),)
    return ApplyReport((Change("memory_format", target.knobs.memory_format),), (), notes)


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


def _offload(target: Target) -> ApplyReport:
    change = Change("offload", target.knobs.offload)
    if device_of(target.model).type == "cpu":
        # There `save_on_cpu` keeps the tensor itself, and a result that its own node holds is never freed.
        return ApplyReport((change,), (), (Note(NoteKind.OFFLOAD_ON_CPU),))
    run_forward_inside(target.log, target.model, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))
    return ApplyReport((change,))


def _set_mode(target: Target) -> ApplyReport:
    for module in target.model.modules():
        target.log.add(setattr, module, "training", module.training)
    target.model.eval()
    run_forward_inside(target.log, target.model, torch.no_grad)
    return ApplyReport((Change("mode", target.knobs.mode),))


MODEL_FIELDS: dict[str, Callable[[Target], ApplyReport]] = {
    "frozen": lambda target: adapters.freeze(target.log, target.model, target.knobs.frozen),
    "lora": lambda target: adapters.add_adapters(target.log, target.model, target.knobs.lora, target.knobs.lora_rank),
    "memory_format": _set_memory_format,
    "inplace": lambda target: set_in_place(target.log, target.model, target.knobs.inplace, target.sites),
    "offload": _offload,
    "checkpoint": lambda target: set_checkpoints(target.log, target.model, target.knobs.checkpoint, target.reach),
    "precision": lambda target: precision.set_precision(target.log, target.model, target.knobs.precision),
    "mode": _set_mode,
}
"""Field of `Knobs` -> the function that puts it onto a model, in this order.

Adapters come before what wraps the forward of modules. A later function wraps outside an earlier one: the hooks of
`offload` are inside those of `checkpoint="norms"` and get the saved tensors first.
"""
