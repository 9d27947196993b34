"""What the layers of a watched run keep for backward, in recorded and in light steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memexplore as mx
from memexplore.live.layer_meter import LayerMeter
from memexplore.live.live import Live
from memexplore.recorder.module_hooks import Names
from tests.live.training import on


class Residual(nn.Module):
    """Frees what a layer inside returned, and keeps as much itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(self.act(self.up(values)))


def watched(model: nn.Module, batch: int = 8, calls: int = 1, **options: Any) -> Live:
    """Watch three steps of a model whose inputs have 64 features; the first one is recorded."""
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters())
    with mx.watch(model, optimizer, first=1, every=1000, **options) as live:
        for _ in range(3):
            for part in torch.randn(batch, 64, device="cuda").chunk(calls):
                model(part).sum().backward()
            optimizer.step()
    assert live.steps()["recorded"].tolist()[:2] == ["first steps", ""]
    return live


def test_layers_of_residual_blocks_have_what_is_left_when_the_model_has_returned():
    with on("cuda"):
        layers = watched(nn.Sequential(Residual(), Residual())).layers()
    # ReLU's result, and the sum of the block, which is the input of the next one; `up` and `down` keep nothing.
    assert layers[1].to_dict() == {"0": 8 * 64 * 4, "0.act": 8 * 256 * 4, "1": 8 * 64 * 4, "1.act": 8 * 256 * 4}
    # A light step with the calls of the recorded one
    assert layers[2].tolist() == layers[1].tolist()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, values, use_reentrant=False)


def test_layers_inside_a_checkpoint_keep_nothing_but_its_result():
    with on("cuda"):
        layers = watched(nn.Sequential(Checkpointed(), Checkpointed())).layers()
    assert layers[1].to_dict() == {"0.inner.2": 8 * 64 * 4, "1.inner.2": 8 * 64 * 4}
    assert layers[2].tolist() == layers[1].tolist()


def test_micro_batches_count_once():
    with on("cuda"):
        whole, parts = (watched(nn.Sequential(nn.Linear(64, 256), nn.GELU()), 32, calls).layers() for calls in (1, 4))
    # GELU keeps the input, whose size is that of the result.
    assert whole[1].tolist() == [32 * 256 * 4] * 2
    assert parts[1].tolist() == parts[2].tolist() == [8 * 256 * 4] * 2


def test_two_calls_before_one_backward_pass_count_together():
    with on("cuda"):
        model = nn.Linear(64, 256).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        with mx.watch(model, optimizer, first=1, every=1000) as live:
            for _ in range(2):
                first, second = model(torch.ones(8, 64, device="cuda")), model(torch.ones(8, 64, device="cuda"))
                (first * second).sum().backward()
                optimizer.step()
    assert live.layers()[1].tolist() == live.layers()[2].tolist() == [2 * 8 * 256 * 4]


def test_light_steps_of_shapes_that_were_not_recorded_have_what_counters_say():
    with on("cuda"):
        meter = LayerMeter(names := Names(), torch.cuda.memory_allocated)
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU()).cuda()
        meter.adopt(model)
        model(torch.ones(1, 64, device="cuda")).sum().backward()  # cuBLAS's workspace, and gradients
        for part in torch.randn(32, 64, device="cuda").chunk(4):
            meter.open()
            value = part
            for layer in model:
                meter.begin(layer)
                value = layer(value)
                meter.end()
            meter.close()
            value.sum().backward()
            del value
        kept = meter.take(1.0)
    assert {names.table[number]: size for number, size in kept.items()} == {"0": 8 * 256 * 4, "1": 8 * 256 * 4}


class Activated(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(64, 64), activation

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(values))


def test_an_activation_that_layers_share_has_its_name_in_each_in_recorded_and_light_steps():
    with on("cuda"):
        activation = nn.Sigmoid()
        layers = watched(nn.Sequential(*(Activated(activation) for _ in range(3)))).layers()
        assert layers[1].to_dict() == {f"{number}.activation": 8 * 64 * 4 for number in range(3)}
        meter = LayerMeter(names := Names(), torch.cuda.memory_allocated)
        model = Activated(activation).cuda()
        other = nn.Sequential(model, Activated(activation).cuda())
        meter.adopt(other)
        kept = []
        meter.open()
        for layer in other:
            meter.begin(layer)
            meter.begin(activation)
            kept.append(torch.ones(1024, device="cuda"))
            meter.end()
            meter.end()
        meter.close()
        measured = {names.table[number]: size for number, size in meter.take(1.0).items()}
    assert measured == {"0.activation": 1024 * 4, "1.activation": 1024 * 4}
