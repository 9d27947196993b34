"""A language model with two billion parameters on 2 GPUs, with and without a sharded optimizer.

Ordinary code for `torchrun`, as a report published its shapes and peaks (docs/many_gpus.md): gradients are averaged
one by one after the backward pass; a sharded optimizer updates the parameters of this rank and then broadcasts all.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.fidelity.models import Embedding, LanguageModel, Linear, RmsNorm, SwiGlu, softmax

VOCABULARY = 10_000


class Rope(nn.Module):
    def __init__(self, context, width, theta=10_000.0):
        super().__init__()
        frequencies = theta ** -(torch.arange(0, width, 2) / width)
        angles = torch.einsum("t,f->tf", torch.arange(context).float(), frequencies)
        self.register_buffer("cache", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def _at(self, positions):
        """The cache at positions, by the numbers of its elements, as einx.get_at does it."""
        _, length, width = self.cache.shape
        part = torch.arange(2, dtype=torch.int32, device=positions.device)
        part = part * (length * width)
        row = positions * width
        part_and_row = part[:, None, None, None] + row
        column = torch.arange(width, dtype=torch.int32, device=positions.device)
        element = part_and_row[..., None] + column
        found = self.cache.reshape(-1)[element]
        del column, row, part, part_and_row
        return found

    def forward(self, x, positions):
        *front, width = x.shape
        pairs = x.reshape(*front, width // 2, 2)
        first, second = pairs.permute(-1, *range(pairs.dim() - 1)).unbind(0)
        cos, sin = self._at(positions)
        turned_first = cos * first - sin * second
        turned_second = sin * first + cos * second
        turned = torch.cat((turned_first.unsqueeze(-1), turned_second.unsqueeze(-1)), dim=-1)
        return turned.reshape(x.shape).contiguous()


def attention(query, key, value, mask):
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores, dim=-1)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class SelfAttention(nn.Module):
    def __init__(self, width, heads, rope):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (Linear(width, width) for _ in range(4))
        self.rope = rope

    def _split(self, x):
        batch, length, width = x.shape
        return x.reshape(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)

    def forward(self, x, positions=None):
        batch, length, width = x.shape
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (self._split(part) for part in (query, key, value))
        positions = torch.arange(length, device=x.device)[None, None]
        query = self.rope(query, positions)
        key = self.rope(key, positions)
        order = torch.arange(length, device=x.device)
        mask = order[None, None, :, None] >= order[None, None, None, :]
        result = attention(key=key, query=query, value=value, mask=mask)
        result = result.permute(0, 2, 1, 3).reshape(batch, length, width).contiguous()
        return self.out(result)


class Block(nn.Module):
    def __init__(self, width, heads, inner, rope):
        super().__init__()
        self.attn = SelfAttention(width, heads, rope)
        self.ffn = SwiGlu(width, inner)
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)

    def forward(self, x):
        attended = self.attn(self.norm1(x))
        between = x + attended
        fed = self.ffn(self.norm2(between))
        return between + fed


class ShardedLm(LanguageModel):
    def __init__(self, context, width, layers, heads, inner):
        super().__init__()
        self.embedding = Embedding(VOCABULARY, width)
        self.rope = Rope(context, width // heads)
        self.layers = nn.ModuleList(Block(width, heads, inner, self.rope) for _ in range(layers))
        self.norm = RmsNorm(width)
        self.head = Linear(width, VOCABULARY)


def log_softmax(x):
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits, targets):
    surprise = -log_softmax(logits)
    return torch.mean(torch.gather(surprise, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """An AdamW that makes new moments in every step."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad.data
                state = self.state[p]
                step = state.get("step", 1)
                before = state.get("mean", torch.zeros_like(gradient))
                before_squared = state.get("square", torch.zeros_like(gradient))
                mean = 0.9 * before + (1 - 0.9) * gradient
                square = 0.999 * before_squared + (1 - 0.999) * torch.square(gradient)
                rate = group["lr"] * math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
                p.data -= rate * mean / (torch.sqrt(square) + 1e-8)
                p.data -= group["lr"] * 0.01 * p.data
                state["mean"], state["square"], state["step"] = mean, square, step + 1


class ShardedOptimizer(torch.optim.Optimizer):
    """Each parameter belongs to the rank that has the fewest numbers so far."""

    def __init__(self, params, **options):
        self._owners, self._sizes, self._options = {}, [0] * dist.get_world_size(), options
        super().__init__(params, {})

    def add_param_group(self, group):
        super().add_param_group(group)
        for p in self.param_groups[-1]["params"]:
            owner = self._owners[p] = self._sizes.index(min(self._sizes))
            self._sizes[owner] += p.numel()
        self._own = AdamW([p for p, owner in self._owners.items() if owner == dist.get_rank()], **self._options)

    def step(self):
        self._own.step()
        for p, owner in self._owners.items():
            dist.broadcast(p.data, src=owner)


class Peaks(NamedTuple):
    """Peaks allocated, in bytes: after the model was made, and means over the steps before and in the update."""

    made: float
    before: float
    update: float


def train(sharded, *, width=1600, layers=48, heads=25, inner=6400, context=128, batch=8, warm_up=5, steps=5):
    """Return the `Peaks` of this rank, where `batch` is that of one rank."""
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    dist.barrier()
    torch.cuda.reset_peak_memory_stats()
    model = ShardedLm(context, width, layers, heads, inner).to(device)
    made = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    make = ShardedOptimizer if sharded else AdamW
    optimizer = make(model.parameters(), lr=1e-3)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    before, update = [], []
    for _ in range(warm_up + steps):
        tokens = torch.randint(0, VOCABULARY, (batch, context), device=device)
        targets = torch.randint(0, VOCABULARY, (batch, context), device=device)
        optimizer.zero_grad(set_to_none=True)
        logits = model(tokens)
        loss = cross_entropy(logits, targets)
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.mul_(1.0 / dist.get_world_size())
        before.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        update.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return Peaks(made, sum(before[warm_up:]) / steps, sum(update[warm_up:]) / steps)
