"""Registration of scenarios, an ordinary training loop and its data: torch only."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn


class Scenario(NamedTuple):
    function: Callable[[], None]
    allocator: str = ""
    """Value of PYTORCH_CUDA_ALLOC_CONF, which is read once in a process: each scenario has its own."""
    outcome: str = "fits"


SCENARIOS: dict[str, Scenario] = {}


def scenario(allocator="", outcome="fits"):
    def register(function):
        SCENARIOS[function.__name__] = Scenario(function, allocator, outcome)
        return function

    return register


def train(
    model,
    optimizer,
    inputs,
    targets,
    loss_function,
    *,
    steps=2,
    dtype=None,
    scaler=None,
    clip=None,
    micro_batches=1,
    set_to_none=True,
):
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for part, target in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            with torch.autocast("cuda", dtype) if dtype is not None else contextlib.nullcontext():
                loss = loss_function(model(part), target) / micro_batches
            (scaler.scale(loss) if scaler is not None else loss).backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def vectors(batch=256, width=1024, classes=100):
    return torch.randn(batch, width, device="cuda"), torch.randint(classes, (batch,), device="cuda")


def images(batch=8, size=128, classes=100):
    return torch.randn(batch, 3, size, size, device="cuda"), torch.randint(classes, (batch,), device="cuda")


def masks(batch=4, size=128):
    return torch.randn(batch, 3, size, size, device="cuda"), torch.rand(batch, 1, size, size, device="cuda")


def sentences(batch=8, length=128):
    tokens = torch.randint(1000, (batch, length), device="cuda")
    return tokens, torch.randint(1000, (batch, length), device="cuda")


def token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
