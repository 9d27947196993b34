"""What the layers of a watched run keep for backward, in recorded and in light steps."""

from __future__ import annotations

import torch
from torch import nn

import memexplore as mx
from tests.live.training import on


class Residual(nn.Module):
    """Frees what a layer inside returned, and keeps as much itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(self.act(self.up(values)))


def test_recorded_and_light_steps_measure_the_same_of_a_residual_block():
    with on("cuda"):
        model = nn.Sequential(Residual(), Residual()).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        with mx.watch(model, optimizer, first=1, every=1000) as live:
            for _ in range(3):
                model(torch.randn(8, 64, device="cuda")).sum().backward()
                optimizer.step()
    layers = live.layers()
    assert live.steps()["recorded"].tolist()[:2] == ["first steps", ""]
    assert layers[2].tolist() == layers[1].tolist()
    # The sum of the block is as large as what `down` returned, and replaces it.
    assert layers[1].to_dict() == {
        f"{block}.{name}": 8 * size * 4 for block in (0, 1) for name, size in (("up", 256), ("act", 256), ("down", 64))
    }
