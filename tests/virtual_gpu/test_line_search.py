"""LBFGS on a virtual GPU: closures called, history kept, and settings of the optimizer restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx


def _step(optimizer: torch.optim.LBFGS, model: nn.Module, device: str = "cuda") -> int:
    """Run a step and return how often it called the closure."""
    inputs = torch.linspace(-1, 1, 64 * 200, device=device).view(64, 200)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return calls


def _model() -> nn.Module:
    # 200 x 200 weights are 160 KB, which is more than the floats whose values are known by default.
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 1))


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_step_with_unknown_gradients_runs_all_iterations(line_search: str | None) -> None:
    with mx.virtual("T4"):
        model = _model().cuda()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn=line_search)
        calls = _step(optimizer, model)
        state: dict[str, Any] = optimizer.state[next(model.parameters())]
    # Without a search the last iteration evaluates nothing; with one, each iteration evaluates its first point.
    assert calls == (5 if line_search is None else 6)
    assert state["n_iter"] == 5
    assert len(state["old_dirs"]) == 4


def test_history_takes_memory() -> None:
    def held(iterations: int) -> int:
        with mx.virtual("T4"):
            model = _model().cuda()
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=iterations)
            _step(optimizer, model)
            return torch.cuda.memory_allocated()

    # 40,401 parameters take 161,604 B, 161,792 B in blocks; an iteration adds y and s, and 1 / ys in a block of 512 B.
    # Another scalar, al, is held for each pair that a direction was computed from.
    added = held(6) - held(5)
    assert added == 2 * 161_792 + 2 * 512


def test_settings_of_the_optimizer_are_restored_after_an_error() -> None:
    with mx.virtual("T4"):
        model = _model().cuda()
        optimizer = torch.optim.LBFGS(model.parameters())

        def closure() -> float:
            raise KeyError("loss")

        with pytest.raises(KeyError):
            optimizer.step(closure)
        assert optimizer.param_groups[0]["tolerance_change"] == 1e-9


def test_known_values_decide_as_on_the_cpu() -> None:
    def calls(device: str) -> list[int]:
        model = _model().to(device)
        # Close to the minimum the last digits, which depend on the alignment of the memory, decide.
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")
        return [_step(optimizer, model, device)]

    with mx.virtual("T4", values="real"):
        on_gpu = calls("cuda")
    assert on_gpu == calls("cpu")
