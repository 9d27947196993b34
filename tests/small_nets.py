"""Small networks in double precision, their steps, gradients and full state, for tests that train for real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memexplore.run.programs.step import Step


class Block(nn.Module):
    """Two linear layers and a skip connection, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU()
        self.down, self.drop = nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Deep(nn.Module):
    """Five blocks in a `ModuleList`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(5)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def flat() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


SHAPES = {Deep: (8,), flat: (8,), images: (3, 6, 5)}


def step_of(make: Callable[[], nn.Module], optimizer: Any = None, dtype: torch.dtype = torch.float64) -> Step:
    """Return a step on 8 samples of 3 classes; weights and batch are the same in every call."""
    torch.manual_seed(0)
    model = make().to(dtype)
    batch = torch.randn(8, *SHAPES[make], dtype=dtype), torch.randint(3, (8,))
    return Step(model, batch, loss=functional.cross_entropy, optimizer=optimizer)


def gradients(step: Step, model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of the whole batch; dropout draws the same numbers in every call."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = step.loss_of(model, step.batch)
    loss.backward()
    return loss.detach(), {
        name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None
    }


def everything(model: nn.Module) -> dict[str, Any]:
    """Return everything that a run could leave on a model, as plain values."""
    hooks = [name for name in dir(model) if name.endswith("_hooks") and isinstance(getattr(model, name), dict)]
    return {
        "modules": [(name, id(module), type(module)) for name, module in model.named_modules()],
        "keys": list(model.state_dict()),
        "tensors": [
            (name, id(tensor), tensor.dtype, tensor.stride(), tensor.requires_grad, tensor.device, tensor.tolist())
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        ],
        "gradients": [(name, weight.grad is None or weight.grad.tolist()) for name, weight in model.named_parameters()],
        "hooks": [(name, len(getattr(module, name))) for module in model.modules() for name in hooks],
        "weight hooks": [weight._post_accumulate_grad_hooks or None for weight in model.parameters()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "modes": [(module.training, getattr(module, "inplace", None)) for module in model.modules()],
        "random": torch.get_rng_state().tolist(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.amp.autocast_mode.autocast.__enter__),
    }
