"""Recorded runs of language models: training steps and forward passes, written for this project after their sources."""

import contextlib
import enum
import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from memexplore.tape import Action, Os, Tape
from tests.fidelity import models
from tests.fidelity.recorded import RecordedRun


class OwnAdamW(torch.optim.Optimizer):
    """AdamW as a loop over parameters with a temporary for every term; decay before the update.

    Old moments, and the zeros used before there are any, live until their names are bound again.
    """

    def __init__(self, parameters, rate=1e-3, betas=(0.9, 0.95), eps=1e-8, decay=0.01):
        super().__init__(parameters, {"rate": rate, "betas": betas, "eps": eps, "decay": decay})

    def step(self):
        for group in self.param_groups:
            rate, eps = group["rate"], group["eps"]
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                count = state.get("count", 1)
                gradient = parameter.grad.data
                parameter.data -= rate * group["decay"] * parameter.data
                mean = state.get("mean", torch.zeros_like(parameter))
                square = state.get("square", torch.zeros_like(parameter))
                state["mean"] = first * mean + (1 - first) * gradient
                state["square"] = second * square + (1 - second) * gradient**2
                corrected = rate * math.sqrt(1 - second**count) / (1 - first**count)
                parameter.data -= corrected * state["mean"] / (torch.sqrt(state["square"]) + eps)
                state["count"] = count + 1


def _log_softmax(x):
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - largest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def _loss(logits, targets):
    surprise = -_log_softmax(logits)
    return torch.mean(torch.gather(surprise, -1, targets.unsqueeze(-1)))


def _medium_step(recording, context: int, dtype: torch.dtype | None) -> None:
    """One step after five others on other inputs, all drawn in advance; gradients are freed between the steps."""
    model = models.DecoderLm(context, width=1024, inner=4096, layers=24, heads=16).to("cuda")
    optimizer = OwnAdamW(model.parameters())
    warm_inputs, inputs, warm_targets, targets = (
        torch.randint(0, 10_000, (steps, 4, context), device="cuda") for steps in (5, 1, 5, 1)
    )
    for number in range(5):
        with models.autocast(dtype):
            logits = model(warm_inputs[number])
            loss = _loss(logits, warm_targets[number])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del logits, loss
    with recording():
        with models.autocast(dtype):
            logits = model(inputs[0])
            loss = _loss(logits, targets[0])
        loss.backward()
        optimizer.step()


class Linear(nn.Module):
    """Weight first in its einsum, which makes the result a transposed view."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.zeros(outputs, inputs, device="cuda")))

    def forward(self, x):
        return torch.einsum("oi,...i->...o", self.weight, x)


class Embedding(nn.Module):
    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width, device="cuda"))

    def forward(self, tokens):
        return self.weight[tokens]


class NormByLength(nn.Module):
    """RMS norm by the vector's length."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device="cuda"))

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        root = torch.sqrt(length**2 / x.shape[-1] + 1e-5)
        normal = x / root
        result = torch.einsum("d,bsd->bsd", self.weight, normal)
        return result.to(dtype)


class PositionRope(nn.Module):
    """Rotary embedding that looks its angles up by position and writes both halves into zeros."""

    def __init__(self, context: int, width: int):
        super().__init__()
        positions = torch.arange(context, device="cuda")
        pairs = torch.arange(0, width, 2, device="cuda")
        frequencies = 1.0 / (10_000 ** (pairs.float() / width))
        angles = torch.outer(positions, frequencies)
        table = torch.zeros(context, width // 2, 2, device="cuda")
        table[:, :, 0] = torch.cos(angles)
        table[:, :, 1] = torch.sin(angles)
        self.register_buffer("table", table, persistent=False)

    def forward(self, x, positions):
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        cos = self.table[positions, :, 0].unsqueeze(1)
        sin = self.table[positions, :, 1].unsqueeze(1)
        turned = torch.zeros_like(pairs)
        turned[..., 0] = cos * pairs[..., 0] - sin * pairs[..., 1]
        turned[..., 1] = sin * pairs[..., 0] + cos * pairs[..., 1]
        return turned.reshape(x.shape)


def _softmax(x):
    largest = torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(x - largest)
    total = torch.sum(exponentials, dim=-1, keepdim=True)
    return exponentials / total


def _attend(query, key, value, mask):
    scores = torch.einsum("...qd,...kd->...qk", query, key)
    scores = scores / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(mask == False, -1e9)  # noqa: E712 - the comparison takes memory
    weights = _softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class MaskedAttention(nn.Module):
    def __init__(self, width: int, heads: int, context: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (Linear(width, width) for _ in range(4))
        self.rope = PositionRope(context, width // heads)

    def _split(self, x):
        return x.reshape(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x):
        batch, context, width = x.shape
        flat_query, flat_key, flat_value = self.query(x), self.key(x), self.value(x)
        query, key, value = self._split(flat_query), self._split(flat_key), self._split(flat_value)
        positions = torch.arange(context, device=x.device).unsqueeze(0).expand(batch, -1)
        query = self.rope(query, positions)
        key = self.rope(key, positions)
        mask = torch.triu(torch.ones(context, context, device=x.device), diagonal=1).to(torch.bool)
        mask = ~mask
        mask = mask.unsqueeze(0).unsqueeze(0).expand(batch, self.heads, -1, -1)
        result = _attend(query, key, value, mask)
        result = result.permute(0, 2, 1, 3).reshape(batch, context, width)
        return self.out(result)


class Gated(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.w1 = Linear(width, inner)
        self.w2 = Linear(inner, width)
        self.w3 = Linear(width, inner)

    def forward(self, x):
        gate = self.w1(x)
        other = self.w3(x)
        opened = torch.sigmoid(gate) * gate
        both = opened * other
        return self.w2(both)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, context: int):
        super().__init__()
        self.norm1 = NormByLength(width)
        self.attention = MaskedAttention(width, heads, context)
        self.norm2 = NormByLength(width)
        self.gated = Gated(width, inner)

    def forward(self, x):
        inside = self.norm1(x)
        inside = self.attention(inside)
        x = x + inside
        inside = self.norm2(x)
        inside = self.gated(inside)
        return x + inside


class PositionLm(models.LanguageModel):
    """A language model of 3.4 billion parameters, built on the GPU."""

    def __init__(self, context: int, width=2560, heads=32, inner=10_240, layers=32, vocabulary=10_000):
        super().__init__()
        self.embedding = Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(width, heads, inner, context) for _ in range(layers)])
        self.norm = NormByLength(width)
        self.head = Linear(width, vocabulary)


class InPlaceAdamW(torch.optim.Optimizer):
    """AdamW as a loop over parameters, moments updated in place, decay after the update."""

    def __init__(self, parameters, rate=1e-4, betas=(0.9, 0.95), eps=1e-8, decay=0.01):
        super().__init__(parameters, {"rate": rate, "betas": betas, "eps": eps, "decay": decay})

    def step(self):
        for group in self.param_groups:
            rate = group["rate"]
            first, second = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad.data
                state = self.state[parameter]
                if not state:
                    state["count"] = 0
                    state["mean"] = torch.zeros_like(parameter.data)
                    state["square"] = torch.zeros_like(parameter.data)
                mean, square = state["mean"], state["square"]
                state["count"] += 1
                mean.mul_(first).add_(gradient, alpha=1 - first)
                square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
                scale = math.sqrt(1 - second ** state["count"])
                root = (square.sqrt() / scale).add_(group["eps"])
                parameter.data.addcdiv_(mean, root, value=-rate / (1 - first ** state["count"]))
                parameter.data.add_(parameter.data, alpha=-rate * group["decay"])


def _indexed_loss(logits, targets):
    logits = logits.reshape(-1, logits.size(-1))
    targets = targets.reshape(-1)
    largest = torch.max(logits, dim=-1, keepdim=True).values
    logits = logits - largest
    exponentials = torch.exp(logits)
    total = exponentials.sum(dim=-1)
    rows = torch.arange(logits.shape[0])  # on the CPU
    wanted = logits[rows, targets]
    losses = torch.log(total) - wanted
    return losses.mean()


class Kind(enum.Enum):
    FORWARD = "forward"
    STEP = "step"


def _first_run(recording, context: int, kind: Kind, dtype: torch.dtype | None) -> None:
    """A new model's first forward pass, with gradients, or first training step."""
    model = PositionLm(context)
    optimizer = InPlaceAdamW(model.parameters())
    tokens = torch.randint(0, 10_000, (4, context)).to("cuda")
    with models.autocast(dtype), recording():
        torch.cuda.empty_cache()
        optimizer.zero_grad()
        logits = model(tokens)
        if kind is Kind.STEP:
            loss = _indexed_loss(logits, tokens)
            loss.backward()
            optimizer.step()


def _position_lm(recording, context: int, kind: Kind, dtype: torch.dtype | None, forwards: Sequence[int] = ()) -> None:
    """One run after forward passes of other models in the process, which leave a workspace and segments behind."""
    for earlier in forwards:
        _first_run(contextlib.nullcontext, earlier, Kind.FORWARD, dtype)
    _first_run(recording, context, kind, dtype)


class AddressesWithGap:
    """Recorded addresses of new segments: after all weights the driver also filled a gap of 188 MiB below them.

    The addresses order free blocks of equal size, so they decide which block is split.
    """

    WEIGHTS = 94
    """Number of segments of the parameters, and the first one of the first step."""
    START = 0x7_1000_0000
    """Lowest address of the segments above the gap."""

    def __init__(self, tape: Tape) -> None:
        rows = np.flatnonzero(tape.action == Action.SEGMENT_ALLOC)
        recorded = sorted(zip(tape.address[rows].tolist(), tape.size[rows].tolist(), strict=True))
        self.above = [segment for segment in recorded if segment[0] >= self.START]
        self.below = [segment for segment in recorded if segment[0] < self.START]
        self.count = 0

    def __call__(self, size: int, stream: int) -> int:
        self.count += 1
        fits = self.count > self.WEIGHTS and self.below and self.below[0][1] == size
        address, recorded = (self.below if fits else self.above).pop(0)
        if recorded != size:
            raise ValueError(f"segment {self.count} has {size} bytes, the recorded one {recorded}")
        return address


_medium = "lm-medium-train-seq{}"
_large = "lm-2.7b-{}-h100"

RECORDED = [
    RecordedRun(
        _medium.format(128),
        "RTX 4090",  # not stated: one whose cuBLAS workspace is the recorded one
        "2.11",
        functools.partial(_medium_step, context=128, dtype=None),
        AddressesWithGap,
        os=Os.WINDOWS,
    ),
    RecordedRun(
        _medium.format(512),
        "RTX 4090",
        "2.11",
        functools.partial(_medium_step, context=512, dtype=torch.bfloat16),
        AddressesWithGap,
        # Two gradients of 40 960 000 bytes in segments of 40 MiB and one block of 4 MiB.
        absorbed_before=3 * 983_040,
        os=Os.WINDOWS,
    ),
    RecordedRun(
        _large.format("forward-seq128"),
        "H100",
        "2.6",
        functools.partial(_position_lm, context=128, kind=Kind.FORWARD, dtype=None),
    ),
    RecordedRun(
        _large.format("train-seq128"),
        "H100",
        "2.6",
        functools.partial(_position_lm, context=128, kind=Kind.STEP, dtype=None, forwards=(128, 256, 512)),
    ),
    RecordedRun(
        _large.format("forward-seq512-bf16"),
        "H100",
        "2.6",
        functools.partial(_position_lm, context=512, kind=Kind.FORWARD, dtype=torch.bfloat16, forwards=(128, 256)),
    ),
]
