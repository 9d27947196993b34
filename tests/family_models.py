"""Small image models of families that `transformers` does not have, in common style."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class DenseLayer(nn.Module):
    """Norm, ReLU, convolution; the result is concatenated to the input, as in DenseNet."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(functional.relu(self.norm(x)))], 1)


class DenseNet(nn.Module):
    def __init__(self, classes: int = 10, growth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first = nn.ModuleList(DenseLayer(16 + growth * number, growth) for number in range(3))
        self.transition = nn.Sequential(nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 20, 1), nn.AvgPool2d(2))
        self.second = nn.ModuleList(DenseLayer(20 + growth * number, growth) for number in range(3))
        self.head = nn.Linear(44, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.first:
            x = layer(x)
        x = self.transition(x)
        for layer in self.second:
            x = layer(x)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class TimedBlock(nn.Module):
    """Residual block of a diffusion model: group norm, SiLU, convolution, time embedding, then attention."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.norm3, self.qkv, self.out = (
            nn.GroupNorm(8, outputs),
            nn.Linear(outputs, 3 * outputs),
            nn.Linear(outputs, outputs),
        )

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(functional.silu(self.norm1(x)))
        h = h + self.time(functional.silu(time))[:, :, None, None]
        h = self.skip(x) + self.conv2(functional.silu(self.norm2(h)))
        tokens = self.qkv(self.norm3(h).flatten(2).transpose(1, 2))
        query, key, value = tokens.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return h + self.out(mixed).transpose(1, 2).reshape(h.shape)


class Diffusion(nn.Module):
    """A denoiser with sinusoidal time embedding; strided convolution down, nearest neighbours up."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up = nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(2 * width, width, 3, padding=1)
        shapes = ((width, width), (width, 2 * width), (2 * width, 2 * width), (2 * width, width))
        self.blocks = nn.ModuleList(TimedBlock(inputs, outputs, 4 * width) for inputs, outputs in shapes)
        self.register_buffer("kept", torch.linspace(0.999, 0.01, 1000), persistent=False)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        rate = torch.exp(-math.log(10000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angle = step[:, None] * rate[None]
        time = self.embed(torch.cat([angle.sin(), angle.cos()], -1))
        first = self.blocks[0](self.stem(x), time)
        middle = self.blocks[2](self.blocks[1](self.down(first), time), time)
        return self.head(
            self.blocks[3](torch.cat([self.up(functional.interpolate(middle, scale_factor=2)), first], 1), time)
        )


def denoise(model: Any, batch: Any) -> Iterator[torch.Tensor]:
    clean = batch[0]
    step = torch.randint(1000, clean.shape[:1], device=clean.device)
    kept, noise = model.kept[step][:, None, None, None], torch.randn_like(clean)
    yield functional.mse_loss(model(kept.sqrt() * clean + (1 - kept).sqrt() * noise, step), noise)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(MixerBlock(64, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Video(nn.Module):
    """Three-dimensional convolutions with instance norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), nn.InstanceNorm3d(outputs, affine=True), nn.ReLU())
            for inputs, outputs in ((3, 16), (16, 16), (16, 32))
        )
        self.pool, self.head = nn.MaxPool3d(2), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.pool(block(x))
        return self.head(x.mean((2, 3, 4)))


class Detector(nn.Module):
    """A dense detection head on a small pyramid: classes and boxes for each anchor, as in RetinaNet."""

    def __init__(self, classes: int = 4, width: int = 32) -> None:
        super().__init__()
        self.classes = classes
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inputs, width, 3, 2, 1), nn.GroupNorm(8, width), nn.ReLU())
            for inputs in (3, width, width)
        )
        self.score, self.box = nn.Conv2d(width, 3 * classes, 3, padding=1), nn.Conv2d(width, 12, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, boxes = [], []
        for stage in self.body:
            x = stage(x)
            scores.append(self.score(x).permute(0, 2, 3, 1).reshape(len(x), -1, self.classes))
            boxes.append(self.box(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4))
        return torch.cat(scores, 1), torch.cat(boxes, 1)


def _overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Intersection over union of boxes (anchors, 4) and (images, truths, 4)."""
    low = torch.maximum(first[:, None, :2], second[:, None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[:, None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area, other = (first[:, 2:] - first[:, :2]).prod(-1), (second[..., 2:] - second[..., :2]).prod(-1)
    return shared / (area[:, None] + other[:, None] - shared)


def detect(model: Any, batch: Any) -> Iterator[torch.Tensor]:
    """Focal loss over all anchors, smooth L1 over those that a mask of matches keeps."""
    images, truth, labels = batch
    scores, boxes = model(images)
    corner = torch.rand(boxes.shape[1], 2, device=boxes.device)
    anchors = torch.cat([corner, corner + 0.1], 1)
    best, match = _overlap(anchors, truth).max(2)
    matched = best > 0.5
    labels_of_anchors = torch.zeros_like(scores)
    labels_of_anchors[matched, labels.gather(1, match)[matched]] = 1
    chance = scores.sigmoid()
    right = torch.where(labels_of_anchors > 0, chance, 1 - chance)
    raw = functional.binary_cross_entropy_with_logits(scores, labels_of_anchors, reduction="none")
    focal = (raw * (1 - right) ** 2).sum() / matched.sum().clamp(min=1)
    target = truth.gather(1, match[..., None].expand(-1, -1, 4))
    yield focal + functional.smooth_l1_loss(boxes[matched], target[matched])


class Spatial(nn.Module):
    """A spatial transformer: the image is warped by a predicted affine map (affine_grid, grid_sample)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(inputs, 16, 3, 2, 1), nn.ReLU()) for inputs in (1, 16))
        self.theta, self.read = nn.Linear(16, 6), nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.Conv2d(16, 16, 5))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for block in self.blocks:
            h = block(h)
        theta = self.theta(h.mean((2, 3))).view(-1, 2, 3)
        warped = functional.grid_sample(
            x, functional.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False
        )
        return self.head(self.read(warped).mean((2, 3)))


class Variational(nn.Module):
    """A variational autoencoder with transposed convolutions in its decoder."""

    def __init__(self, latent: int = 16) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            nn.Sequential(nn.Conv2d(inputs, outputs, 4, 2, 1), nn.LeakyReLU(0.2))
            for inputs, outputs in ((3, 16), (16, 32))
        )
        self.mean, self.spread = nn.Linear(32 * 64, latent), nn.Linear(32 * 64, latent)
        self.grow = nn.Linear(latent, 32 * 64)
        self.decoder = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.ELU())
            for inputs, outputs in ((32, 16), (16, 3))
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for stage in self.encoder:
            x = stage(x)
        mean, spread = self.mean(x.flatten(1)), self.spread(x.flatten(1))
        x = self.grow(mean + torch.randn_like(mean) * (0.5 * spread).exp()).unflatten(1, (32, 8, 8))
        for stage in self.decoder:
            x = stage(x)
        return x, mean, spread


def autoencode(model: Any, batch: Any) -> Iterator[torch.Tensor]:
    made, mean, spread = model(batch[0])
    divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean()
    yield functional.mse_loss(made, batch[0], reduction="sum") / len(made) + divergence


class Adversaries(nn.Module):
    """A generator and a discriminator with spectral norm, trained in turns."""

    def __init__(self, latent: int = 32) -> None:
        super().__init__()
        self.latent = latent
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(latent, 32, 4), nn.BatchNorm2d(32), nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        normed = nn.utils.parametrizations.spectral_norm
        self.discriminator = nn.ModuleList(
            nn.Sequential(normed(nn.Conv2d(inputs, outputs, 4, 2, 1)), nn.LeakyReLU(0.2, True))
            for inputs, outputs in ((3, 16), (16, 32))
        )
        self.judge = nn.Linear(32 * 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.discriminator:
            x = stage(x)
        return self.judge(x.flatten(1))


def duel(model: Any, batch: Any) -> Iterator[torch.Tensor]:
    """The discriminator's hinge loss, then the generator's with a frozen discriminator."""
    real = batch[0]
    made = model.generator(torch.randn(len(real), model.latent, 1, 1, device=real.device))
    yield functional.relu(1 - model(real)).mean() + functional.relu(1 + model(made.detach())).mean()
    judges = [*model.discriminator.parameters(), *model.judge.parameters()]
    for parameter in judges:
        parameter.requires_grad_(False)
    yield -model(made).mean()
    for parameter in judges:
        parameter.requires_grad_(True)
