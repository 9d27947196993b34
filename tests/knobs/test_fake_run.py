"""The fake run of a model's call: what it keeps from the process."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

from memexplore.run.knobs.inplace_sites.fake_run import fake_run


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at Ctrl-C, also where pytest was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupt_waits_until_the_fake_run_has_ended() -> None:
    linear, before, calls = torch.nn.Linear(2, 2), signal.getsignal(signal.SIGINT), []

    def interrupted() -> None:
        with fake_run(linear, (torch.ones(1, 2),), {}) as call:
            signal.raise_signal(signal.SIGINT)
            call()
            calls.append(linear.weight.grad)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(calls) == 1
    assert signal.getsignal(signal.SIGINT) is before
    assert linear.weight.grad is None


def test_error_in_the_fake_run_comes_through_without_an_interrupt() -> None:
    linear, before = torch.nn.Linear(2, 2), signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="of the block"), fake_run(linear, (torch.ones(1, 2),), {}):
        raise ValueError("of the block")
    assert signal.getsignal(signal.SIGINT) is before
