"""Small models of sequences, graphs and tables that `transformers` does not have, in common style."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Encoder(nn.Module):
    """nn.TransformerEncoder with a padding mask."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, width), nn.Linear(width, 100)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0))


class Recurrent(nn.Module):
    """Stacked recurrent modules of one kind, each of two layers with dropout between them."""

    def __init__(self, kind: Callable[..., nn.RNNBase], layers: int, bidirectional: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        wide = 64 if bidirectional else 32
        self.layers = nn.ModuleList(
            kind(width, 32, 2, batch_first=True, dropout=0.2, bidirectional=bidirectional)
            for width in [32, *[wide] * (layers - 1)]
        )
        self.head = nn.Linear(wide, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Wave(nn.Module):
    """Dilated causal convolutions with weight norm and gates, as in WaveNet."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(100, width), nn.Conv1d(width, 100, 1)
        normed = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.ConstantPad1d((step, 0), 0.0), normed(nn.Conv1d(width, 2 * width, 2, dilation=step)), nn.GLU(1)
            )
            for step in (1, 2, 4)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).transpose(1, 2)


class GraphLayer(nn.Module):
    """Graph attention: messages along edges, weighted by a softmax over the edges of a node and summed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.weight, self.update = (
            nn.Linear(2 * width, width),
            nn.Linear(width, 1),
            nn.GRUCell(width, width),
        )

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        message = functional.relu(self.message(torch.cat([nodes[source], nodes[target]], 1)))
        score = self.weight(message).squeeze(1)
        highest = score.new_full((len(nodes),), -math.inf).scatter_reduce(0, target, score, "amax")
        share = (score - highest[target]).exp()
        total = share.new_zeros(len(nodes)).index_add(0, target, share)
        weighted = message * (share / total[target])[:, None]
        gathered = weighted.new_zeros(nodes.shape).index_add(0, target, weighted)
        return self.update(gathered, nodes)


class Graph(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(8, width), nn.Linear(width, 5)
        self.layers = nn.ModuleList(GraphLayer(width) for _ in range(3))

    def forward(self, features: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        nodes = self.embedding(features)
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return self.head(nodes)


def label_nodes(model: Any, batch: Any) -> Iterator[torch.Tensor]:
    """The loss of labelled nodes, which a mask selects."""
    features, edges, labels, labelled = batch
    yield functional.cross_entropy(model(features, edges)[labelled], labels[labelled])


class Recommender(nn.Module):
    """Bags of categories, pairwise products of their embeddings, and a tower."""

    def __init__(self, width: int = 16, tables: int = 4) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(500, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, width))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)
        count = (tables + 1) * tables // 2
        self.tower = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            for inputs in (count + width, 64, 64)
        )
        self.head = nn.Linear(64, 1)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        dense = self.dense(numbers)
        features = torch.stack([dense, *(bag(ids, offsets) for bag, ids in zip(self.bags, categories, strict=True))], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        x = torch.cat([products[:, self.pairs[0], self.pairs[1]], dense], 1)
        for layer in self.tower:
            x = layer(x)
        return self.head(x).squeeze(1)


class Spectral(nn.Module):
    """A Fourier layer in parallel with a pointwise convolution."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes, self.point = modes, nn.Conv1d(width, width, 1)
        self.weight = nn.Parameter(torch.randn(width, width, modes, 2) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x.float())
        mixed = torch.einsum("bim,iom->bom", spectrum[..., : self.modes], torch.view_as_complex(self.weight))
        padded = functional.pad(mixed, (0, spectrum.shape[-1] - self.modes))
        return functional.gelu(torch.fft.irfft(padded, n=x.shape[-1]) + self.point(x))


class Operator(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        self.layers = nn.ModuleList(Spectral(width, 12) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
