"""The models that published_peaks.md describes, in plain torch: ordinary CUDA code without memexplore."""

import contextlib
import math

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        std = math.sqrt(2 / (inputs + outputs))
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(outputs, inputs), std=std, a=-3 * std, b=3 * std))

    def forward(self, x):
        return torch.einsum("...i,oi->...o", x, self.weight)


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(vocabulary, width)))

    def forward(self, tokens):
        return self.weight[tokens, :]


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = x * root
        return (self.weight * x).to(dtype)


class Rope(nn.Module):
    def __init__(self, context: int, width: int, theta: float = 10000.0):
        super().__init__()
        frequencies = theta ** -(torch.arange(0, width, 2) / width)
        angles = torch.einsum("t,f->tf", torch.arange(context).float(), frequencies)
        self.register_buffer("cache", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def forward(self, x):
        *front, width = x.shape
        pairs = x.reshape(*front, width // 2, 2)
        first, second = pairs.permute(-1, *range(pairs.dim() - 1)).unbind(0)
        cos, sin = self.cache[:, : x.size(-2), :].unbind(0)
        turned_first = cos * first - sin * second
        turned_second = sin * first + cos * second
        return torch.concat((turned_first, turned_second), dim=-1)


def softmax(x, dim=-1):
    shifted = x - torch.max(x, dim=dim, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=dim, keepdim=True)


def attention(query, key, value, mask=None):
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores, dim=-1)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, rope: Rope):
        super().__init__()
        self.heads = heads
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.out = Linear(width, width)
        self.rope = rope

    def _split(self, x):
        batch, length, width = x.shape
        return x.reshape(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)

    def forward(self, x):
        batch, length, width = x.shape
        query = self.query(x)
        key = self.key(x)
        value = self.value(x)
        query, key, value = (self._split(part) for part in (query, key, value))
        query = self.rope(query)
        key = self.rope(key)
        positions = torch.arange(length, device=x.device)
        causal = (positions[:, None] >= positions[None, :])[None, ...]
        result = attention(key=key, query=query, value=value, mask=causal)
        result = result.permute(0, 2, 1, 3).reshape(batch, length, width).contiguous()
        return self.out(result)


def silu(x):
    return x * torch.sigmoid(x)


class SwiGlu(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1 = Linear(width, inner)
        self.w2 = Linear(inner, width)
        self.w3 = Linear(width, inner)

    def forward(self, x):
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, rope: Rope):
        super().__init__()
        self.attn = SelfAttention(width, heads, rope)
        self.ffn = SwiGlu(width, inner)
        self.norm1 = RmsNorm(width)
        self.norm2 = RmsNorm(width)

    def forward(self, x):
        attended = self.attn(self.norm1(x))
        between = x + attended
        fed = self.ffn(self.norm2(between))
        return between + fed


class LanguageModel(nn.Module):
    """A stack of layers; its parts are attributes of the classes made from it."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x)


class DecoderLm(nn.Module):
    def __init__(self, context: int, *, vocabulary=10_000, width=2560, inner=10_240, layers=32, heads=32):
        super().__init__()
        self.embedding = Embedding(vocabulary, width)
        self.rope = Rope(context, width // heads)
        self.layers = nn.ModuleList([Block(width, heads, inner, self.rope) for _ in range(layers)])
        self.norm = RmsNorm(width)
        self.head = Linear(width, vocabulary)

    def forward(self, tokens):
        # The measured model keeps its embedded tokens in a variable of their own until it returns.
        embedded = self.embedding(tokens)
        x = embedded
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.head(x)


def autocast(dtype: torch.dtype | None):
    return torch.autocast("cuda", dtype) if dtype is not None else contextlib.nullcontext()


def lm_forward(context: int, dtype: torch.dtype | None = None, batch: int = 4, warm_up: int = 5) -> float:
    """Peak allocated, in bytes, of one forward pass without gradients after five others."""
    model = DecoderLm(context).to("cuda")
    tokens = torch.randint(0, 10_000, (batch, context), device="cuda")
    for step in range(warm_up + 1):
        if step == warm_up:
            torch.cuda.reset_peak_memory_stats()
        with torch.no_grad(), autocast(dtype):
            model(tokens)
    return torch.cuda.max_memory_allocated()


def lm_step(context: int, dtype: torch.dtype | None = None, batch: int = 4, warm_up: int = 5) -> float:
    """Peak allocated, in bytes, of one training step after five others."""
    model = DecoderLm(context).to("cuda")
    tokens = torch.randint(0, 10_000, (batch, context), device="cuda")
    targets = torch.randint(0, 10_000, (batch, context), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with autocast(dtype):
            logits = model(tokens)
            loss = F.cross_entropy(logits.reshape(-1, 10_000), targets.reshape(-1))
        loss.backward()
        optimizer.step()

    for _ in range(warm_up):
        step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def naive_attention(length: int, width: int) -> dict[str, float]:
    """Return the four columns of the attention rows, in bytes, measured in sequence in one process."""
    query, key, value = (torch.randn(8, length, width, device="cuda", requires_grad=True) for _ in range(3))

    def step():
        out = attention(query, key, value)
        loss = out.sum()
        loss.backward()
        query.grad = key.grad = value.grad = None
        return out, loss

    for _ in range(10):
        # The measured script warms up at module level, so the last result stays alive.
        kept = step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        attention(query, key, value).sum()
    forward = torch.cuda.max_memory_allocated()
    inputs = torch.cuda.memory_allocated()
    out = attention(query, key, value)
    kept = (out, out.sum())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    both = torch.cuda.max_memory_allocated()
    del out, kept
    return {
        "memory_allocated after inputs": inputs,
        "memory_allocated before backward": before,
        "max_memory_allocated forward": forward,
        "max_memory_allocated fwd+bwd": both,
    }
