"""`TransformersCallback`: a callback of `transformers.Trainer` that watches its training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memexplore.integrations.fits import Fits, fitting, missing, share_of
from memexplore.torch_internals.modules import is_compiled

try:
    import transformers
except ImportError as error:
    raise missing("transformers", "transformers") from error


class TransformersCallback(Fits, transformers.TrainerCallback):
    """Watch the training of a `transformers.Trainer`: ``Trainer(..., callbacks=[TransformersCallback()])``.

    The options are those of `memexplore.watch`. The knobs of `live` work: accumulation, and precision (but for fp16)
    unless the trainer has one of its own. Steps are counted from the begin of `train()`, resumed ones too; a batch size
    that `auto_find_batch_size` tries begins a new run. A second training writes to ``FOLDER-2``.
    """

    # With `auto_find_batch_size` an out-of-memory error ends the second, and the first calls it again.
    methods = ("train", "_inner_training_loop")

    @staticmethod
    def trainers() -> tuple[type, ...]:
        """Return the class of trainers."""
        return (transformers.Trainer,)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        model, wrapped = kwargs["model"], getattr(fitting(), "model_wrapped", None)
        # Layers have their names in the model itself, but only the wrapper shows that it is compiled.
        self.begin(wrapped if wrapped is not None and is_compiled(wrapped) else model, kwargs.get("optimizer"))
        self._follow(fitting())

    def _follow(self, trainer: Any) -> None:
        """Let the trainer follow the knobs precision and accumulation."""
        if not isinstance(trainer, transformers.Trainer) or trainer.is_deepspeed_enabled or trainer.args.n_gpu > 1:
            return
        live = self.live
        train, context = trainer.training_step, trainer.compute_loss_context_manager

        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            total: Any = 0.0
            for part in live.micro_batches(inputs):
                if part is inputs:
                    return train(model, inputs, num_items_in_batch)
                # A loss over a given number of items is a sum: those of the parts add up as they are.
                share = 1.0 if _is_sum(trainer, num_items_in_batch) else share_of(part, inputs)
                with _weighed(trainer.accelerator, share):
                    total = total + share * train(model, part, num_items_in_batch)
            return total

        def compute_loss_context_manager() -> contextlib.ExitStack:
            stack = context()
            stack.enter_context(live.autocast())
            return stack

        self.replace(trainer, "training_step", training_step)
        live.follows("accumulation")
        if trainer.accelerator.mixed_precision == "no":
            self.replace(trainer, "compute_loss_context_manager", compute_loss_context_manager)
            live.follows("precision")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End watching."""
        self.end()


def _is_sum(trainer: Any, items: Any) -> bool:
    """Return whether the loss was divided by the items of all batches of the step, as `training_step` decides."""
    if getattr(trainer, "loss_is_scaled_for_ga", None) is not None:
        return bool(trainer.loss_is_scaled_for_ga)
    return (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None


@contextlib.contextmanager
def _weighed(accelerator: Any, share: float) -> Iterator[None]:
    """Weigh the losses of backward passes in the block."""
    backward = accelerator.backward
    accelerator.backward = lambda loss, **options: backward(loss * share, **options)
    try:
        yield
    finally:
        del accelerator.backward
