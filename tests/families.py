"""Table of model families: constructor, batch, loss and checkpoints of each; all small, nothing is downloaded."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests import family_models as models
from tests import family_sequences as sequences
from tests.models import UNet

Batch = tuple[torch.Tensor, ...]
Losses = Callable[[Any, Batch], Iterator[torch.Tensor]]


class Family(NamedTuple):
    """One kind of model."""

    build: Callable[[], nn.Module]
    batch: Callable[[str], Batch]
    """A batch on a device."""
    losses: Losses
    """The losses of a step, in order: the next one is computed after the backward pass of the one before."""
    checkpoint: Callable[[nn.Module], None]
    """Make a model recompute its repeated blocks in the backward pass."""
    assumed: tuple[str, ...] = ()
    """Assumptions that the tape must note: words of each note, in any order."""


# --- checkpoints ----------------------------------------------------------------------------------------------------


class Form(enum.Enum):
    """The two forms of `torch.utils.checkpoint.checkpoint`; the values are its `use_reentrant`."""

    HOOKS = False
    REENTRANT = True
    """Runs the forward pass without gradients; needs an input that requires grad."""


def blocks(path: str, form: Form = Form.HOOKS) -> Callable[[nn.Module], None]:
    """Checkpoint each child of the module at a path."""

    def wrap(model: nn.Module) -> None:
        for block in model.get_submodule(path).children():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=form.value)

    return wrap


def layers_of(kind: str) -> Callable[[nn.Module], None]:
    """Checkpoint each module whose class has a name, at any path: releases of `transformers` differ."""

    def wrap(model: nn.Module) -> None:
        for module in list(model.modules()):
            if type(module).__name__ == kind:
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)

    return wrap


def both(*wraps: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def wrap(model: nn.Module) -> None:
        for entry in wraps:
            entry(model)

    return wrap


def switch(form: Form = Form.HOOKS) -> Callable[[nn.Module], None]:
    """Enable the gradient checkpointing of a `transformers` model."""
    return lambda model: model.gradient_checkpointing_enable({"use_reentrant": form.value})


# --- batches --------------------------------------------------------------------------------------------------------


def pictures(*shape: int, classes: int = 10) -> Callable[[str], Batch]:
    return lambda device: (torch.randn(shape, device=device), torch.randint(classes, shape[:1], device=device))


def tokens(vocabulary: int, batch: int, length: int) -> Callable[[str], Batch]:
    return lambda device: (torch.randint(vocabulary, (batch, length), device=device),)


def _segmented(device: str) -> Batch:
    return torch.randn(2, 3, 64, 64, device=device), torch.randint(5, (2, 64, 64), device=device)


def _masked(device: str) -> Batch:
    return torch.randn(2, 3, 32, 32, device=device), torch.rand(2, 1, 32, 32, device=device)


def _boxes(device: str) -> Batch:
    corner = torch.rand(2, 5, 2, device=device)
    return (
        torch.randn(2, 3, 64, 64, device=device),
        torch.cat([corner, corner + 0.2], 2),
        torch.randint(4, (2, 5), device=device),
    )


def _graph(device: str) -> Batch:
    return (
        torch.randn(200, 8, device=device),
        torch.randint(200, (2, 1000), device=device),
        torch.randint(5, (200,), device=device),
        torch.rand(200, device=device) < 0.5,
    )


def _visits(device: str) -> Batch:
    return (
        torch.randn(64, 8, device=device),
        torch.randint(500, (4, 192), device=device),
        torch.arange(0, 192, 3, device=device),
        torch.rand(64, device=device),
    )


def _captions(device: str) -> Batch:
    return torch.randint(99, (4, 16), device=device), torch.randn(4, 3, 32, 32, device=device)


def _speech(device: str) -> Batch:
    return torch.randn(2, 80, 60, device=device), torch.randint(100, (2, 12), device=device)


def _sound(device: str) -> Batch:
    return torch.randn(2, 3200, device=device), torch.randint(1, 32, (2, 8), device=device)


def _wave(device: str) -> Batch:
    return torch.randn(4, 1, 128, device=device), torch.randn(4, 1, 128, device=device)


# --- losses ---------------------------------------------------------------------------------------------------------


def classify(model: Any, batch: Batch) -> Iterator[torch.Tensor]:
    output = model(batch[0])
    yield functional.cross_entropy(getattr(output, "logits", output), batch[1])


def tag(model: Any, batch: Batch) -> Iterator[torch.Tensor]:
    yield functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())


def segment(model: Any, batch: Batch) -> Iterator[torch.Tensor]:
    yield functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def visit(model: Any, batch: Batch) -> Iterator[torch.Tensor]:
    yield functional.binary_cross_entropy_with_logits(model(*batch[:3]), batch[3])


def regress(model: Any, batch: Batch) -> Iterator[torch.Tensor]:
    yield functional.huber_loss(model(batch[0]), batch[1])


def own(*names: str, **further: Any) -> Losses:
    """The loss that a `transformers` model computes itself from its batch, passed under these names."""

    def losses(model: Any, batch: Batch) -> Iterator[torch.Tensor]:
        given = batch * len(names) if len(batch) == 1 else batch
        yield model(**dict(zip(names, given, strict=True)), **further).loss

    return losses


def transformer(name: str, **changes: Any) -> Callable[[], nn.Module]:
    """Return a constructor of a `transformers` model by class name, with changes to its configuration."""

    def build() -> nn.Module:
        import transformers

        kind: Any = getattr(transformers, name)
        return kind(kind.config_class(**changes))

    return build


_LANGUAGE = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = own("input_ids", "labels")
_MASKS = "nonzero and boolean masks keep every element"
_ROUTING = "what unknown scores choose"

FAMILIES: dict[str, Family] = {
    "resnet": Family(
        transformer("ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2],
                    layer_type="basic", num_labels=10),
        pictures(4, 3, 64, 64), classify, blocks("resnet.encoder.stages"),
    ),
    "densenet": Family(
        models.DenseNet, pictures(4, 3, 32, 32), classify, both(blocks("first", Form.REENTRANT), blocks("second")),
    ),
    "convnext": Family(
        transformer("ConvNextForImageClassification", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2,
                    num_labels=10),
        pictures(4, 3, 64, 64), classify, blocks("convnext.encoder.stages"),
    ),
    "efficientnet": Family(
        transformer("EfficientNetForImageClassification", image_size=64, hidden_dim=1280, num_labels=10,
                    in_channels=[32, 16, 24], out_channels=[16, 24, 32], kernel_sizes=[3, 3, 5], strides=[1, 2, 2],
                    num_block_repeats=[1, 1, 1], expand_ratios=[1, 4, 4], width_coefficient=1.0, depth_coefficient=1.0,
                    depthwise_padding=[]),
        pictures(4, 3, 64, 64), classify, blocks("efficientnet.encoder.blocks"),
    ),
    "unet": Family(lambda: UNet(3, 1, 16), _masked, segment, blocks("")),
    "segformer": Family(
        transformer("SegformerForSemanticSegmentation", hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2,
                    num_attention_heads=[1, 2], sr_ratios=[4, 2], strides=[4, 2], patch_sizes=[7, 3], mlp_ratios=[2, 2],
                    decoder_hidden_size=32, num_labels=5),
        _segmented, own("pixel_values", "labels"), layers_of("SegformerLayer"),
    ),
    "video": Family(models.Video, pictures(2, 3, 16, 32, 32), classify, blocks("blocks")),
    "diffusion": Family(models.Diffusion, pictures(2, 3, 32, 32), models.denoise, blocks("blocks")),
    "detector": Family(models.Detector, _boxes, models.detect, blocks("body"), assumed=(_MASKS,)),
    "spatial": Family(models.Spatial, pictures(4, 1, 32, 32), classify, blocks("blocks")),
    "vae": Family(
        models.Variational, pictures(4, 3, 32, 32), models.autoencode,
        both(blocks("encoder"), blocks("decoder", Form.REENTRANT)),
    ),
    "gan": Family(models.Adversaries, pictures(4, 3, 16, 16), models.duel, blocks("discriminator")),
    "vit": Family(
        transformer("ViTForImageClassification", hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                    intermediate_size=128, image_size=32, patch_size=8, num_labels=10),
        pictures(4, 3, 32, 32), classify, switch(),
    ),
    "swin": Family(
        transformer("SwinForImageClassification", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2],
                    num_heads=[2, 4], window_size=4, num_labels=10),
        pictures(2, 3, 32, 32), classify, switch(),
    ),
    "mixer": Family(models.Mixer, pictures(4, 3, 32, 32), classify, blocks("blocks")),
    "clip": Family(
        transformer("CLIPModel", projection_dim=32,
                    text_config={"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                                 "num_attention_heads": 2, "eos_token_id": 99},
                    vision_config={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                                   "num_attention_heads": 2, "image_size": 32, "patch_size": 8}),
        _captions, own("input_ids", "pixel_values", return_loss=True), switch(),
    ),
    "bert": Family(
        transformer("BertForMaskedLM", **_LANGUAGE, intermediate_size=128), tokens(100, 4, 32), _TEXT, switch(),
    ),
    "encoder": Family(sequences.Encoder, tokens(100, 4, 32), tag, blocks("encoder.layers")),
    "t5": Family(
        transformer("T5ForConditionalGeneration", vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2,
                    num_heads=4, decoder_start_token_id=0),
        tokens(100, 4, 32), _TEXT, switch(),
    ),
    "gpt2": Family(
        transformer("GPT2LMHeadModel", vocab_size=100, n_embd=64, n_layer=2, n_head=4, n_positions=64,
                    bos_token_id=0, eos_token_id=0),
        tokens(100, 4, 32), _TEXT, switch(Form.REENTRANT),
    ),
    "llama": Family(
        transformer("LlamaForCausalLM", **_LANGUAGE, num_key_value_heads=2, intermediate_size=128),
        tokens(100, 4, 32), _TEXT, switch(),
    ),
    # All experts in one grouped product, whose requests do not depend on the routing.
    "mixtral": Family(
        transformer("MixtralForCausalLM", **_LANGUAGE, num_key_value_heads=2, intermediate_size=64, num_local_experts=4,
                    output_router_logits=True),
        tokens(100, 4, 32), _TEXT, switch(),
    ),
    "qwen2moe": Family(
        transformer("Qwen2MoeForCausalLM", **_LANGUAGE, num_key_value_heads=2, intermediate_size=64,
                    moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=4,
                    num_experts_per_tok=2, experts_implementation="eager"),
        tokens(100, 4, 32), _TEXT, switch(), assumed=(_ROUTING,),
    ),
    "mamba": Family(
        transformer("MambaForCausalLM", vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=8),
        tokens(100, 2, 16), _TEXT, switch(),
    ),
    "whisper": Family(
        transformer("WhisperForConditionalGeneration", vocab_size=100, d_model=64, encoder_layers=2, decoder_layers=2,
                    encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
                    num_mel_bins=80, max_source_positions=30, max_target_positions=32, pad_token_id=0, bos_token_id=1,
                    eos_token_id=2, decoder_start_token_id=1),
        _speech, own("input_features", "labels"), switch(),
    ),
    "wav2vec2": Family(
        transformer("Wav2Vec2ForCTC", vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                    intermediate_size=64, conv_dim=(16, 16, 16), conv_stride=(5, 4, 2), conv_kernel=(10, 4, 2),
                    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, ctc_loss_reduction="mean",
                    apply_spec_augment=False, layerdrop=0.0),
        _sound, own("input_values", "labels"), switch(), assumed=("masked_select", "lengths in ctc_loss"),
    ),
    "lstm": Family(lambda: sequences.Recurrent(nn.LSTM, 2, False), tokens(100, 4, 24), tag, blocks("layers")),
    "gru": Family(
        lambda: sequences.Recurrent(nn.GRU, 2, True), tokens(100, 4, 24), tag, blocks("layers", Form.REENTRANT),
    ),
    "wavenet": Family(sequences.Wave, tokens(100, 4, 64), tag, blocks("layers")),
    "graph": Family(sequences.Graph, _graph, sequences.label_nodes, blocks("layers"), assumed=(_MASKS,)),
    "recommender": Family(sequences.Recommender, _visits, visit, blocks("tower")),
    "operator": Family(sequences.Operator, _wave, regress, blocks("layers")),
}  # fmt: skip
"""Name -> family."""
