"""The small language model of the recording lm-forward-fp32-seq128: weights first, norms by a product of vectors."""

import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))

    def forward(self, x):
        return torch.einsum("...i,io->...o", x, self.weight)


class RmsNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, width))

    def forward(self, x):
        mean = torch.einsum("...d,...d->...", x, x)
        mean = mean / x.shape[-1] + 1e-5
        root = torch.sqrt(mean).unsqueeze(-1)
        result = x / root * self.weight
        return result  # noqa: RET504 - the result exists before the variables end


class Rope(nn.Module):
    def __init__(self, context: int, width: int):
        super().__init__()
        frequencies = 10_000.0 ** -(torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(context).float(), frequencies).repeat_interleave(2, dim=-1)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def _turned(self, x):
        first, second = x.view(*x.shape[:-1], -1, 2).unbind(dim=-1)
        result = torch.stack((-second, first), dim=-1)
        return result.view(x.shape)

    def forward(self, x, positions):
        cosines = self.cosines[positions]
        sines = self.sines[positions]
        return (x * cosines) + (self._turned(x) * sines)


def softmax(x):
    largest = x.max(dim=-1, keepdim=True).values
    exponentials = torch.exp(x - largest)
    total = torch.sum(exponentials, dim=-1, keepdim=True)
    return exponentials / total


def attention(query, key, value, mask):
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    scores = scores / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~mask, -1e9)
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, context: int):
        super().__init__()
        self.heads = heads
        self.key = Linear(width, width)
        self.query = Linear(width, width)
        self.value = Linear(width, width)
        self.out = Linear(width, width)
        self.rope = Rope(context, width // heads)

    def _split(self, x):
        batch, length, width = x.shape
        return x.reshape(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)

    def forward(self, x, positions):
        batch, length, width = x.shape
        key = self._split(self.key(x))
        query = self._split(self.query(x))
        value = self._split(self.value(x))
        key = self.rope(key, positions)
        query = self.rope(query, positions)
        mask = torch.tril(torch.ones(length, length, device=x.device)).bool()
        attended = attention(query, key, value, mask)
        joined = attended.permute(0, 2, 1, 3).reshape(batch, length, width)
        return self.out(joined)


class SwiGlu(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(inner, width))
        self.w2 = nn.Parameter(torch.empty(width, inner))
        self.w3 = nn.Parameter(torch.empty(inner, width))

    def forward(self, x):
        first = torch.einsum("fd,...d->f...", self.w1, x)
        third = torch.einsum("fd,...d->f...", self.w3, x)
        result = torch.einsum("df,f...->...d", self.w2, first * torch.sigmoid(first) * third)
        return result  # noqa: RET504 - the result exists before the variables end


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, context: int):
        super().__init__()
        self.norm1 = RmsNorm(width)
        self.norm2 = RmsNorm(width)
        self.attention = SelfAttention(width, heads, context)
        self.ffn = SwiGlu(width, inner)

    def forward(self, x, positions):
        normed = self.norm1(x)
        attended = self.attention(normed, positions)
        between = x + attended
        normed_again = self.norm2(between)
        fed = self.ffn(normed_again)
        return between + fed


class NormLm(nn.Module):
    def __init__(self, context: int, *, vocabulary=10_000, width=768, layers=12, heads=12, inner=3072):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocabulary, width))
        self.layers = nn.ModuleList([Block(width, heads, inner, context) for _ in range(layers)])
        self.norm = RmsNorm(width)
        self.head = Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding[tokens]
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        for layer in self.layers:
            # The last layer's output outlives the final norm, as the order of the last frees shows.
            passed = layer(x, positions)
            x = passed
        x = self.norm(x)
        return self.head(x)
