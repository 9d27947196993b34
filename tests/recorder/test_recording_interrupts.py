"""Ctrl-C while a recording on a real device notes that a tensor has died: it is raised, and the free is recorded."""

from __future__ import annotations

import signal
import time

import pytest
import torch

import memexplore as mx
from memexplore.recorder.recorder import Recorder
from memexplore.tape import Action


def test_ctrl_c_while_a_dead_tensor_is_noted_is_raised_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # A shell ignores Ctrl-C in what it starts in the background, such as this test run.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    free = Recorder.free

    def interrupted(self: Recorder, address: int, size: int) -> None:
        monkeypatch.setattr(Recorder, "free", free)
        signal.raise_signal(signal.SIGINT)
        free(self, address, size)

    try:
        with pytest.raises(KeyboardInterrupt), mx.record(device="cpu") as recording:
            x = torch.ones(1000)
            monkeypatch.setattr(Recorder, "free", interrupted)
            del x
            # Python drops an exception in the callback of a weak reference, and the program would go on.
            for _ in range(1000):
                time.sleep(0.001)
    finally:
        signal.signal(signal.SIGINT, before)
    tape = recording.tape
    assert tape.size[tape.action == Action.FREE_COMPLETED].tolist() == [4000]
