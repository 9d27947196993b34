"""The lines of plain PyTorch request and free the same memory as the knobs, row by row, on a virtual GPU."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memexplore as mx
from memexplore.run.code.lines import lines
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.precision import Precision
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_run import traced
from memexplore.tape import Action, Category, Tape
from tests.code.test_lines import LOOP, script
from tests.models import UNet
from tests.programs.test_training_loop import SGD
from tests.small_nets import Deep, flat

pytest.importorskip("transformers")


def rows(tape: Tape) -> list[tuple[str, int]]:
    """Return requests and frees in order, without inputs: knobs move micro-batches, a script moves whole batches."""
    blocks, found = {}, []
    for row in range(len(tape)):
        action, address = Action(int(tape.action[row])), int(tape.address[row])
        if action is Action.ALLOC:
            blocks[address] = int(tape.category[row])
        if action in (Action.ALLOC, Action.FREE_REQUESTED) and blocks[address] != Category.INPUT:
            found.append((action.name, int(tape.size[row])))
    return found


def by_lines(step: Step, text: str, lower: bool) -> Tape:
    """Return the tape of two steps of a script with the lines in it."""
    dtype = torch.bfloat16 if lower else None

    def batches() -> Iterator[Any]:
        for _ in range(2):
            yield torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda value: value.to("cuda", dtype if value.is_floating_point() else None), step.batch
            )

    with mx.virtual("T4"), mx.record() as recording:
        step.model.to("cuda", dtype)
        names = script(text, step, batches(), step.optimizer)
    names.clear()  # alive until the end of the recording
    return recording.tape


def same(make: Callable[[], Step], knobs: Knobs) -> None:
    step = make()
    expected = rows(traced(step, knobs, machine_of()).tape)
    assert rows(by_lines(make(), lines(step, knobs), knobs.precision is Precision.ALL_BF16)) == expected


# --- models ---------------------------------------------------------------------------------------------------------


def classified(model: nn.Module, *shape: int) -> Step:
    torch.manual_seed(0)
    batch = torch.randn(64, *shape), torch.randint(3, (64,))
    return Step(model, batch, loss=functional.cross_entropy, optimizer=SGD)


def vgg() -> nn.Module:
    """Two flat sequences of layers, the first with norms and activations in place."""
    convolutions = [
        layer
        for inputs in (3, 8, 8, 8)
        for layer in (nn.Conv2d(inputs, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    ]
    linear = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1))]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.head = nn.Sequential(*linear, nn.Linear(8, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.features(x))

    return Two()


class Side(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(self.norm(x)))


def mixed() -> nn.Module:
    """Return layers and blocks that alternate in one sequence."""
    return nn.Sequential(
        nn.Linear(8, 8), nn.GELU(), Side(), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(),
        nn.Linear(8, 8), nn.Linear(8, 3),
    )  # fmt: skip


class Changed(nn.Module):
    """A model that changes the output of a block before the next block gets it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) + x if number % 3 else layer(x)
        return x


def transformer(name: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, bos_token_id=0, eos_token_id=0, hidden_size=32, num_attention_heads=2, **settings
    )
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    return getattr(transformers, name + head)(config)


def spoken(model: nn.Module) -> Step:
    tokens = torch.arange(64).view(4, 16)
    return Step(model.train(), {"input_ids": tokens, "labels": tokens}, optimizer=SGD)


def resnet() -> nn.Module:
    import transformers

    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[3, 4], num_labels=3)
    model = transformers.ResNetForImageClassification(config)
    return model.train()


def scored(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).logits, batch[1])


STEPS: dict[str, Callable[[], Step]] = {
    "flat": lambda: classified(flat(), 8),
    "list": lambda: classified(Deep(), 8),
    "vgg": lambda: classified(vgg(), 3, 8, 8),
    "blocks": lambda: classified(nn.Sequential(*(Side() for _ in range(5)), nn.Linear(8, 3)), 8),
    "mixed": lambda: classified(mixed(), 8),
    "changed": lambda: classified(Changed(), 8),
    "unet": lambda: Step(
        UNet(3, 1, 4),
        (torch.randn(2, 3, 16, 16), torch.rand(2, 1, 16, 16)),
        loss=functional.binary_cross_entropy_with_logits,
        optimizer=SGD,
    ),
    "resnet": lambda: Step(
        resnet(), (torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])), compute_loss=scored, optimizer=SGD
    ),
    "gpt2": lambda: spoken(transformer("GPT2", n_layer=5, n_positions=16)),
    "llama": lambda: spoken(transformer("Llama", num_hidden_layers=5, intermediate_size=64)),
}
CHECKPOINTS = ["none", "every 1", "every 2", "sqrt", "keep matmuls", "norms"]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("name", STEPS)
def test_checkpoints(name: str, checkpoint: str) -> None:
    same(STEPS[name], Knobs(checkpoint=checkpoint))


@pytest.mark.parametrize(
    ("name", "layers"),
    [("list", "blocks.0.act head"), ("vgg", "features head.0"), ("resnet", "resnet.encoder"), ("gpt2", "lm_head")],
)
def test_named_layers(name: str, layers: str) -> None:
    same(STEPS[name], Knobs(checkpoint=f"layers {layers}"))


OTHERS = [
    *(knobs for knobs in LOOP if not knobs.frozen),
    Knobs(lora="", lora_rank=2),
    Knobs(lora="", lora_rank=2, update="per tensor", optimizer="Adam"),
    Knobs(mode="inference"),
    Knobs(mode="inference", accumulation=2, precision="bf16"),
    Knobs(memory_format="channels last"),
    Knobs(inplace="off"),
    *(Knobs(checkpoint=text, offload="saved tensors on the CPU") for text in ("every 1", "sqrt", "norms")),
    *(Knobs(checkpoint=text, precision="bf16", accumulation=2) for text in ("keep matmuls", "sqrt", "norms")),
]


@pytest.mark.parametrize("knobs", OTHERS, ids=str)
@pytest.mark.parametrize("name", ["vgg", "gpt2"])
def test_other_knobs(name: str, knobs: Knobs) -> None:
    same(STEPS[name], knobs)


@pytest.mark.parametrize(
    ("name", "layer"), [("vgg", "features"), ("list", "blocks.1"), ("gpt2", "transformer.wte"), ("llama", "model")]
)
def test_frozen_layers(name: str, layer: str) -> None:
    same(STEPS[name], Knobs(frozen=layer))


@pytest.mark.parametrize("name", ["flat", "vgg", "resnet", "unet"])
def test_in_place(name: str) -> None:
    # Its activations are modules with a flag; a function that a model's code calls is a comment that names the line.
    same(STEPS[name], Knobs(inplace="on"))


def test_in_place_uses_the_sites_that_a_run_has_found() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    step = classified(model, 8)
    assert "only where nothing reads its input" in lines(step, Knobs(inplace="on"))
    traced(step, Knobs(inplace="on"), machine_of())
    # The backward of SiLU reads its input.
    assert lines(step, Knobs(inplace="on")).splitlines()[1:] == [
        "for name in ['3']:",
        "    model.get_submodule(name).inplace = True",
    ]


# --- the model's own checkpoints ------------------------------------------------------------------------------------


class Own(nn.Module):
    """A model whose code calls `checkpoint`, once by a name and once by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last, self.head = nn.ModuleList(Side() for _ in range(4)), Side(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(torch.utils.checkpoint.checkpoint(self.last, x, use_reentrant=False))


def wrapped() -> nn.Module:
    """Return a model whose blocks are wrapped in checkpoints already."""
    model = Deep()
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


def switched() -> Step:
    step = STEPS["gpt2"]()
    step.model.gradient_checkpointing_enable({"use_reentrant": False})
    return step


OWN: dict[str, Callable[[], Step]] = {
    "code": lambda: classified(Own(), 8),
    "wrapped": lambda: classified(wrapped(), 8),
    "flags": switched,
}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("setting", ["none", "every 2", "sqrt", "norms"])
@pytest.mark.parametrize("name", OWN)
def test_own_checkpoints_are_switched_off(name: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for home in (torch.utils.checkpoint, sys.modules[__name__]):
        monkeypatch.setattr(home, "checkpoint", checkpoint)  # restored afterwards
    step = OWN[name]()
    expected = rows(traced(step, Knobs(checkpoint=setting), machine_of()).tape)
    again = OWN[name]()
    assert rows(by_lines(again, lines(step, Knobs(checkpoint=setting)), False)) == expected


# --- several losses, and losses that call the model -----------------------------------------------------------------


def two(model: nn.Module, batch: Any) -> Iterator[torch.Tensor]:
    yield functional.cross_entropy(model(batch[0]), batch[1])
    yield model(batch[0]).square().mean()


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(zero_grad="set to zero"),
        Knobs(accumulation=2),
        Knobs(precision="bf16"),
        Knobs(precision="fp16", accumulation=2),
        Knobs(offload="saved tensors on the CPU"),
        Knobs(mode="inference"),
    ],
    ids=str,
)
def test_several_losses(knobs: Knobs) -> None:
    same(lambda: dataclasses.replace(STEPS["list"](), loss=None, compute_loss=two), knobs)
