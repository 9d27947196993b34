"""In-place activations in convolutional nets, transformers, checkpoints and autocast: the same training to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memexplore.run.knobs.inplace_sites.activations import Form
from memexplore.run.knobs.inplace_sites.in_place import in_place
from memexplore.run.knobs.inplace_sites.legal import legal_sites, observed
from tests.knobs.inplace_steps import Net, _sum, assert_same_results, found, reasons, step


class Residual(nn.Module):
    """A residual block with its activations after the convolutions, or before them."""

    def __init__(self, before: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.act1, self.act2 = (before or nn.ReLU)(), (before or nn.ReLU)()
        self.pre = before is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pre:
            h = self.conv1(self.act1(self.norm1(x)))
            return x + self.conv2(self.act2(self.norm2(h)))
        h = self.act1(self.norm1(self.conv1(x)))
        return self.act2(x + self.norm2(self.conv2(h)))


class Skips(nn.Module):
    """A U-Net with one skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = functional.relu(self.down(x))
        h = functional.interpolate(functional.relu(self.middle(functional.max_pool2d(skip, 2))), scale_factor=2)
        return functional.relu(self.up(torch.cat([h, skip], 1)))


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "residual": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), Residual(), Residual()), 4),
    "pre-activation": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), *(Residual(nn.LeakyReLU) for _ in range(2))), 4),
    "skips": (Skips, 3),
}


@pytest.mark.parametrize("name", NETS)
def test_all_activations_of_convolutional_nets_are_legal(name):
    build, count = NETS[name]
    net, x = build(), torch.randn(2, 4, 8, 8)
    sites = legal_sites(lambda: _sum(net(x)).backward(), net)
    assert len(sites.sites) == count
    assert not sites.skipped
    assert_same_results(net, sites, x)


@pytest.mark.parametrize("activation", ["gelu_new", "silu", "relu"])
def test_activation_modules_of_a_transformer_that_call_a_function_run_in_place(activation):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        hidden_act=activation,
    )  # fmt: skip
    net = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(16).reshape(2, 8)
    call = lambda: net(input_ids=tokens, labels=tokens).loss.backward()  # noqa: E731
    sites = legal_sites(call, net)
    # silu needs its input in backward; relu keeps its output; the new GELU has a tanh, whose output it keeps.
    assert len(sites.sites) == 2
    assert len(sites.skipped) == (2 if activation == "silu" else 0)
    assert str(sites.sites[0].call).startswith("model.layers.0.mlp.act_fn")
    call()
    plain = [weight.grad.clone() for weight in net.parameters()]
    with in_place(net, Form.IN_PLACE, sites):
        net.zero_grad()
        call()
    assert all(torch.equal(one, weight.grad) for one, weight in zip(plain, net.parameters(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_in_a_checkpoint_are_legal_unless_recomputation_reads_their_input(reentrant):
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        h = net.first(x)
        for block in net.blocks:
            h = checkpoint(block, h, use_reentrant=reentrant)
        return h

    def block() -> nn.Sequential:
        # The first activation reads the block's input, which recomputation reads again.
        return nn.Sequential(nn.LeakyReLU(), nn.Linear(8, 8), nn.LeakyReLU(), nn.Sigmoid())

    net = Net(forward, blocks=nn.ModuleList([block(), block()]))
    sites = found(net)
    why = reasons(sites)
    assert "read again" in why["blocks.0.0"]
    assert "read again" in why["blocks.1.0"]
    assert why["blocks.0.2"] == ""
    assert why["blocks.1.2"] == ""
    # In place the activation before keeps its output, which no version counter guards in a checkpoint.
    assert "blocks.0.2 keeps" in why["blocks.0.3"]
    assert_same_results(net, sites)


def test_a_function_in_a_checkpointed_forward_is_legal_only_if_observed_before_wrapping():
    net = Net(
        lambda net, x: net.inner(net.first(x)), inner=Net(lambda net, x: net.second(functional.relu(net.first(x))))
    )
    inner = net.inner.forward

    def wrap() -> None:
        forward = net.inner.forward
        net.inner.forward = lambda x: checkpoint(forward, x, use_reentrant=False)

    wrap()
    assert "a checkpoint runs it again" in legal_sites(step(net), net).skipped[0].reason
    net.inner.forward = inner
    with observed(net):
        wrap()
        assert len(legal_sites(step(net), net).calls) == 1
        net.inner.forward = inner


def test_activations_under_autocast_are_legal():
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.second(functional.relu(net.first(x)) + net.act(net.third(x).float())).float()

    net = Net(forward, act=nn.LeakyReLU())
    sites = legal_sites(step(net), net)
    assert len(sites.sites) == 2
    assert not sites.skipped
    assert_same_results(net, sites)


def test_activations_are_legal_if_backward_runs_twice():
    net = Net(lambda net, x: net.second(net.act(net.first(x))), act=nn.LeakyReLU())
    x = torch.randn(4, 8)

    def call() -> None:
        loss = net(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    sites = legal_sites(call, net)
    assert sites.modules == ("act",)
    call()
    plain = [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]
    net.zero_grad()
    with in_place(net, Form.IN_PLACE, sites):
        call()
    changed = [weight.grad for weight in net.parameters() if weight.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(plain, changed, strict=True))
