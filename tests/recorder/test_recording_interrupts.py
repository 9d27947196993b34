"""Ctrl-C while a recording on a real device notes that a tensor has died: it is raised, and the free is recorded."""

from __future__ import annotations

import signal
import time
from collections import deque
from typing import Any

import pytest
import torch

import memexplore as mx
from memexplore.recorder import recorder
from memexplore.tape import Action


def test_ctrl_c_while_a_dead_tensor_is_noted_is_raised_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # A shell ignores Ctrl-C in what it starts in the background, such as this test run.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signals = [signal.SIGINT]

    class Interrupted(deque[Any]):
        def popleft(self) -> Any:
            dead = super().popleft()
            if signals:
                signal.raise_signal(signals.pop())
            return dead

    monkeypatch.setattr(recorder, "deque", Interrupted)
    try:
        with pytest.raises(KeyboardInterrupt), mx.record(device="cpu") as recording:
            x = torch.ones(1000)
            del x
            torch.ones(1)  # the row of the dead tensor is written before that of this one
            for _ in range(1000):
                time.sleep(0.001)
    finally:
        signal.signal(signal.SIGINT, before)
    tape = recording.tape
    freed = tape.size[tape.action == Action.FREE_COMPLETED].tolist()
    assert not signals
    # 1 000 numbers of 4 bytes; the exception may come before the rows of `torch.ones(1)`.
    assert freed[0] == 4000
