"""Arguments that an op refuses: the error of torch on the CPU, on the virtual GPU too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import memexplore as mx

Work = Callable[[str], object]


def row(device: str) -> torch.Tensor:
    """Return a row that is repeated three times in the same memory."""
    return torch.ones(4, device=device).expand(3, 4)


REFUSED: dict[str, Work] = {
    "add": lambda device: row(device).add_(1),
    "copy": lambda device: row(device).copy_(torch.zeros(3, 4, device=device)),
    "slice": lambda device: row(device).__setitem__(slice(0, 2), torch.zeros(2, 4, device=device)),
    "relu": lambda device: F.relu(row(device), inplace=True),
    "normal": lambda device: row(device).normal_(),
    "clamp": lambda device: row(device).clamp_(0, 1),
    "scatter": lambda device: row(device).scatter_(0, torch.zeros(1, 4, dtype=torch.long, device=device), 1.0),
    "index add": lambda device: row(device).index_add_(
        0, torch.zeros(1, dtype=torch.long, device=device), torch.ones(1, 4, device=device)
    ),
    "leaky relu": lambda device: (
        F.leaky_relu(2 * torch.ones(3, device=device, requires_grad=True), -0.1, inplace=True).sum().backward()
    ),
}
TWO_SIZES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "add": torch.add,
    "in place": torch.Tensor.mul_,
    "comparison": torch.lt,
    "where": lambda one, two: torch.where(one > 0, one, two),
    "addcmul": lambda one, two: torch.addcmul(one, one, two),
    "lerp": lambda one, two: torch.lerp(one, two, 0.5),
    "another dtype": lambda one, two: one.half() + two,
    "loss": F.mse_loss,
    "fewer dimensions": lambda one, two: one + two[0],
    "one of each": lambda one, two: one[:1, :, None] - two[:, None],
}
REFUSED |= {
    f"{name} of two sizes": lambda device, op=op: op(
        torch.ones(2, 9, 6, device=device), torch.ones(2, 9, 4, device=device)
    )
    for name, op in TWO_SIZES.items()
}
ACCEPTED: dict[str, Work] = {
    "fill": lambda device: row(device).fill_(2),
    "zero": lambda device: row(device).zero_(),
    "one row": lambda device: torch.ones(4, device=device).expand(1, 4).add_(1),
    "no element": lambda device: torch.ones(0, device=device).expand(3, 0).add_(1),
    "leaky relu out of place": lambda device: (
        F.leaky_relu(torch.ones(3, device=device, requires_grad=True), -0.1).sum().backward()
    ),
}


def message(work: Work, device: str) -> str:
    with pytest.raises(RuntimeError) as error:
        work(device)
    return str(error.value)


@pytest.mark.parametrize("work", REFUSED.values(), ids=REFUSED)
def test_the_error_is_that_of_the_cpu(work: Work) -> None:
    expected = message(work, "cpu")
    with mx.virtual("T4"):
        assert message(work, "cuda") == expected


@pytest.mark.parametrize("work", ACCEPTED.values(), ids=ACCEPTED)
def test_what_the_cpu_accepts_runs(work: Work) -> None:
    work("cpu")
    with mx.virtual("T4"):
        work("cuda")


def _shuffled_batches() -> list[torch.Tensor]:
    torch.set_default_device("cuda")  # RandomSampler makes a generator of the CPU, and torch.randperm is on the GPU
    try:
        return list(torch.utils.data.DataLoader([1, 2, 3], shuffle=True))
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
        lambda: torch.randperm(3, device="cuda", generator=torch.Generator()),
        lambda: torch.empty(3, device="cuda").normal_(generator=torch.Generator()),
        lambda: torch.multinomial(torch.ones(3, device="cuda"), 2, generator=torch.Generator()),
        lambda: torch.bernoulli(torch.ones(3, device="cuda"), generator=torch.Generator()),
        _shuffled_batches,
    ],
)
def test_a_generator_of_the_cpu_draws_nothing_on_the_gpu(draw: Callable[[], object]) -> None:
    # check_generator in ATen/core/Generator.h
    with mx.virtual("T4"), pytest.raises(RuntimeError, match=r"^Expected a 'cuda' device type for generator but"):
        draw()


def test_a_generator_of_the_cpu_draws_there() -> None:
    with mx.virtual("T4"):
        weight = torch.nn.Linear(1024, 1024).weight  # on the CPU, without values
        torch.nn.init.normal_(weight, generator=torch.Generator())
        torch.randn(3, generator=torch.Generator()).cuda()
        generator = torch.Generator("cuda")
        torch.ones(3, device="cuda").uniform_(generator=generator)
        with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
            torch.randn(3, generator=generator)
