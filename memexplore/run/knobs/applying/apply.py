"""Application of knobs to a model for a block, with a report of the changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from memexplore.run.knobs.applying.forward import device_of
from memexplore.run.knobs.applying.layer_names import check_names
from memexplore.run.knobs.applying.loop import Loop
from memexplore.run.knobs.applying.report import ApplyReport, Change
from memexplore.run.knobs.applying.scope import Reach, open_scope, without
from memexplore.run.knobs.applying.undo import UndoLog, undone_after
from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.run.knobs.knob import Application
from memexplore.run.knobs.knobs import KNOBS, Knobs, in_stages, layers_of


def apply(knobs: Knobs, model: nn.Module, sites: Sites | None = None) -> contextlib.AbstractContextManager[ApplyReport]:
    """Apply knobs to a model for a block, and restore the model afterwards, also after an exception or an interrupt.

    The model is on the CPU, a GPU or a virtual one; other models, the loss and other threads are unaffected (see
    `knobs.scope`). `sites` are the activations that may overwrite their input (`inplace.legal_sites`); without them the
    model's first call is run on fake tensors to find them. Make the optimizer inside the block: weights may be new or
    of another dtype there. Knobs of the training loop are left to the loop, with a note for each.

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
    check_names(model, layers_of(knobs))
    report = ApplyReport((), (), (*_notes_of_loop(knobs), *notes_on(knobs, model)))
    application = Application(log, model, knobs, sites, reach, device or device_of(model), in_place_failed)
    for knob, value in in_stages(knobs):
        if knob.changes_model:
            report += knob.apply(value, application)
    return report


def _notes_of_loop(knobs: Knobs) -> Iterator[str]:
    for name, value in knobs.changed().items():
        if not KNOBS[name].changes_model and not KNOBS[name].part_of:
            yield f"{KNOBS[name].text(value)} belongs to the training loop: apply changes only the model."


def notes_on(knobs: Knobs, model: nn.Module) -> tuple[str, ...]:
    """Return what a setting means for a model, as sentences, such as that batch norm sees single micro-batches."""
    return tuple(note for knob, value in in_stages(knobs) for note in knob.notes(value, model, knobs))


def of_model(knobs: Knobs) -> Knobs:
    """Return the knobs of a setting that change a model.

    >>> of_model(Knobs(batch=4, offload="saved tensors on the CPU")).changed()
    {'offload': <Offload.SAVED_TENSORS: 'saved tensors on the CPU'>}
    """
    return Knobs(
        **{name: value for name, value in knobs.changed().items() if KNOBS[KNOBS[name].part_of or name].changes_model}
    )


def of_model_in_loop(knobs: Knobs) -> Knobs:
    """Return the knobs that change a model in a loop which follows the others (`programs.training_loop`).

    Autocast is one of the others: in the loop it covers the loss as well.

    >>> print(of_model_in_loop(Knobs(precision="bf16", batch=4, frozen="0")))
    frozen 0
    """
    own = of_model(knobs)
    return own.replace(**{name: KNOBS[name].of_model(value) for name, value in own.changed().items()})


def loop_of(knobs: Knobs, samples: int) -> Loop:
    """Return the parts of a training loop that a setting asks for; as written a batch has some number of samples.

    >>> loop_of(Knobs(batch=6, accumulation=3), 8).micro_batches
    3
    """
    loop = Loop(samples)
    for knob, value in in_stages(knobs):
        knob.change_loop(value, loop)
    return loop


def changes_of_loop(knobs: Knobs, loop: Loop) -> tuple[Change, ...]:
    """Return what a setting has changed in a loop (`loop_of`)."""
    texts = {knob.name: knob.phrase_in_loop(value, loop) for knob, value in in_stages(knobs)}
    return tuple(Change(name, text) for name, text in texts.items() if text)


@contextlib.contextmanager
def training_loop_scope(knobs: Knobs, device: torch.device) -> Iterator[None]:
    """Extend to a whole training loop what `apply` switches off in a model's forward.

    Inside the block, in this thread, the checkpoints and the autocast of the loop's own code, such as a loss function,
    are switched off where the knobs say so for the model.
    """
    off = [feature for knob, value in in_stages(knobs) for feature in knob.off(value)]
    if not off:
        yield
        return
    with undone_after(lambda log: open_scope(log, *off)) as scope, without(scope, device.type):
        yield
