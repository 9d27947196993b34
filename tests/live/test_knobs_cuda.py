"""Knobs on a real GPU, whose part a virtual one plays: counters, allocator history and prediction are those of CUDA."""

from __future__ import annotations

import dataclasses

import pytest

import memexplore as mx
from memexplore.hardware import catalogue
from memexplore.live import forecasts
from memexplore.recorder import cuda
from memexplore.run.knobs.knobs import Knobs
from tests.live.knob_loops import CHECKPOINT, Trained, states
from tests.live.test_cuda import real_gpu  # noqa: F401

pytestmark = pytest.mark.usefixtures("every_setting_fits")


@pytest.fixture
def device(real_gpu, monkeypatch: pytest.MonkeyPatch) -> str:  # noqa: F811
    """The virtual T4 as a real GPU, also for predictions."""
    monkeypatch.setattr(forecasts, "active", lambda: None)
    monkeypatch.setattr(cuda, "catalogue_gpu", lambda device: dataclasses.replace(catalogue.find("T4")))
    return "cuda"


def test_a_switched_checkpoint_is_measured_and_predicted(device):
    loop = Trained(device)
    with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
        for number in range(8):
            if number in (1, 5):
                live.knobs = CHECKPOINT if number == 1 else Knobs()
            loop.step()
        found = live.predict(CHECKPOINT, 120)
    assert live.device.startswith("cuda")
    assert states(live) == ["applied", "applied"]
    # The counter did not rise, so the history of the step gives its peak.
    assert live.steps()["peak_from"].tolist()[2] == "recorded"
    tape = live.tape(3)
    assert tape.peak()[0] == live.changes()["measured_peak"][0]
    assert found.failed == ""
    assert found.peak_allocated == live.changes()["measured_peak"][0]


def test_everything_but_precision_is_switched_on_the_gpu(device):
    # The recorder's mode on tensors of the virtual GPU, which stands for a real one here, does not run autocast.
    loop = Trained(device)
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step_of(live)
        live.knobs = Knobs(checkpoint="sqrt", inplace="on", accumulation=2)
        for _ in range(3):
            loop.step_of(live)
        assert live.applied.accumulation == 2
    assert states(live) == ["applied"]
