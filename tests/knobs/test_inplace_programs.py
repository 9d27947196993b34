"""Random programs with activations: the same loss and gradients in place and out of place."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memexplore.run.knobs.inplace_sites.activations import Form
from memexplore.run.knobs.inplace_sites.in_place import in_place
from memexplore.run.knobs.inplace_sites.legal import legal_sites

UNARY = {
    "relu": functional.relu,
    "leaky_relu": functional.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.Tensor.tanh,
    "silu": functional.silu,
    "clamp": lambda x: torch.clamp(x, -0.5, 0.5),
    "relu in place": lambda x: functional.relu(x, inplace=True),
    "double": lambda x: x * 2,
    "sin": torch.sin,
    "flip": lambda x: x.t(),
    "view": lambda x: x.view(4, 4) if x.is_contiguous() else x.reshape(4, 4),
    "rows": lambda x: torch.cat([x[:2], x[2:]]),
    "half": lambda x: x[:2].repeat(2, 1),
    "expand": lambda x: x[:1].expand(4, 4),
    "detach": lambda x: x.detach(),
}
VIEWS = {"flip", "view", "expand", "detach"}
BINARY = {"add": torch.add, "mul": torch.mul, "product": torch.matmul}
PROGRAM = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 4)),
        st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 4), st.integers(0, 4)),
    ),
    min_size=1,
    max_size=10,
)


class Program(nn.Module):
    """Straight-line code: each line applies an op to results of earlier lines, counted backwards from the last."""

    def __init__(self, lines: list[tuple[Any, ...]], recomputed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4))
        self.lines = lines
        self.body = Body(lines)
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x @ self.weight
        return checkpoint(self.body, start, use_reentrant=False) if self.recomputed else self.body(start)


class Body(nn.Module):
    def __init__(self, lines: list[tuple[Any, ...]]) -> None:
        super().__init__()
        self.lines = lines

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for name, *operands in self.lines:
            chosen = [values[-1 - number % len(values)] for number in operands]
            values.append((UNARY.get(name) or BINARY[name])(*chosen))
        return values[-1]


def _run(program: Program, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    program.zero_grad()
    loss = program(x).pow(2).sum()
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), program.weight.grad


@settings(max_examples=150)
@given(PROGRAM, st.booleans())
@example(
    lines=[("view", 0), ("clamp", 0), ("view", 1), ("clamp", 0), ("add", 4, 4)]
    + [("clamp", 0), ("clamp", 0), ("leaky_relu", 4), ("add", 0, 3)],
    recomputed=False,
)
def test_any_program_gives_the_same_loss_and_gradients_in_place(lines, recomputed):
    program = Program(lines, recomputed)
    x = torch.linspace(-1.5, 2, 16, dtype=torch.float64).reshape(4, 4)
    try:
        loss, gradient = _run(program, x)
    except RuntimeError:
        return  # the program itself overwrites what autograd needs
    sites = legal_sites(lambda: _run(program, x) and None, program)
    for form in (Form.IN_PLACE, Form.OUT_OF_PLACE):
        with in_place(program, form, sites):
            changed, changed_gradient = _run(program, x)
        assert torch.equal(changed, loss)
        assert (gradient is None) == (changed_gradient is None)
        if gradient is not None:
            # An op in place on a view gives its base a new autograd node (CopySlices), so autograd may sum the
            # gradients of a tensor with several readers in another order: the last of the 53 bits differ.
            views = any(name in VIEWS for name, *_ in lines)
            tolerance = 2**-45 * float(gradient.abs().max()) if views else 0
            torch.testing.assert_close(changed_gradient, gradient, rtol=0, atol=tolerance)
