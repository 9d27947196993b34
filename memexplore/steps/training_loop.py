"""The training loop of a step: micro-batches, autocast, gradient scaler, optimizer.

In: a `Step`, `Knobs` and a model on its device. Out: the model is trained for some steps; a report of the loop's knobs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from memexplore.knobs.apply import micro_batch_notes, of_model, training_loop_scope
from memexplore.knobs.choices import MemoryFormat, Mode, Precision, Update, ZeroGrad
from memexplore.knobs.conflicts import refuse_conflicts
from memexplore.knobs.facts import Change, Count, Unit
from memexplore.knobs.forward import device_of
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.precision import AUTOCAST
from memexplore.knobs.report import ApplyReport
from memexplore.steps import batches, optimizers
from memexplore.steps.parallel import Parallel
from memexplore.steps.step import Step


def knobs_to_apply(knobs: Knobs) -> Knobs:
    """Return the knobs that `apply` applies to the model; `train` handles the others.

    Autocast is one of the others: in the loop it covers the loss as well.

    >>> print(knobs_to_apply(Knobs(precision="bf16", batch=4, frozen="0")))
    frozen 0
    """
    own = of_model(knobs)
    return own.replace(precision=Precision.AS_WRITTEN) if own.precision in AUTOCAST else own


def to_device(batch: Any, device: torch.device, knobs: Knobs | None = None) -> Any:
    """Return a batch on a device, in the dtype and the memory format that the knobs give to a model's inputs.

    >>> to_device((torch.ones(2), torch.tensor(3)), torch.device("cpu"), Knobs(precision="all bf16"))
    (tensor([1., 1.], dtype=torch.bfloat16), tensor(3))
    """
    knobs = knobs or Knobs()

    def moved(value: torch.Tensor) -> torch.Tensor:
        lower = knobs.precision is Precision.ALL_BF16 and value.is_floating_point()
        value = value.to(device, torch.bfloat16) if lower else value.to(device)
        last = knobs.memory_format is MemoryFormat.CHANNELS_LAST and value.dim() == 4
        return value.to(memory_format=torch.channels_last) if last else value

    return batches.mapped(moved, batch)


def train(
    step: Step,
    knobs: Knobs,
    model: torch.nn.Module,
    steps: Iterable[int],
    kept: list[Any],
    ends_before: Callable[[torch.optim.Optimizer], bool] = lambda _: False,
    across: Parallel | None = None,
) -> ApplyReport:
    """Train a model on its device with the loop's knobs; `apply` has applied those of the model (`knobs_to_apply`).

    The loss of a micro-batch is divided by their number, so the gradients are those of the whole batch where the loss
    is a mean over samples. `steps` yields once for each step, and is advanced when the step before has ended.
    Into `kept` go the objects that have to outlive a recording: the optimizer, the scaler and the last loss.
    `ends_before` is called before each update with the optimizer, and ends the training there by returning True.
    `across` is the model on several GPUs; `batch` is then that of each.

    >>> step = Step(torch.nn.Linear(4, 1), torch.ones(8, 4), loss=torch.mean)
    >>> kept = []
    >>> train(step, Knobs(batch=6, accumulation=3, optimizer="SGD"), step.model, range(1), kept).texts
    ('batch of 6', '3 micro-batches of 2', 'SGD')

    Raises ValueError for knobs that contradict each other or do not suit the step.
    """
    refuse_conflicts(knobs)
    batch = step.batch_of(knobs.batch, knobs.input_size)
    count, device = knobs.accumulation or 1, device_of(model) if across is None else torch.device("cuda", 0)
    called = model if across is None else across.model
    report = ApplyReport(tuple(_changes(step, knobs)), (), micro_batch_notes(knobs, model))
    loss: list[torch.Tensor] = []
    if knobs.mode is Mode.INFERENCE:
        for _ in steps:
            with torch.no_grad(), training_loop_scope(knobs, device):
                for part in step.micro_batches(batch, count, knobs.batch):
                    part = to_device(part, device, knobs)
                    for _ in _losses(step, knobs, called, part, device, loss):
                        pass
        kept += loss
        return report
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise ValueError("no weight of the model trains: leave some layer out of frozen=, or set mode='inference'")
    keeps_zeros = knobs.zero_grad is ZeroGrad.TO_ZERO
    scaler = torch.amp.GradScaler(device.type, enabled=knobs.precision is Precision.FP16)
    with contextlib.ExitStack() as stack:
        stack.enter_context(training_loop_scope(knobs, device))
        optimizer = None
        if knobs.update is Update.IN_BACKWARD:
            kept.append(stack.enter_context(_stepping_in_backward(step, knobs, weights)))
        else:
            optimizer = optimizers.make(step.optimizer, knobs, weights, across and across.weights)
            optimizer = optimizer if across is None else across.optimizer(optimizer)
            kept += [optimizer, scaler]
        for _ in steps:
            left = count
            for part in step.micro_batches(batch, count, knobs.batch):
                part, left = to_device(part, device, knobs), left - 1
                with across.unsynchronised() if across is not None and left else contextlib.nullcontext():
                    for _ in _losses(step, knobs, called, part, device, loss):
                        scaler.scale(loss[0]).backward()
            if optimizer is not None:
                if ends_before(optimizer):
                    break
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=not keeps_zeros)
    kept += loss
    return report


def _losses(
    step: Step, knobs: Knobs, model: torch.nn.Module, part: Any, device: torch.device, loss: list[torch.Tensor]
) -> Iterator[None]:
    """Put each loss of a micro-batch into `loss`, divided by the number of micro-batches, and yield after each.

    The list holds a loss until the next one is computed, as the variable of a script does. Nothing else holds it.
    """
    share = 1 if knobs.mode is Mode.INFERENCE else knobs.accumulation or 1
    with _casting(knobs, device):
        computed = [step.loss_of(model, part)]
        several = computed.pop() if isinstance(computed[0], Iterator) else iter(())
        more = _moved(computed, loss, share) or _moved(list(itertools.islice(several, 1)), loss, share)
    while more:
        yield
        with _casting(knobs, device):
            more = _moved(list(itertools.islice(several, 1)), loss, share)


def _moved(computed: list[torch.Tensor], loss: list[torch.Tensor], share: int) -> bool:
    """Move the one tensor of `computed`, divided, into `loss`; return False where `computed` is empty."""
    if computed:
        loss[:] = [computed.pop() if share == 1 else computed.pop() / share]
        return True
    return False


def _casting(knobs: Knobs, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if knobs.precision not in AUTOCAST:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=AUTOCAST[knobs.precision])


@contextlib.contextmanager
def _stepping_in_backward(
    step: Step, knobs: Knobs, weights: list[torch.nn.Parameter]
) -> Iterator[dict[torch.Tensor, torch.optim.Optimizer]]:
    """Update each weight as soon as its gradient is computed, and free the gradient at once.

    Source: the tutorial "How to save memory by fusing the optimizer step into the backward pass" of pytorch.org.
    """
    own: dict[torch.Tensor, torch.optim.Optimizer] = {
        weight: optimizers.make(step.optimizer, knobs, [weight]) for weight in weights
    }

    def update(weight: torch.Tensor) -> None:
        own[weight].step()
        own[weight].zero_grad()

    hooks = [weight.register_post_accumulate_grad_hook(update) for weight in weights]
    try:
        yield own
    finally:
        for hook in hooks:
            hook.remove()


def _changes(step: Step, knobs: Knobs) -> Iterator[Change]:
    """Yield the knobs that the loop follows."""
    count = knobs.accumulation or 1
    if knobs.batch is not None:
        yield Change("batch", knobs.batch)
    if count > 1:
        yield Change("accumulation", count, (Count(Unit.SAMPLE, (knobs.batch or step.batch_size) // count),))
    if knobs.input_size is not None:
        yield Change("input_size", knobs.input_size)
    if knobs.precision in AUTOCAST:
        scaled = knobs.precision is Precision.FP16 and knobs.mode is not Mode.INFERENCE
        yield Change("precision", knobs.precision, (Count(Unit.GRAD_SCALER, 1),) if scaled else ())
    if knobs.mode is Mode.INFERENCE:
        return
    changed = knobs.changed()
    for field in ("optimizer", "update", "zero_grad"):
        if field in changed:
            yield Change(field, changed[field])
