"""Real models for tests and benchmarks, built from configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """U-Net of convolution, batch norm and ReLU blocks, as in the first notebook."""

    def __init__(self, inputs: int, outputs: int, width: int = 32) -> None:
        super().__init__()
        self.enc1, self.enc2 = block(inputs, width), block(width, 2 * width)
        self.mid = block(2 * width, 4 * width)
        self.up2, self.dec2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), block(4 * width, 2 * width)
        self.up1, self.dec1 = nn.ConvTranspose2d(2 * width, width, 2, 2), block(2 * width, width)
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(width, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.enc1(x)
        second = self.enc2(self.pool(first))
        middle = self.mid(self.pool(second))
        second = self.dec2(torch.cat([self.up2(middle), second], 1))
        return self.head(self.dec1(torch.cat([self.up1(second), first], 1)))


class LeNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip


class LSTMTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(1000, 64),
            nn.LSTM(64, 128, 2, batch_first=True),
            nn.Linear(128, 20),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0])


def _images(shape: tuple[int, ...], classes: int) -> Callable[[str], tuple[Any, ...]]:
    return lambda device: (torch.randn(shape, device=device), torch.randint(classes, shape[:1], device=device))


def _classify(model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
    output = model(batch[0])
    return functional.cross_entropy(getattr(output, "logits", output), batch[1])


def _language(vocabulary: int, batch: int, length: int) -> Callable[[str], tuple[Any, ...]]:
    return lambda device: (torch.randint(vocabulary, (batch, length), device=device),)


def _own_loss(model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
    return model(input_ids=batch[0], labels=batch[0]).loss


def _segment(model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def _tag(model: nn.Module, batch: tuple[Any, ...]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten() % 20)


def _transformers(kind: str, **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        heads = {"ResNet": "ForImageClassification", "ViT": "ForImageClassification", "Bert": "ForMaskedLM"}
        heads |= {"GPT2": "LMHeadModel", "Llama": "ForCausalLM"}
        config = getattr(transformers, f"{kind}Config")(**changes)
        return getattr(transformers, kind + heads[kind])(config)

    return build


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[str], tuple[Any, ...]], Callable[..., torch.Tensor]]] = {
    "unet": (
        lambda: UNet(3, 1),
        lambda device: (torch.randn(2, 3, 64, 64, device=device), torch.rand(2, 1, 64, 64, device=device)),
        _segment,
    ),
    "lenet": (LeNet, _images((16, 1, 28, 28), 10), _classify),
    "resnet50": (_transformers("ResNet", num_labels=1000), _images((2, 3, 224, 224), 1000), _classify),
    "vit": (_transformers("ViT", num_labels=1000), _images((2, 3, 224, 224), 1000), _classify),
    "bert": (_transformers("Bert"), _language(30522, 2, 128), _own_loss),
    "gpt2": (_transformers("GPT2"), _language(50257, 2, 128), _own_loss),
    "llama": (
        _transformers("Llama", hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8),
        _language(32000, 2, 128),
        _own_loss,
    ),
    "llama7b": (_transformers("Llama"), _language(32000, 1, 512), _own_loss),
    "lstm": (LSTMTagger, _language(1000, 4, 50), _tag),
}
"""Name -> constructor of the model, of a batch on a device, and function of model and batch that returns the loss."""
