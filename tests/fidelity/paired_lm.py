"""The large language model of the recording lm-forward-fp32: every call computes its angles again, on the device."""

import math

import torch
from torch import nn


class RmsNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        mean = torch.mean(x**2, dim=-1, keepdim=True)
        root = torch.sqrt(mean + 1e-5)
        return (x / root) * self.weight


class Rope(nn.Module):
    def __init__(self, theta: int, width: int, context: int, device: torch.device):
        super().__init__()
        pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)
        exponents = pairs / width
        frequencies = 1.0 / (theta**exponents)
        positions = torch.arange(context, device=device, dtype=torch.float32)
        angles = torch.einsum("p,f->pf", positions, frequencies)
        cosines, sines = torch.cos(angles), torch.sin(angles)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, x, positions):
        cosines = self.cosines[positions]
        sines = self.sines[positions]
        first = x[..., 0::2]
        second = x[..., 1::2]
        cosines = cosines.unsqueeze(1)
        sines = sines.unsqueeze(1)
        turned_first = first * cosines - second * sines
        turned_second = first * sines + second * cosines
        turned = torch.empty_like(x)
        turned[..., 0::2] = turned_first
        turned[..., 1::2] = turned_second
        return turned


def softmax(x):
    largest = torch.max(x, dim=-1, keepdim=True)
    shifted = x - largest.values
    exponentials = torch.exp(shifted)
    total = torch.sum(exponentials, dim=-1, keepdim=True)
    return exponentials / total


def attention(query, key, value, mask):
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    masked = torch.where(mask, scores, -math.inf)
    weights = softmax(masked / math.sqrt(query.shape[-1]))
    return torch.einsum("...qk,...kd->...qd", weights, value)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Parameter(torch.empty(width, width)) for _ in range(4))

    def _split(self, x):
        batch, length, width = x.shape
        return x.reshape(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)

    def forward(self, x):
        batch, length, width = x.shape
        query = torch.einsum("oi,...i->...o", self.query, x)
        key = torch.einsum("oi,...i->...o", self.key, x)
        value = torch.einsum("oi,...i->...o", self.value, x)
        query_heads = self._split(query)
        key_heads = self._split(key)
        value_heads = self._split(value)
        positions = torch.arange(length, device=x.device)
        positions = positions.expand(batch, length)
        rope = Rope(10_000, width // self.heads, length, x.device)
        query_turned = rope(query_heads, positions)
        key_turned = rope(key_heads, positions)
        mask = torch.tril(torch.ones((length, length), device=x.device, dtype=torch.bool))
        attended = attention(query_turned, key_turned, value_heads, mask)
        joined = attended.permute(0, 2, 1, 3).reshape(batch, length, width)
        result = torch.einsum("oi,...i->...o", self.out, joined)
        return result  # noqa: RET504 - the result exists before the variables end


class SwiGlu(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(inner, width))
        self.w2 = nn.Parameter(torch.empty(width, inner))
        self.w3 = nn.Parameter(torch.empty(inner, width))

    def forward(self, x):
        first = torch.einsum("oi,...i->...o", self.w1, x)
        third = torch.einsum("oi,...i->...o", self.w3, x)
        gate = first * torch.sigmoid(first)
        gated = gate * third
        return torch.einsum("io,...o->...i", self.w2, gated)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.norm1 = RmsNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm2 = RmsNorm(width)
        self.ffn = SwiGlu(width, inner)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        x = x + self.ffn(self.norm2(x))
        return x  # noqa: RET504 - the sum exists before the old variable ends


class PairedLm(nn.Module):
    def __init__(self, *, vocabulary=10_000, width=1600, layers=48, heads=25, inner=6400):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocabulary, width))
        self.layers = nn.ModuleList([Block(width, heads, inner) for _ in range(layers)])
        self.norm = RmsNorm(width)
        self.head = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, tokens):
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = torch.einsum("oi,...i->...o", self.head, x)
        return logits  # noqa: RET504 - the logits exist before the variables end
