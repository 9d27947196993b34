"""`torch.jit.trace` on the virtual GPU: the traced module runs, and its graph has the ops of a trace on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memexplore as mx


class Recurrent(nn.Module):
    """An embedding and an LSTM, whose forward reads sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        batch, length = tokens.shape
        return states[:, -1] + torch.zeros(batch, 1, device=tokens.device) * length


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3))


def ops(traced: torch.jit.ScriptModule) -> list[str]:
    return sorted(node.kind() for node in traced.inlined_graph.nodes() if node.kind().startswith("aten::"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("build", "data"),
    [(convolutional, torch.rand(2, 3, 8, 8)), (Recurrent, torch.zeros(2, 5, dtype=torch.int64))],
    ids=["convolutional", "recurrent"],
)
def test_trace_records_the_ops_that_it_records_on_the_cpu(build: type[nn.Module], data: torch.Tensor) -> None:
    model = build().eval()
    expected = torch.jit.trace(model, data)
    with mx.virtual("T4"):
        model.cuda()
        traced = torch.jit.trace(model, data.cuda())
        result = traced(data.cuda())
    assert ops(traced) == ops(expected)
    assert result.shape == model.cpu()(data).shape


@pytest.mark.filterwarnings("ignore")
def test_a_trace_in_training_mode_passes_its_check() -> None:
    def trace(device: str) -> tuple[list[str], int]:
        model = convolutional().to(device)
        traced = torch.jit.trace(model, torch.rand(2, 3, 8, 8).to(device))
        # The check runs the model again, each time with other running means, and compares the constants of the graphs.
        return ops(traced), int(model[1].num_batches_tracked)

    expected = trace("cpu")
    with mx.virtual("T4"):
        assert trace("cuda") == expected


def test_the_graph_of_a_trace_is_printed_as_without_a_virtual_gpu() -> None:
    traced = torch.jit.trace(lambda x: x + 1 if len(x) > 1 else x, torch.ones(2))
    expected = str(traced.graph)
    with mx.virtual("T4"):
        assert str(traced.graph) == expected
