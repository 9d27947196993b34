"""What a watched run hands its loop: autocast, micro-batches and backward as the knobs in effect say.

While no knob is switched, every function does exactly what a plain loop does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from memexplore.live.control import Control
from memexplore.live.parts import parts_of, samples_of
from memexplore.live.setting import inner
from memexplore.run.knobs.applying.forward import device_of
from memexplore.run.knobs.precision import CASTS, Precision

_NO_SAMPLES = "live.micro_batches found no tensor in the batch that has several samples along its first dimension"
_FIELDS = {
    frozenset({"autocast"}): "precision",
    frozenset({"autocast", "backward", "step"}): "fp16",
    frozenset({"micro_batches", "backward"}): "accumulation",
}
"""Functions that a loop calls -> what it then follows (`Knob.asks_loop_for`)."""


class InLoop:
    """The functions of `Live` that a loop calls, so that precision and accumulation can be switched while it runs.

    ```python
    with mx.watch(model, optimizer) as live:
        for batch in loader:
            for inputs, targets in live.micro_batches(batch):
                with live.autocast():
                    loss = criterion(model(inputs), targets)
                live.backward(loss)
            live.step(optimizer)
            optimizer.zero_grad()
    ```
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._called: set[str] = set()
        self._scaler: Any = None
        self._is_scaled = False
        """Whether gradients since the last step were scaled."""
        self._must_update = False
        """Whether an optimizer has stepped since the scale was last adapted."""

    def _uses(self, function: str) -> None:
        if function not in self._called:
            self._called.add(function)
            self.follows(*(field for functions, field in _FIELDS.items() if functions <= self._called))

    def follows(self, *fields: str) -> None:
        """Say that the loop follows `applied` in fields of the training loop, which are then no longer locked.

        For loops of other libraries: ``accumulation``, ``precision``, and ``fp16`` if the loop scales its gradients.
        """
        self._control.loop |= frozenset(fields)

    def autocast(self, written: torch.dtype | None = None) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast of the precision in effect, for the forward pass and the loss.

        `written` is the dtype of the autocast while no precision is switched on, by default none.
        """
        self._uses("autocast")
        dtype = self._dtype(written)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self._device().type, dtype=dtype)

    def _dtype(self, written: torch.dtype | None) -> torch.dtype | None:
        precision = self._control.setting.knobs.precision
        return written if precision is Precision.AS_WRITTEN else CASTS.get(precision)

    def _device(self) -> torch.device:
        models = self._control.models()
        return device_of(inner(models[0])) if models else device_of(torch.nn.Identity())

    def micro_batches(self, batch: Any) -> Iterator[Any]:
        """Yield a batch in as many parts as the accumulation in effect says; without one the batch itself.

        A batch is a tensor, or tensors in tuples, lists, mappings, NamedTuples or dataclasses; those with as many
        samples as the first are split along their first dimension, and a mapping becomes a dict. The parts differ by
        one sample at most, also those of a smaller last batch. `backward` weighs a part by its samples, so gradients
        are as for the whole batch where the loss is a mean over samples.
        """
        self._uses("micro_batches")
        count = self._control.setting.knobs.accumulation or 1
        samples = samples_of(batch) if count > 1 else 0
        if count > 1 and samples < 2:
            if not samples:
                self._control.fail(_NO_SAMPLES)
            count = 1
        if count == 1:
            yield batch
            return
        try:
            for part, self._control.share in parts_of(batch, count):
                yield part
        finally:
            self._control.share = 1.0

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run the backward pass of a loss, weighed by the share of its micro-batch, and scaled in fp16.

        `options` are the options of `torch.Tensor.backward`.
        """
        self._uses("backward")
        if self._control.share != 1.0:
            loss = loss * self._control.share
        try:
            self._is_scaled = self._control.setting.knobs.precision is Precision.FP16
            if self._is_scaled:
                loss = self._scaled(loss)
            loss.backward(**options)  # type: ignore[no-untyped-call]
        except Exception as error:
            self._control.fail(error)
            raise

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler(loss.device.type)
        if self._must_update:
            # Not right after a step: another optimizer may step with gradients of the same scale.
            self._scaler.update()
            self._must_update = False
        scaled: torch.Tensor = self._scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale of fp16; call it before gradients are clipped or read."""
        if self._is_scaled:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step an optimizer; return whether it stepped, which it does not where gradients of fp16 are not finite."""
        self._uses("step")
        if not self._is_scaled:
            optimizer.step()
            return True
        stepped: list[bool] = []
        hook = optimizer.register_step_post_hook(lambda *_: stepped.append(True))
        try:
            self._scaler.step(optimizer)
        finally:
            hook.remove()
            self._must_update = True
        return bool(stepped)
