"""One loop of 30 steps under plain torch, transformers' Trainer, Lightning and accelerate, on a virtual T4."""

from __future__ import annotations

import accelerate
import pytest
import torch
import transformers

import memexplore as mx
from memexplore.integrations import LightningCallback, TransformersCallback, watch_accelerator
from memexplore.live.live import State
from tests.integrations.trainers import BATCH, WIDTH, Module, Samples, arguments, lightning, loader, net, sgd

STEPS = 30
SCALAR = 512
"""Bytes of the block of a scalar."""


def plain(accumulation=1):
    model = net().cuda()
    optimizer = sgd(model)
    with mx.watch(model, optimizer, first=2) as live:
        for number, batch in enumerate(loader(STEPS, accumulation), 1):
            batch = {name: value.cuda() for name, value in batch.items()}
            loss = model(**batch)["loss"]
            loss.backward()
            if number % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
            del loss, batch
    return live


def trainer(tmp_path, accumulation=1, **options):
    callback = TransformersCallback(first=2)
    model = net()
    count = STEPS * accumulation * BATCH
    running = transformers.Trainer(
        model,
        arguments(tmp_path, gradient_accumulation_steps=accumulation, **options),
        train_dataset=Samples(count),
        eval_dataset=Samples(2 * BATCH),
        optimizers=(sgd(model), None),
        callbacks=[callback],
    )
    running.train()
    assert running.state.global_step == STEPS
    return callback.live


def fit(accumulation=1, **options):
    callback = LightningCallback(first=2)
    running = lightning(callback, accumulate_grad_batches=accumulation, **options)
    running.fit(Module(), loader(STEPS, accumulation), loader(2) if "val_check_interval" in options else None)
    assert running.global_step == STEPS
    return callback.live


def accelerated(accumulation=1, **options):
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulation, **options)
    model = net()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader(STEPS, accumulation))
    with watch_accelerator(accelerator, first=2) as live:
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            del loss, batch
    return live


def run(kind, tmp_path, **options):
    with mx.virtual("T4"):
        loop = {"plain": plain, "lightning": fit, "accelerate": accelerated}.get(kind)
        return loop(**options) if loop is not None else trainer(tmp_path, **options)


KINDS = pytest.mark.parametrize("kind", ["trainer", "lightning", "accelerate"])


@KINDS
def test_steps_and_peaks_are_those_of_the_plain_loop(kind, tmp_path):
    own, live = run("plain", tmp_path), run(kind, tmp_path)
    assert live.state is State.ENDED
    rows, expected = live.steps(), own.steps()
    assert rows["step"].tolist() == list(range(1, STEPS + 1))
    # All keep a copy of the loss, Trainer also the sum of the losses and the number of items; which of these exist at
    # the peak depends on the release of torch.
    most = {"trainer": 4, "lightning": 2, "accelerate": 1}[kind]
    more = (rows["peak_allocated"] - expected["peak_allocated"]).tolist()
    assert set(more) <= {scalars * SCALAR for scalars in range(most + 1)}
    assert rows["peak_reserved"].tolist() == expected["peak_reserved"].tolist()
    assert rows["recorded"].tolist()[:2] == ["first steps"] * 2


@KINDS
def test_accumulated_batches_are_micro_batches_of_one_step(kind, tmp_path):
    rows = run(kind, tmp_path, accumulation=3).steps()
    assert rows["step"].tolist() == list(range(1, STEPS + 1))
    assert rows["micro_batches"].tolist() == [3] * STEPS


def test_validation_of_the_trainer_is_marked(tmp_path):
    rows = run("trainer", tmp_path, eval_strategy="steps", eval_steps=10).steps().set_index("step")
    # Two batches after the steps 10 and 20, which belong to the next steps; those after step 30 to none.
    assert rows["evaluations"].loc[[11, 21]].tolist() == [2, 2]
    assert rows["evaluations"].sum() == 4


def test_validation_of_lightning_is_marked(tmp_path):
    rows = run("lightning", tmp_path, val_check_interval=10).steps().set_index("step")
    assert rows["evaluations"].loc[[11, 21]].tolist() == [2, 2]
    assert rows["evaluations"].sum() == 4


def test_layers_have_their_names_in_the_model(tmp_path):
    for kind in ("trainer", "lightning", "accelerate"):
        layers = run(kind, tmp_path).layers()
        # ReLU keeps its result, float32 of the batch.
        assert layers.loc["body.1"].max() == BATCH * WIDTH * 4


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_with_and_without_a_scaler(precision, tmp_path):
    for live in (
        run("trainer", tmp_path, **{precision: True}),
        run("lightning", tmp_path, precision={"fp16": "16-mixed", "bf16": "bf16-mixed"}[precision]),
        run("accelerate", tmp_path, mixed_precision=precision),
    ):
        assert live.steps()["step"].tolist() == list(range(1, STEPS + 1))
        assert live.state is State.ENDED


def test_activation_checkpointing_of_the_trainer_counts_each_call_once(tmp_path):
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    samples = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 16
    callback = TransformersCallback()
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    options = arguments(tmp_path, per_device_train_batch_size=4, use_cpu=True, **{name: True})
    transformers.Trainer(model, options, train_dataset=samples, callbacks=[callback]).train()
    assert callback.live.steps()["micro_batches"].tolist() == [1] * 4
