"""Small models whose forward is a function, their steps, and the comparison of steps in place with plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memexplore as mx
from memexplore.run.knobs.inplace_sites.activations import Form
from memexplore.run.knobs.inplace_sites.in_place import in_place
from memexplore.run.knobs.inplace_sites.legal import legal_sites
from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.virtual_gpu.device import active


class Net(nn.Module):
    """A model whose forward is a function of the model and the input, with layers for it to use."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def step(net: nn.Module, x: torch.Tensor | None = None) -> Callable[[], None]:
    """Return a function that runs forward, loss and backward of a model."""
    value = torch.linspace(-2, 2, 32).reshape(4, 8) if x is None else x
    if active() is not None:
        value = value.cuda()
    return lambda: _sum(net(value)).backward()


def _sum(output: Any) -> torch.Tensor:
    return output.pow(2).sum() if isinstance(output, torch.Tensor) else sum(map(_sum, output))


def found(net: nn.Module) -> Sites:
    """Return the legal sites on the CPU, and check that those on a virtual GPU are equal."""
    sites = legal_sites(step(net), net)
    with mx.virtual("T4"):
        net.cuda()
        assert legal_sites(step(net), net).sites == sites.sites
    return sites


def reasons(sites: Sites) -> dict[str, str]:
    return {str(site.call): site.reason for site in sites.sites}


def outcome(net: nn.Module, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the loss and all gradients of a step with a fixed seed; running statistics are restored."""
    buffers = [buffer.clone() for buffer in net.buffers()]
    net.zero_grad()
    torch.manual_seed(7)
    value = torch.linspace(-2, 2, 32).reshape(4, 8) if x is None else x
    loss = _sum(net(value))
    loss.backward()
    for buffer, before in zip(net.buffers(), buffers, strict=True):
        buffer.copy_(before)
    return [loss.detach(), *(weight.grad.clone() for weight in net.parameters() if weight.grad is not None)]


def assert_same_results(net: nn.Module, sites: Sites, x: torch.Tensor | None = None) -> None:
    """Check that loss and gradients equal the plain run to the bit, in place and out of place, sites given or found."""
    plain = outcome(net, x)
    for form in (Form.IN_PLACE, Form.OUT_OF_PLACE):
        for given_sites in (sites, None):
            with in_place(net, form, given_sites):
                changed = outcome(net, x)
            assert len(changed) == len(plain)
            assert all(torch.equal(one, other) for one, other in zip(plain, changed, strict=True))


def line_of(function: Callable[..., Any], text: str) -> int:
    """Return the line of its file on which the code of a function has a text."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)
