"""Scenarios with knobs: runs of the explorer, measured on a real GPU and predicted."""

import torch.nn.functional as F

from tests.gpu.models import (
    Mlp,
    ResNet,
    Transformer,
)
from tests.gpu.training import images, scenario, sentences, token_loss, vectors


def with_knobs(model, data, loss, **settings):
    """Train two steps with knobs, with the code that the explorer runs on real and virtual GPUs."""
    from memexplore.run.knobs.applying.apply import apply, of_model_in_loop
    from memexplore.run.knobs.knobs import Knobs
    from memexplore.run.programs import training_loop
    from memexplore.run.programs.step import Step

    knobs = Knobs(**settings)
    model.cuda()
    kept = []
    with apply(of_model_in_loop(knobs), model):
        training_loop.train(Step(model, data, loss=loss), knobs, model, range(2), kept)


def on_host(batch):
    return tuple(tensor.cpu() for tensor in batch)


@scenario()
def knobs_mlp_fused_accumulated():
    with_knobs(Mlp(), on_host(vectors()), F.cross_entropy, update="fused", accumulation=4)


@scenario()
def knobs_mlp_optimizer_in_backward():
    with_knobs(Mlp(), on_host(vectors()), F.cross_entropy, optimizer="Adam", update="in backward")


@scenario()
def knobs_mlp_lora():
    with_knobs(Mlp(), on_host(vectors()), F.cross_entropy, lora=("layers.0", "layers.2"))


@scenario()
def knobs_mlp_offloaded():
    with_knobs(Mlp(), on_host(vectors()), F.cross_entropy, offload="saved tensors on the CPU")


@scenario()
def knobs_resnet_channels_last_fp16():
    with_knobs(ResNet(), on_host(images()), F.cross_entropy, memory_format="channels last", precision="fp16")


@scenario()
def knobs_resnet_inference():
    with_knobs(ResNet(), on_host(images()), F.cross_entropy, mode="inference", batch=16)


@scenario()
def knobs_transformer_checkpointed_bf16():
    with_knobs(Transformer(), on_host(sentences()), token_loss, checkpoint="every 1", precision="bf16")


@scenario()
def knobs_transformer_keeping_matmuls():
    with_knobs(Transformer(), on_host(sentences()), token_loss, checkpoint="keep matmuls")


@scenario()
def knobs_transformer_all_bf16():
    with_knobs(Transformer(), on_host(sentences()), token_loss, precision="all bf16", optimizer="Adafactor")
