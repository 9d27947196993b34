"""Ordinary loops of accelerate, transformers' Trainer and Lightning as one rank of eight: shards, steps, gathers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import accelerate
import pytest
import pytorch_lightning
import torch
import transformers
from accelerate.state import AcceleratorState
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import memexplore as mx
from tests.integrations.trainers import BATCH, Module, Samples, arguments, loader, net, sgd

WORLD = 8
STEPS = 3
WEIGHT = 256 * 256 * 4
"""Bytes of the larger weight of the small perceptron (trainers.py)."""
LAYER = 64 * 64 * 4
"""Bytes of the query projection of the small Llama."""


@pytest.fixture(autouse=True)
def last_rank(request: pytest.FixtureRequest) -> Iterator[None]:
    # As a program may have trained on the CPU before.
    own = dict(accelerate.Accelerator(cpu=True).state.__dict__)
    before = dict(os.environ)
    with mx.virtual("H100", world=WORLD, rank=WORLD - 1):
        yield
    # What the libraries set is not there for the next block.
    assert accelerate.Accelerator(cpu=True).state.__dict__ == own
    AcceleratorState._reset_state(reset_partial_state=True)
    assert {name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))} <= before.keys()


def llama() -> transformers.LlamaForCausalLM:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1000,
        )
    )


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Texts of 16 tokens."""

    def __len__(self) -> int:
        return WORLD * STEPS * 2

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((16,), index), "labels": torch.full((16,), index)}


def local(parameter: torch.Tensor) -> int:
    """Bytes of a parameter on this rank."""
    shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return shard.untyped_storage().nbytes()


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_accelerate_trains_with_ddp_and_gathers_metrics(precision):
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
    assert (accelerator.num_processes, accelerator.process_index, accelerator.device.index) == (8, 7, 7)
    model = net()
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader(2 * STEPS * WORLD))
    assert len(batches) == 2 * STEPS
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.gather_for_metrics(batch["labels"]).shape == (WORLD * BATCH,)
    accelerator.end_training()


@pytest.mark.parametrize("options", [{}, {"cpu_ram_efficient_loading": True}, {"activation_checkpointing": True}])
def test_accelerate_shards_with_fsdp2(options):
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **options,
    )
    accelerator = accelerate.Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
    model = llama()
    batches = torch.utils.data.DataLoader(Texts(), batch_size=2)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), batches)
    weights = [p for name, p in model.named_parameters() if name.endswith("q_proj.weight")]
    assert [local(weight) for weight in weights] == [LAYER // WORLD] * 2
    for batch in batches:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert local(optimizer.state[weights[0]]["exp_avg"]) == LAYER // WORLD


def test_the_trainer_of_transformers_runs_ddp(tmp_path: Path):
    running = transformers.Trainer(
        net(),
        arguments(tmp_path, eval_strategy="epoch", save_strategy="epoch"),
        train_dataset=Samples(STEPS * BATCH * WORLD),
        eval_dataset=Samples(BATCH),
    )
    running.train()
    assert running.state.global_step == STEPS
    assert isinstance(running.model_wrapped, torch.nn.parallel.DistributedDataParallel)


def test_the_trainer_of_transformers_runs_fsdp2(tmp_path: Path):
    config = {"version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    running = transformers.Trainer(
        llama(),
        arguments(tmp_path, per_device_train_batch_size=2, bf16=True, fsdp="full_shard auto_wrap", fsdp_config=config),
        train_dataset=Texts(),
    )
    running.train()
    assert running.state.global_step == STEPS
    assert local(running.model.model.layers[0].self_attn.q_proj.weight) == LAYER // WORLD


def lightning(strategy: object, folder: Path, **options: object) -> pytorch_lightning.Trainer:
    return pytorch_lightning.Trainer(
        strategy=strategy,
        accelerator="gpu",
        devices=WORLD,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        **options,
    )


def test_lightning_runs_ddp_and_saves_a_checkpoint(tmp_path: Path):
    running = lightning("ddp", tmp_path)
    running.fit(Module(), loader(STEPS * WORLD), loader(WORLD))
    assert running.global_step == STEPS


class Sharded(Module):
    """The perceptron with tensor parallelism over two GPUs and FSDP2 over four."""

    def configure_model(self) -> None:
        """Shard the layers, as Lightning asks for."""
        mesh = self.device_mesh
        parallelize_module(self.body, mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(self.body, mesh=mesh["data_parallel"])

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return F.cross_entropy(self.body(batch["x"]), batch["labels"])


def test_lightning_runs_tensor_parallelism_and_fsdp2(tmp_path: Path):
    running = lightning(
        ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=2), tmp_path, enable_checkpointing=False
    )
    module = Sharded()
    running.fit(module, loader(STEPS * 4))
    assert running.global_step == STEPS
    assert local(module.body[0].weight) == WEIGHT // WORLD
