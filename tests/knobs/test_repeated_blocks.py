"""Repeated blocks, found in the module trees of real and of random models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memexplore.run.knobs.checkpoints.blocks import blocks, covered_share, repeated
from tests.family_models import DenseNet, Mixer
from tests.models import MODELS, LeNet, LSTMTagger


def built(kind, config, **changes):
    import transformers

    with torch.device("meta"):
        return getattr(transformers, kind)(getattr(transformers, config)(**changes))


def numbered(pattern, *counts):
    return tuple(pattern.format(*place) for place in _places(counts))


def _places(counts):
    if len(counts) == 1 and isinstance(counts[0], int):
        return [(number,) for number in range(counts[0])]
    return [(stage, number) for stage, count in enumerate(counts[0]) for number in range(count)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 3 + 4 + 6 + 3 bottlenecks, neither their stages nor their convolutions
        ("resnet50", numbered("resnet.encoder.stages.{}.layers.{}", (3, 4, 6, 3))),
        ("gpt2", numbered("transformer.h.{}", 12)),
        ("llama", numbered("model.layers.{}", 4)),
        ("bert", numbered("bert.encoder.layer.{}", 12)),
        ("vit", numbered("vit.layers.{}", 12)),
        ("unet", ("enc1", "enc2", "mid", "dec2", "dec1")),
    ],
)
def test_the_blocks_of_well_known_models(name, expected):
    with torch.device("meta"):
        assert repeated(MODELS[name][0]()) == expected


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, outputs):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))


class ResNet50(nn.Module):
    """ResNet-50 as in torchvision: four attributes that are plain `nn.Sequential`s."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        inputs = 64
        for number, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
            stage = [Bottleneck(inputs if not place else 4 * width, width, 4 * width) for place in range(count)]
            setattr(self, f"layer{number}", nn.Sequential(*stage))
            inputs = 4 * width
        self.fc = nn.Linear(2048, 1000)


def test_a_resnet_of_plain_stages_has_its_sixteen_bottlenecks():
    with torch.device("meta"):
        found = repeated(ResNet50())
    assert found == tuple(
        f"layer{stage}.{place}" for stage, count in ((1, 3), (2, 4), (3, 6), (4, 3)) for place in range(count)
    )


def test_encoder_and_decoder_layers_are_both_blocks():
    t5 = built("T5ForConditionalGeneration", "T5Config", num_layers=2)
    assert repeated(t5) == ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")
    # A decoder layer has two attentions of one class, which have names and no numbers.
    whisper = built("WhisperForConditionalGeneration", "WhisperConfig", encoder_layers=2, decoder_layers=2)
    assert repeated(whisper) == (
        *("model.encoder.layers.0", "model.encoder.layers.1"),
        *("model.decoder.layers.0", "model.decoder.layers.1"),
    )


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16)


class ExpertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(Expert() for _ in range(4))


def test_experts_are_no_blocks():
    mixtral = built(
        "MixtralForCausalLM", "MixtralConfig", hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    assert repeated(mixtral) == ("model.layers.0", "model.layers.1")
    # Written as a list: five layers with weights are outside the experts, which have three each.
    assert repeated(nn.Sequential(ExpertLayer(), ExpertLayer())) == ("0", "1")


class Growing(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 8, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)
        self.drop = nn.Sequential(nn.Dropout())


class Dense(nn.ModuleDict):
    def __init__(self, inputs, count):
        super().__init__({f"denselayer{number}": Growing(inputs + 4 * number) for number in range(count)})

    def forward(self, x):
        return x


class Transition(nn.Sequential):
    def __init__(self, channels):
        super().__init__(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2))


def test_a_densenet_has_its_dense_layers():
    # Written as torchvision writes it: dense blocks are opened, transitions are single convolutions.
    features = nn.Sequential(nn.Conv2d(3, 8, 3), Dense(8, 2), Transition(16), Dense(8, 3), Transition(20), Dense(10, 2))
    assert repeated(nn.Sequential(features, nn.Flatten(), nn.Linear(18, 10))) == tuple(
        f"0.{stage}.denselayer{number}" for stage, count in ((1, 2), (3, 3), (5, 2)) for number in range(count)
    )
    assert repeated(DenseNet()) == numbered("first.{}", 3) + numbered("second.{}", 3)


def test_named_halves_of_a_block_do_not_open_it():
    assert repeated(Mixer()) == numbered("blocks.{}", 3)


def test_blocks_in_lists_of_lists_are_found():
    half = lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))  # noqa: E731
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([half(), half()]) for _ in range(2))
    assert repeated(model) == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")


def test_a_stage_with_a_single_block_is_opened_like_the_others():
    model = built("ResNetForImageClassification", "ResNetConfig", depths=[1, 2, 1, 1])
    assert [name.removeprefix("resnet.encoder.stages.") for name in repeated(model)] == [
        *("0.layers.0", "1.layers.0", "1.layers.1", "2.layers.0", "3.layers.0"),
    ]


def test_a_flat_sequential_is_cut_before_each_layer_with_weights():
    # Convolution, ReLU and pooling twice, then three linear layers; Flatten goes with what is before it.
    assert [block.names for block in blocks(LeNet())] == [
        *(("0", "1", "2"), ("3", "4", "5", "6"), ("7", "8"), ("9", "10"), ("11",)),
    ]


def test_an_activation_shared_by_all_layers_is_in_each_block():
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    assert [block.names for block in blocks(model)] == [("0", "1"), ("2", "3")]


def test_a_model_without_repetition_has_no_blocks():
    assert repeated(LSTMTagger()) == ()
    assert repeated(nn.Linear(4, 4)) == ()


def test_covered_share_counts_layers_with_weights():
    # Ten of the thirteen layers with weights of the UNet: not the two transposed convolutions and the head.
    with torch.device("meta"):
        unet = MODELS["unet"][0]()
    assert covered_share(unet, repeated(unet)) == 10 / 13


class One(nn.Module):
    def __init__(self, *children):
        super().__init__()
        for number, child in enumerate(children):
            self.add_module(f"part{number}", child)


class Other(One):
    pass


def _composite(children):
    return st.builds(
        lambda kind, parts: kind(parts) if kind is nn.ModuleList else kind(*parts),
        st.sampled_from([One, Other, nn.Sequential, nn.ModuleList]),
        st.lists(children, min_size=1, max_size=4),
    )


leaves = st.sampled_from([lambda: nn.Linear(2, 2), lambda: nn.ReLU(), lambda: nn.LayerNorm(2)]).map(lambda make: make())
trees = st.recursive(leaves, _composite, max_leaves=25)


@given(trees)
def test_blocks_never_nest_or_overlap(tree):
    found = [name for block in blocks(tree) for name in block.names]
    assert len(set(found)) == len(found)
    assert not [(outer, inner) for outer in found for inner in found if inner.startswith(f"{outer}.")]


@given(trees)
def test_every_block_is_a_module_with_weights_and_in_order(tree):
    order = list(dict(tree.named_modules()))
    found = repeated(tree)
    assert list(found) == sorted(found, key=order.index)
    assert all(list(tree.get_submodule(name).parameters()) for name in found)


@given(trees, st.integers(2, 5))
def test_copies_side_by_side_are_covered_alike(tree, count):
    import copy

    if not list(tree.children()) or isinstance(tree, nn.ModuleList):
        return
    found = repeated(nn.ModuleList(copy.deepcopy(tree) for _ in range(count)))
    per_copy = [{name.partition(".")[2] for name in found if name.partition(".")[0] == str(at)} for at in range(count)]
    assert all(names == per_copy[0] for names in per_copy)


@given(trees)
def test_blocks_are_deterministic(tree):
    assert blocks(tree) == blocks(tree)
