"""Watched runs whose models are not named, as those of a script."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memexplore as mx
from tests.live.training import network, on

BOTH = pytest.mark.parametrize("device", ["cpu", "cuda"])


@BOTH
def test_loss_functions_and_parts_of_a_model_are_no_micro_batches_of_their_own(device):
    with on(device):
        encoder, decoder = network(device), nn.Linear(10, 4).to(device)
        criterion = nn.MSELoss()
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)

        def loss():
            return criterion(decoder(encoder(torch.ones(8, 64, device=device))), torch.zeros(8, 4, device=device))

        with mx.watch() as live:
            for _ in range(2):
                for _ in range(3):
                    loss().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    loss()
            loss().backward()
            optimizer.step()
    assert live.steps()["micro_batches"].tolist() == [3, 3, 1]
    assert live.steps()["evaluations"].tolist() == [0, 1, 1]


def test_a_compiled_model_is_compiled_once_and_its_steps_are_watched():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    torch.compiler.reset()
    model = torch.compile(network(), backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mx.watch() as live:
        for _ in range(5):
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(compiled) == 1
    assert live.steps()["step"].tolist() == [1, 2, 3, 4, 5]
    assert live.recorded == []
    assert "The model is compiled" in live.notes[0]
