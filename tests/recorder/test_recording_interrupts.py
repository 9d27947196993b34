"""Ctrl-C while a recording on a real device notes that a tensor has died: it is raised, and the free is recorded."""

from __future__ import annotations

import signal
import time

import pytest
import torch

import memexplore as mx
from memexplore.recorder import rows
from memexplore.tape import Action


def test_ctrl_c_while_a_dead_tensor_is_noted_is_raised_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # A shell ignores Ctrl-C in what it starts in the background, such as this test run.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    clock = rows._clock

    def interrupted() -> int:
        monkeypatch.setattr(rows, "_clock", clock)
        signal.raise_signal(signal.SIGINT)
        return clock()

    try:
        with pytest.raises(KeyboardInterrupt), mx.record(device="cpu") as recording:
            x = torch.ones(1000)
            monkeypatch.setattr(rows, "_clock", interrupted)
            del x
            torch.ones(1)
            for _ in range(1000):
                time.sleep(0.001)
    finally:
        signal.signal(signal.SIGINT, before)
    tape = recording.tape
    assert tape.size[tape.action == Action.FREE_COMPLETED].tolist() == [4000, 4]  # 1 000 and 1 numbers of 4 bytes
