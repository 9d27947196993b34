"""Knobs that are switched while a trainer of another library trains: same losses, other memory."""

from __future__ import annotations

import pytest
import pytorch_lightning
import torch
import transformers

import memexplore as mx
from memexplore.integrations import LightningCallback, TransformersCallback
from tests.integrations.trainers import BATCH, WIDTH, Module, Net, Samples, arguments, lightning, loader, net, sgd

STEPS = 6
AT = 3
"""The step after which a knob is switched."""
fits = pytest.mark.usefixtures("every_setting_fits")


class Switching(transformers.TrainerCallback):
    def __init__(self, callback, knobs):
        self.callback, self.knobs = callback, knobs

    def on_step_end(self, args, state, control, **kwargs):
        # The next step has begun: the knob acts after it.
        if state.global_step == AT - 1 and self.knobs is not None:
            self.callback.live.predict(self.knobs)
            self.callback.live.knobs = self.knobs


class ItemsNet(Net):
    """A model whose loss is a sum over the items of all batches of a step."""

    def forward(self, x, labels, num_items_in_batch=None, **kwargs):
        logits = self.body(x)
        count = len(labels) if num_items_in_batch is None else num_items_in_batch
        return {"loss": torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / count, "logits": logits}


def trained(tmp_path, knobs, kind=Net, **options):
    torch.manual_seed(0)
    model, callback = kind(), TransformersCallback(first=1)
    trainer = transformers.Trainer(
        model,
        arguments(tmp_path, use_cpu=True, **options),
        train_dataset=Samples(STEPS * BATCH * options.get("gradient_accumulation_steps", 1)),
        optimizers=(sgd(model), None),
        callbacks=[callback, Switching(callback, knobs)],
    )
    result = trainer.train()
    assert "training_step" not in vars(trainer)
    assert "compute_loss_context_manager" not in vars(trainer)
    return callback.live, [value.detach().clone() for value in model.parameters()], result.training_loss


@fits
@pytest.mark.parametrize("kind", [Net, ItemsNet])
@pytest.mark.parametrize("own", [1, 2])
def test_accumulation_under_a_trainer_splits_batches_and_trains_the_same(kind, own, tmp_path):
    _, expected, loss = trained(tmp_path, None, kind, gradient_accumulation_steps=own)
    live, weights, other = trained(tmp_path, mx.Knobs(accumulation=4), kind, gradient_accumulation_steps=own)
    assert live.steps()["micro_batches"].tolist() == [own] * AT + [4 * own] * (STEPS - AT)
    for value, same in zip(weights, expected, strict=True):
        torch.testing.assert_close(value, same, rtol=1e-4, atol=1e-6)
    assert other == pytest.approx(loss, rel=1e-5)


@fits
def test_precision_under_a_trainer_acts_on_the_next_step(tmp_path):
    seen = []

    class Seeing(Net):
        def forward(self, x, labels):
            seen.append(self.body(x).dtype)
            return super().forward(x, labels)

    trained(tmp_path, mx.Knobs(precision="bf16"), Seeing)
    assert seen == [torch.float32] * AT + [torch.bfloat16] * (STEPS - AT)


def test_a_trainer_with_a_precision_of_its_own_keeps_it(tmp_path):
    with pytest.raises(ValueError, match="The loop does not use live"):
        trained(tmp_path, mx.Knobs(precision="bf16"), bf16=True)


class Turning(Module):
    """Switches a knob in a batch, and notes dtypes and losses."""

    def __init__(self, callback, knobs, as_mapping=False):
        super().__init__()
        self.callback, self.knobs, self.as_mapping = callback, knobs, as_mapping
        self.dtypes = []

    def training_step(self, batch, batch_idx):
        if batch_idx == AT - 1 and self.knobs is not None and self.callback.live.knobs != self.knobs:
            self.callback.live.knobs = self.knobs
        loss = super().training_step(batch, batch_idx)
        self.dtypes.append(self.body(batch["x"]).dtype)
        return {"loss": loss, "other": 1} if self.as_mapping else loss


def fitted(knobs, accumulate=1, **options):
    callback = LightningCallback(first=1)
    module = Turning(callback, knobs, **options)
    trainer = lightning(callback, accelerator="cpu", accumulate_grad_batches=accumulate)
    trainer.fit(module, loader(STEPS, accumulate))
    assert "training_step" not in vars(trainer.strategy)
    assert "optimizer_zero_grad" not in vars(module)
    return callback.live, [value.detach().clone() for value in module.parameters()], module


@fits
@pytest.mark.parametrize("as_mapping", [False, True])
def test_accumulation_under_lightning_splits_batches_and_trains_the_same(as_mapping):
    _, expected, _ = fitted(None)
    live, weights, _ = fitted(mx.Knobs(accumulation=4), as_mapping=as_mapping)
    assert live.steps()["micro_batches"].tolist() == [1] * AT + [4] * (STEPS - AT)
    for value, same in zip(weights, expected, strict=True):
        torch.testing.assert_close(value, same, rtol=1e-4, atol=1e-6)


@fits
def test_accumulation_under_lightning_goes_with_its_own():
    _, expected, _ = fitted(None, accumulate=2)
    live, weights, _ = fitted(mx.Knobs(accumulation=4), accumulate=2)
    # The knob is switched in the first batch of the second step: it acts from the third step on.
    assert live.steps()["micro_batches"].tolist() == [2, 2] + [8] * (STEPS - 2)
    for value, same in zip(weights, expected, strict=True):
        torch.testing.assert_close(value, same, rtol=1e-4, atol=1e-6)


@fits
def test_precision_under_lightning_acts_on_the_next_step():
    _, _, module = fitted(mx.Knobs(precision="bf16"))
    assert module.dtypes == [torch.float32] * AT + [torch.bfloat16] * (STEPS - AT)


def test_a_setting_that_is_predicted_with_the_step_takes_less_memory_after_the_switch(tmp_path):
    model = net()
    batch = {"x": torch.zeros(4096, WIDTH), "labels": torch.zeros(4096, dtype=torch.long)}
    callback = TransformersCallback(first=1, step=mx.Step(model, batch, optimizer=sgd(model)))
    with mx.virtual("T4"):
        # 4 096 × 256 float32 of the hidden layer are 4 MiB, and of a fourth of the batch 1 MiB.
        options = arguments(tmp_path, per_device_train_batch_size=4096)
        transformers.Trainer(
            model,
            options,
            train_dataset=Samples(6 * 4096),
            optimizers=(sgd(model), None),
            callbacks=[callback, Switching(callback, mx.Knobs(accumulation=4))],
        ).train()
    peaks = callback.live.steps()["peak_allocated"].tolist()
    assert peaks[AT - 1] - peaks[AT + 1] > 3 << 20
    assert callback.live.changes()["predicted_peak"][0] == pytest.approx(peaks[AT + 1], rel=0.05)


class Predicting(pytorch_lightning.Callback):
    def __init__(self, watching):
        self.watching, self.predictions = watching, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == AT:
            self.predictions.append(self.watching.live.predict(mx.Knobs(accumulation=4), 200))


def test_a_setting_is_predicted_with_the_step_of_a_lightning_module():
    module = Module()
    batch = {"x": torch.zeros(BATCH, WIDTH), "labels": torch.zeros(BATCH, dtype=torch.long)}
    step = mx.Step(module, batch, compute_loss=lambda module, batch: module.training_step(batch, 0), optimizer="adamw")
    callback = LightningCallback(first=1, step=step)
    predicting = Predicting(callback)
    trainer = lightning(callback, accelerator="cpu")
    trainer.callbacks.append(predicting)
    trainer.fit(module, loader(STEPS))
    (found,) = predicting.predictions
    assert found.failed == ""
    assert found.unchanged_peak == pytest.approx(found.measured_peak, rel=0.01)
