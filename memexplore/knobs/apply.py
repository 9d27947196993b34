"""Application of knobs to a model for a block, with a report of the changes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from memexplore.knobs import adapters, precision
from memexplore.knobs.checkpoints.checkpointing import set_checkpoints
from memexplore.knobs.choices import Mode, Precision
from memexplore.knobs.facts import Change, Note, NoteKind
from memexplore.knobs.forward import change_inputs, device_of, run_forward_inside
from memexplore.knobs.inplace.in_place import set_in_place
from memexplore.knobs.inplace.sites import Sites
from memexplore.knobs.knobs import Checkpoint, Knobs
from memexplore.knobs.layouts import ON_ONE_GPU
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
    *ON_ONE_GPU,
    "variables",
)
"""Fields of `Knobs` that concern the training loop or the machine, and not the model."""


def apply(knobs: Knobs, model: nn.Module, sites: Sites | None = None) -> contextlib.AbstractContextManager[ApplyReport]:
    """Apply knobs to a model for a block, and restore the model afterwards, also after an exception or an interrupt.

    The model is on the CPU, a GPU or a virtual one; other models, the loss and other threads are unaffected (see
    `knobs.scope`). `sites` are the activations that may overwrite their input (`inplace.legal_sites`); without them the
    model's first call is run on fake tensors to find them. Make the optimizer inside the block: weights may be new or
    of another dtype there. Fields of the training loop (`LOOP_FIELDS`) are left to the loop, with a note for each.

    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    >>> with apply(Knobs(precision="all bf16", frozen="0"), model) as report:
    ...     print(report.texts, model(torch.ones(1, 8)).dtype)
    ('2 weights frozen', 'all in bf16') torch.bfloat16
    >>> [(weight.dtype, weight.requires_grad) for weight in model[0].parameters()]
    [(torch.float32, True), (torch.float32, True)]

    Raises ValueError, with similar names, for a layer that the model does not have.
    """
    return undone_after(lambda log: _apply_all(log, knobs, model, sites, Reach.FORWARD))


def apply_to_step(
    knobs: Knobs, model: nn.Module, sites: Sites | None = None, device: torch.device | None = None
) -> contextlib.AbstractContextManager[ApplyReport]:
    """Do what `apply` does, for a run of a single step: saved-tensor hooks are on for the loss as well.

    `device` is where the model will run, by default where it is.
    """
    return undone_after(lambda log: _apply_all(log, knobs, model, sites, Reach.STEP, device=device))


def apply_until_restored(
    log: UndoLog, knobs: Knobs, model: nn.Module, in_place_failed: Callable[[Exception], object]
) -> ApplyReport:
    """Do what `apply` does until the log is restored, which the caller does also where this function raises.

    A model that cannot run on fake tensors keeps its activations as written, and `in_place_failed` gets the error.
    """
    return _apply_all(log, knobs, model, None, Reach.FORWARD, in_place_failed)


def _apply_all(
    log: UndoLog,
    knobs: Knobs,
    model: nn.Module,
    sites: Sites | None,
    reach: Reach,
    in_place_failed: Callable[[Exception], object] | None = None,
    device: torch.device | None = None,
) -> ApplyReport:
    adapters.check_names(model, (*knobs.frozen, *knobs.lora, *knobs.checkpoint.layers))
    report = ApplyReport((), (), (*_loop_field_notes(knobs), *micro_batch_notes(knobs, model)))
    changed = knobs.changed()
    for field, apply_field in MODEL_FIELDS.items():
        if field in changed:
            application = Application(log, model, knobs, sites, reach, device or device_of(model), in_place_failed)
            report += apply_field(application)
    return report


class Application(NamedTuple):
    """Arguments of the function that applies one knob."""

    log: UndoLog
    """Restores the model."""
    model: nn.Module
    knobs: Knobs
    sites: Sites | None
    reach: Reach
    device: torch.device
    """Device on which the model runs."""
    in_place_failed: Callable[[Exception], object] | None = None
    """Gets the error of a model that cannot run on fake tensors; None to raise it from the model's call."""


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
    if (knobs.accumulation or 1) == 1 or knobs.mode is Mode.INFERENCE:
        return ()
    if not any(isinstance(module, BatchNorm) for module in model.modules()):
        return ()
    return (Note(NoteKind.BATCH_NORM_PER_MICRO_BATCH),)


def _loop_field_notes(knobs: Knobs) -> Iterator[Note]:
    given = knobs.changed()
    for name in LOOP_FIELDS:
        if name in given:
            yield Note(NoteKind.LOOP_FIELD, (str(Knobs(**{name: given[name]})),))


# --- knobs too small for a module of their own ------------------------------------------------------------------------


def _set_memory_format(application: Application) -> ApplyReport:
    model, log = application.model, application.log
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dim() == 4}
    for tensor in tensors.values():
        log.add(_change_layout, tensor, functools.partial(_with_stride, stride=tensor.stride()))
        _change_layout(tensor, _as_channels_last)
    change_inputs(log, model, _as_channels_last)
    notes = () if tensors else (Note(NoteKind.NO_IMAGE_WEIGHTS),)
    return ApplyReport((Change("memory_format", application.knobs.memory_format),), (), notes)


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


def _offload(application: Application) -> ApplyReport:
    change = Change("offload", application.knobs.offload)
    if application.device.type == "cpu":
        # There `save_on_cpu` keeps the tensor itself, and a result that its own node holds is never freed.
        return ApplyReport((change,), (), (Note(NoteKind.OFFLOAD_ON_CPU),))
    run_forward_inside(application.log, application.model, lambda: torch.autograd.graph.save_on_cpu(pin_memory=True))
    return ApplyReport((change,))


def _set_mode(application: Application) -> ApplyReport:
    for module in application.model.modules():
        application.log.add(setattr, module, "training", module.training)
    application.model.eval()
    run_forward_inside(application.log, application.model, torch.no_grad)
    return ApplyReport((Change("mode", application.knobs.mode),))


MODEL_FIELDS: dict[str, Callable[[Application], ApplyReport]] = {
    "frozen": lambda application: adapters.freeze(application.log, application.model, application.knobs.frozen),
    "lora": lambda application: adapters.add_adapters(
        application.log, application.model, application.knobs.lora, application.knobs.lora_rank
    ),
    "memory_format": _set_memory_format,
    "inplace": lambda application: set_in_place(
        application.log,
        application.model,
        application.knobs.inplace,
        application.sites,
        application.in_place_failed,
    ),
    "offload": _offload,
    "checkpoint": lambda application: set_checkpoints(
        application.log, application.model, application.knobs.checkpoint, application.reach
    ),
    "precision": lambda application: precision.set_precision(
        application.log, application.model, application.knobs.precision, application.device.type
    ),
    "mode": _set_mode,
}
"""Field of `Knobs` -> the function that applies it to a model; the functions run in this order.

Adapters come before what wraps the forward of modules. A later function wraps outside an earlier one: the hooks of
`offload` are inside those of `checkpoint="norms"` and get the saved tensors first.
"""
