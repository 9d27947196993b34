"""Train a model for some steps, as a `Step` and its knobs say: micro-batches, autocast, gradient scaler, optimizer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from memexplore.run.knobs.applying.apply import changes_of_loop, loop_of, notes_on, training_loop_scope
from memexplore.run.knobs.applying.forward import device_of
from memexplore.run.knobs.applying.loop import Loop
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.knobs import Knobs, refuse_conflicts
from memexplore.run.programs import batches, optimizers
from memexplore.run.programs.parallel import Parallel

if TYPE_CHECKING:
    from memexplore.run.programs.step import Step


def to_device(batch: Any, device: torch.device, loop: Loop) -> Any:
    """Return a batch on a device, in the dtype and the memory format of a loop.

    >>> to_device((torch.ones(2), torch.tensor(3)), torch.device("cpu"), Loop(2, dtype=torch.bfloat16))
    (tensor([1., 1.], dtype=torch.bfloat16), tensor(3))
    """

    def moved(value: torch.Tensor) -> torch.Tensor:
        value = value.to(device, dtype=loop.dtype if value.is_floating_point() else None)
        is_image = loop.memory_format is not None and value.dim() == 4
        return value.to(memory_format=loop.memory_format) if is_image else value

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
    """Train a model on its device with the loop's knobs; the model's knobs are applied (`apply.of_model_in_loop`).

    The loss of a micro-batch is divided by their number, so the gradients are as for the whole batch where the loss
    is a mean over samples. `steps` yields once for each step, and is advanced when the step before has ended.
    Into `kept` go the objects that have to outlive a recording: the optimizer, the scaler and the last loss.
    `ends_before` is called before each update with the optimizer, and ends the training there by returning True.
    `across` is the model on several GPUs; `batch` is then the batch of each GPU.

    >>> from memexplore.run.programs.step import Step
    >>> step = Step(torch.nn.Linear(4, 1), torch.ones(8, 4), loss=torch.mean)
    >>> kept = []
    >>> train(step, Knobs(batch=6, accumulation=3, optimizer="SGD"), step.model, range(1), kept).texts
    ('batch of 6', 'accumulation over 3 micro-batches of 2', 'SGD')

    Raises ValueError for knobs that contradict each other or do not suit the step.
    """
    refuse_conflicts(knobs)
    loop = loop_of(knobs, step.batch_size)
    batch = step.batch_of(knobs.batch, loop.input_size)
    count, device = loop.micro_batches, device_of(model) if across is None else torch.device("cuda", 0)
    called = model if across is None else across.model
    report = ApplyReport(changes_of_loop(knobs, loop), (), notes_on(knobs, model))
    loss: list[torch.Tensor] = []
    if not loop.trains:
        for _ in steps:
            with torch.no_grad(), training_loop_scope(knobs, device):
                for part in step.micro_batches(batch, count, knobs.batch):
                    part = to_device(part, device, loop)
                    for _ in _losses(step, loop, called, part, device, loss):
                        pass
        kept += loss
        return report
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise ValueError("no weight of the model trains: leave some layer out of frozen=, or set mode='inference'")
    scaler = torch.amp.GradScaler(device.type, enabled=loop.scales_loss)
    with contextlib.ExitStack() as stack:
        stack.enter_context(training_loop_scope(knobs, device))
        optimizer = None
        if loop.updates_in_backward:
            kept.append(stack.enter_context(_stepping_in_backward(step, knobs, weights)))
        else:
            optimizer = optimizers.make(step.optimizer, knobs, weights, across and across.weights)
            optimizer = optimizer if across is None else across.optimizer(optimizer)
            kept += [optimizer, scaler]
        for _ in steps:
            left = count
            for part in step.micro_batches(batch, count, knobs.batch):
                part, left = to_device(part, device, loop), left - 1
                with across.unsynchronised() if across is not None and left else contextlib.nullcontext():
                    for _ in _losses(step, loop, called, part, device, loss):
                        scaler.scale(loss[0]).backward()
            if optimizer is not None:
                if ends_before(optimizer):
                    break
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=not loop.zero_gradients)
    kept += loss
    return report


def _losses(
    step: Step, loop: Loop, model: torch.nn.Module, part: Any, device: torch.device, loss: list[torch.Tensor]
) -> Iterator[None]:
    """Put each loss of a micro-batch into `loss`, divided by the number of micro-batches, and yield after each.

    The list holds a loss until the next one is computed, as the variable of a script does. Nothing else holds it.
    """
    share = loop.micro_batches if loop.trains else 1
    with _around_forward(loop, device):
        computed = [step.loss_of(model, part)]
        several = computed.pop() if isinstance(computed[0], Iterator) else iter(())
        more = _moved(computed, loss, share) or _moved(list(itertools.islice(several, 1)), loss, share)
    while more:
        yield
        with _around_forward(loop, device):
            more = _moved(list(itertools.islice(several, 1)), loss, share)


def _moved(computed: list[torch.Tensor], loss: list[torch.Tensor], share: int) -> bool:
    """Move the one tensor of `computed`, divided, into `loss`; return False where `computed` is empty."""
    if computed:
        loss[:] = [computed.pop() if share == 1 else computed.pop() / share]
        return True
    return False


def _around_forward(loop: Loop, device: torch.device) -> contextlib.ExitStack:
    with contextlib.ExitStack() as stack:
        for context in loop.around_forward:
            stack.enter_context(context(device.type))
        return stack.pop_all()


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
