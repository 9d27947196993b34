"""The small language model of the recordings that begin with the first allocation, on CUDA from its first tensor on.

Its tables of angles and its causal mask stay on the CPU and are brought over in every call, as its snapshots show.
"""

import math
from collections.abc import Iterable

import torch
from torch import nn

from tests.fidelity import models


class RmsNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        root = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        scaled = x / root * self.weight
        return scaled.to(dtype)


class Rope(nn.Module):
    """Rotary embedding whose tables are on the CPU."""

    def __init__(self, context: int, width: int, theta: float = 10_000.0):
        super().__init__()
        frequencies = theta ** -(torch.arange(0, width, 2, device="cpu") / width)
        angles = torch.outer(torch.arange(context, device="cpu").float(), frequencies)
        self.register_buffer("sines", torch.sin(angles), persistent=False)
        self.register_buffer("cosines", torch.cos(angles), persistent=False)

    def forward(self, x):
        *front, length, width = x.shape
        positions = torch.arange(length, device="cpu")
        sines = self.sines[positions].to(x.device)[..., None]
        cosines = self.cosines[positions].to(x.device)[..., None]
        x = x.reshape(*front, length, width // 2, 2)
        first = cosines * x[..., :1] - sines * x[..., 1:]
        second = sines * x[..., :1] + cosines * x[..., 1:]
        turned = torch.cat([first, second], dim=-1)
        return turned.reshape(*front, length, width)


def softmax(x):
    """The exponentials are computed twice."""
    largest, _positions = torch.max(x, dim=-1, keepdim=True)
    return torch.exp(x - largest) / torch.sum(torch.exp(x - largest), dim=-1, keepdim=True)


def attention(query, key, value, mask):
    mask = mask.to(query.device)
    products = torch.einsum("...qd,...kd->...qk", query, key)
    scores = products / torch.sqrt(torch.tensor(query.shape[-1], device=products.device))
    scores = scores.masked_fill_(~mask.bool(), -math.inf)
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, context: int):
        super().__init__()
        self.heads = heads
        self.rope = Rope(context, width // heads)
        self.query = models.Linear(width, width)
        self.key = models.Linear(width, width)
        self.value = models.Linear(width, width)
        self.out = models.Linear(width, width)

    def _split(self, x):
        batch, length, width = x.shape
        return x.reshape(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)

    def forward(self, x):
        batch, length, width = x.shape
        query = self.query(x)
        key = self.key(x)
        value = self.value(x)
        query = self._split(query)
        key = self._split(key)
        value = self._split(value)
        query = self.rope(query)
        key = self.rope(key)
        causal = torch.tril(torch.ones(length, length, device="cpu"))
        result = attention(query, key, value, causal)
        result = result.permute(0, 2, 1, 3).reshape(batch, length, width)
        result = self.out(result)
        return result  # noqa: RET504 - the variable frees its earlier tensor


class SwiGlu(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1 = models.Linear(width, inner)
        self.w2 = models.Linear(inner, width)
        self.w3 = models.Linear(width, inner)

    def forward(self, x):
        first = self.w1(x)
        gate = models.silu(first)
        third = self.w3(x)
        gated = gate * third
        return self.w2(gated)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, context: int):
        super().__init__()
        self.norm1 = RmsNorm(width)
        self.norm2 = RmsNorm(width)
        self.attention = SelfAttention(width, heads, context)
        self.ffn = SwiGlu(width, inner)

    def forward(self, x):
        normed = self.norm1(x)
        attended = self.attention(normed)
        between = attended + x
        normed_again = self.norm2(between)
        fed = self.ffn(normed_again)
        result = fed + between
        return result  # noqa: RET504 - like the others a variable until the block returns


class Embedding(models.Embedding):
    def forward(self, tokens):
        return self.weight[tokens]


class SmallLm(models.LanguageModel):
    def __init__(self, *, vocabulary=10_000, context=256, width=512, layers=4, heads=16, inner=1344):
        super().__init__()
        self.embedding = Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width, heads, inner, context) for _ in range(layers)])
        self.norm = RmsNorm(width)
        self.head = models.Linear(width, vocabulary)


class Adam(torch.optim.Optimizer):
    """Adam as in the snapshot's script: state from its constructor on, and a new tensor for every result."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "decay": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "mean": torch.zeros_like(parameter.data),
                    "square": torch.zeros_like(parameter.data),
                    "step": 0,
                }

    def step(self):
        for group in self.param_groups:
            (first, second), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                state = self.state[parameter]
                step = state["step"] + 1
                rate = lr * math.sqrt(1 - second**step) / (1 - first**step)
                grad = parameter.grad.data
                mean = state["mean"]
                new_mean = first * mean + (1 - first) * grad
                state["mean"] = new_mean
                square = state["square"]
                new_square = second * square + (1 - second) * grad**2
                state["square"] = new_square
                state["step"] = step
                parameter.data = parameter.data - rate * (new_mean / (torch.sqrt(new_square) + group["eps"]))
                parameter.data = parameter.data - lr * group["decay"] * parameter.data


def cross_entropy(logits, targets):
    rows = logits.shape[0]
    largest, _positions = torch.max(logits, dim=-1, keepdim=True)
    logarithms = logits - largest - torch.log(torch.sum(torch.exp(logits - largest), dim=-1, keepdim=True))
    chosen = torch.zeros_like(logarithms)
    chosen.scatter_(-1, targets.unsqueeze(-1), 1)
    loss = -torch.sum(chosen * logarithms) / rows
    return loss  # noqa: RET504 - the result exists before the variables end
