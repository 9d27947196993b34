"""With values="real" a model trains on the virtual GPU as on the CPU, to the last bit, with the memory of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore.virtual_gpu.dispatch import cpu_ops
from memexplore.virtual_gpu.values import known_values, notes


class _Tokens(nn.Module):
    """An embedding, layers on its rows, and logits."""

    def __init__(self, layers: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Embedding(50, 16), layers, nn.Linear(width, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result = self.layers(self.embedding(tokens))
        return self.head(result[0] if isinstance(result, tuple) else result)


def _vectors(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(16, 20, generator=generator), torch.randint(10, (16,), generator=generator)


def _images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 3, 12, 12, generator=generator), torch.randint(10, (8,), generator=generator)


def _tokens(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(50, (4, 12), generator=generator)
    return tokens, tokens


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.3), nn.RMSNorm(64), nn.LogSigmoid(), nn.Linear(64, 10)
    )


def _convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, groups=2), nn.GroupNorm(4, 16), nn.GELU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(16, 10)),
    )


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    return _Tokens(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 16)


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]]] = {
    "perceptron": (_perceptron, _vectors),
    "convolutions": (_convolutions, _images),
    "transformer": (_transformer, _tokens),
    "lstm": (lambda: _Tokens(nn.LSTM(16, 24, 2, batch_first=True, dropout=0.2, bidirectional=True), 48), _tokens),
    "gru": (lambda: _Tokens(nn.GRU(16, 24, 2, batch_first=True), 24), _tokens),
}
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda weights: torch.optim.AdamW(weights, 1e-2),
}


def _train(name: str, optimizer: str, device: str) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of four steps and an accuracy, and the weights."""
    build, batch = _MODELS[name]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = build().to(device)
    steps, losses = _OPTIMIZERS[optimizer](model.parameters()), []
    for _ in range(4):
        source, target = (tensor.to(device) for tensor in batch(generator))
        steps.zero_grad()
        loss = functional.cross_entropy(model(source).flatten(0, -2), target.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        source, target = (tensor.to(device) for tensor in batch(generator))
        losses.append((model(source).argmax(-1) == target).float().mean().item())
    return losses, [weight.detach().cpu().clone() for weight in model.parameters()]


@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
@pytest.mark.parametrize("name", _MODELS)
def test_losses_accuracy_and_weights_equal_those_of_the_cpu(name: str, optimizer: str) -> None:
    losses, weights = _train(name, optimizer, "cpu")
    with mx.virtual("T4", values="real"):
        found, found_weights = _train(name, optimizer, "cuda")
    assert found == losses
    assert all(torch.equal(one, other) for one, other in zip(found_weights, weights, strict=True))


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.SparseAdam(p), lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.Adagrad(p)]
)
def test_sparse_gradients_change_the_weights_as_on_the_cpu(make: Any) -> None:
    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        table = nn.Embedding(20, 4, sparse=True).to(device)
        optimizer, losses = make(table.parameters()), []
        for _ in range(3):
            loss = table(torch.tensor([[1, 2, 2], [5, 1, 9]]).to(device)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return [*losses, table.weight.detach().cpu().tolist()]

    expected = run("cpu")
    with mx.virtual("T4", values="real"):
        assert run("cuda") == expected


def test_the_memory_is_that_of_a_run_without_values() -> None:
    peaks = []
    for setting in ("none", "real"):
        with mx.virtual("T4", values=setting):
            _train("convolutions", "adamw", "cuda")
            peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    assert peaks[0] == peaks[1]


def test_cells_agree_to_rounding() -> None:
    # The biases of a cell are added in another order.
    def run(device: str) -> float:
        torch.manual_seed(0)
        lstm, gru = nn.LSTMCell(8, 16).to(device), nn.GRUCell(16, 8).to(device)
        source = torch.randn(4, 8).to(device)
        hidden, _ = lstm(source)
        gru(hidden, source).square().sum().backward()
        return lstm.weight_ih.grad.norm().item()  # type: ignore[union-attr]

    expected = run("cpu")
    with mx.virtual("T4", values="real"):
        assert run("cuda") == pytest.approx(expected, rel=1e-6)


def test_modules_built_on_the_gpu_have_values() -> None:
    with mx.virtual("T4", values="real"):
        # 1024 * 1024 * 4 bytes: a module of this size has no values with the other settings.
        assert nn.Linear(1024, 1024).weight.abs().sum().item() > 0


def test_early_stopping_stops() -> None:
    with mx.virtual("T4", values="real"):
        weight = torch.tensor([4.0], device="cuda", requires_grad=True)
        rounds = 0
        while weight.item() > 1:
            weight.square().backward()
            with torch.no_grad():
                weight -= 0.25 * weight.grad  # type: ignore[operator]
            weight.grad = None
            rounds += 1
        # Each round halves the weight: 4, 2, 1.
        assert rounds == 2


def test_an_op_that_the_cpu_lacks_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setitem(cpu_ops.OPS, torch.ops.aten.relu.default, missing)
    with mx.virtual("T4", values="real"):
        result = torch.ones(3, device="cuda").relu()
        assert not known_values.is_known(result)
        assert any("aten.relu.default on, values are not computed" in note for note in notes.notes_of_run())
