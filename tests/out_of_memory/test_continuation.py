"""What a program would have done after a failed request: its last complete period again and again."""

from __future__ import annotations

import collections
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.analysis.curves import curve
from memexplore.analysis.picture import picture
from memexplore.out_of_memory.continuation import continuation
from memexplore.tape import Action, Tape

MIB = 1 << 20


def training(steps: int, kept_mib: int = 0) -> Callable[[], None]:
    """Return a program that trains, and keeps some memory of each step."""

    def run() -> None:
        kept = []
        model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.ReLU())]).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(steps):
            model(torch.randn(2048, 512, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(torch.empty(kept_mib * MIB, dtype=torch.uint8, device="cuda"))

    return run


def replay_buffer(steps: int) -> Callable[[], None]:
    """Return a program whose tensors live for three steps, beside some that stay."""

    def run() -> None:
        kept, last = [], collections.deque[torch.Tensor](maxlen=3)
        model = nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(steps):
            last.append(torch.ones(6 * MIB, dtype=torch.uint8, device="cuda"))
            model(torch.randn(256, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(torch.ones(8 * MIB, dtype=torch.uint8, device="cuda"))

    return run


def evaluation(calls: int, kept_mib: int) -> Callable[[], None]:
    """Return a program without steps that keeps a result of each call."""

    def run() -> None:
        results = []
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(3)]).cuda()
        with torch.no_grad():
            for _ in range(calls):
                output = model(torch.randn(1024, 1024, device="cuda"))
                results.append(output.repeat(kept_mib // 4, 1))

    return run


def until_failure(tape: Tape) -> Tape:
    """Return a tape without what Python frees after the failed request."""
    return picture(tape.replace(whole=None))


def requests(tape: Tape) -> np.ndarray:
    return tape.size[(tape.action == Action.ALLOC) & (tape.size > 0)]


@pytest.mark.parametrize(
    ("program", "gpu"),
    [
        (training(12, kept_mib=16), "128MiB"),
        (training(12, kept_mib=7), "100MiB"),
        (evaluation(20, kept_mib=8), "96MiB"),
        (replay_buffer(20), "128MiB"),
    ],
)
def test_it_is_what_the_program_does_with_more_memory(program: Callable[[], None], gpu: str) -> None:
    failed = mx.simulate(program, gpu=gpu)
    assert failed.whole is not None
    found = continuation(until_failure(failed))
    assert found is not None
    assert found.repetitions >= 2
    before = len(requests(until_failure(failed)))
    expected, continued = requests(failed.whole), requests(found.tape)
    assert len(continued) > before
    both = min(len(expected), len(continued))
    assert continued[:both].tolist() == expected[:both].tolist()
    # Frees too: after each request as many bytes are alive.
    alive = [curve(tape, "requested")[(tape.action == Action.ALLOC) & (tape.size > 0)][:both] for tape in
             (found.tape, failed.whole)]  # fmt: skip
    assert alive[0].tolist() == alive[1].tolist()


def test_it_is_not_known_in_the_first_period() -> None:
    failed = mx.simulate(training(3), gpu="20MiB")
    assert continuation(until_failure(failed)) is None


def test_it_is_not_known_of_a_request_that_no_period_has_had() -> None:
    def run() -> None:
        training(4)()
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")

    assert continuation(until_failure(mx.simulate(run, gpu="1GiB"))) is None
