"""Predictions of settings beside a watched run: what the virtual GPU says of the step that really runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.live import prediction as module
from memexplore.live.prediction import REPLACED, Prediction
from memexplore.run.knobs.knobs import Knobs
from tests.live.knob_loops import CHECKPOINT, SECONDS, WIDTH, Block, Trained, from_the_start, states
from tests.live.training import on
from tests.threads import has_ended


def predicted_of(loop: Trained, knobs: Knobs, steps: int = 3) -> Prediction:
    with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
        for _ in range(steps):
            loop.step()
        return live.predict(knobs, SECONDS)


def test_the_prediction_on_the_virtual_gpu_is_what_a_run_with_the_setting_measures():
    with mx.virtual("T4"):
        found = predicted_of(Trained("cuda"), CHECKPOINT)
    with mx.virtual("T4"):
        measured = from_the_start(4, CHECKPOINT, "cuda")[1].steps()
    assert found.peak_allocated == measured["peak_allocated"].iloc[-1]
    assert found.unchanged_peak == found.measured_peak
    assert found.peak_allocated < found.measured_peak
    assert found.fits is True
    assert found.time_ratio > 1.0
    assert found.assumed == ()


def test_the_prediction_on_the_cpu_is_near_the_recorded_step():
    found = predicted_of(Trained(), CHECKPOINT)
    assert found.capacity is None
    # Predicted sizes are those of the tensors, as recorded ones.
    assert found.unchanged_peak == pytest.approx(found.measured_peak, rel=0.02)


def test_a_switched_setting_has_its_predicted_and_its_measured_peak():
    with mx.virtual("T4"):
        loop = Trained("cuda")
        with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
            loop.step()
            live.knobs = CHECKPOINT
            assert states(live) == ["predicting"]
            ends = time.monotonic() + SECONDS
            while live.applied != CHECKPOINT and time.monotonic() < ends:
                loop.step()
            loop.step()
    changes = live.changes()
    assert changes["predicted_peak"].tolist() == changes["measured_peak"].tolist()


class Language(nn.Module):
    """A model of a class that only its test knows, with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(100, WIDTH), Block(), nn.Linear(WIDTH, 100)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None, unused: Any = None) -> dict[str, Any]:
        logits = self.head(self.blocks(self.embed(ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def language_model() -> nn.Module:
    """Return a model whose class is pickled by value, as one of a notebook cell."""

    class Own(Language):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    return Own()


def language_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> mx.Step:
    ids = torch.zeros(8, 64, dtype=torch.long)
    return mx.Step(model, {"ids": ids, "labels": ids}, optimizer=optimizer)


def train_language(live: Any, model: nn.Module, optimizer: torch.optim.Optimizer, device: str, **more: Any) -> None:
    for _ in range(3):
        ids = torch.zeros(8, 64, dtype=torch.long, device=device)
        model(ids=ids, labels=ids, **more)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_loss_that_the_model_returns_is_its_own(device):
    with on(device):
        model = language_model().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        with mx.watch(model, optimizer, step=language_step(model, optimizer)) as live:
            train_language(live, model, optimizer, device)
            found = live.predict(Knobs(precision="bf16"), SECONDS)
    assert (found.failed, found.assumed) == ("", ())
    assert found.unchanged_peak == pytest.approx(found.measured_peak, rel=0.02)


def test_a_run_without_a_named_model_is_predicted_too():
    with mx.virtual("T4"):
        model = language_model().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        with mx.watch(step=language_step(model, optimizer)) as live:
            train_language(live, model, optimizer, "cuda")
            found = live.predict(CHECKPOINT, SECONDS)
    assert (found.failed, found.assumed) == ("", ())
    assert found.unchanged_peak == pytest.approx(found.measured_peak, rel=0.02)


def test_a_request_that_waits_when_the_run_ends_is_answered():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
        loop.step()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(live.prediction(CHECKPOINT)))
        thread.start()
        thread.join()
        assert not found[0].done()
    assert found[0].result(SECONDS).failed == "The run has ended."


def test_a_step_that_cannot_be_sent_is_named():
    model = Language()
    optimizer = torch.optim.SGD(model.parameters())
    ids, lock = torch.zeros(8, 64, dtype=torch.long), threading.Lock()
    step = mx.Step(model, {"ids": ids, "labels": ids, "unused": lock}, optimizer=optimizer)
    with mx.watch(model, optimizer, step=step) as live:
        train_language(live, model, optimizer, "cpu")
        found = live.predict(CHECKPOINT, SECONDS)
    assert found.failed.startswith("This step cannot be predicted: UnsendableStepError: ")
    assert "lock" in found.failed


def test_what_cannot_be_predicted_is_said_in_a_sentence():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step()
        assert live.predict(CHECKPOINT, SECONDS).failed == (
            "The step of this run is not known: give mx.watch(..., step=mx.Step(...))."
        )
    assert live.predict(CHECKPOINT, SECONDS).failed == "The run has ended."


def test_an_error_of_the_predicted_step_is_the_sentence():
    loop = Trained()
    found = predicted_of(loop, Knobs(checkpoint="layers 9"))
    assert found.failed.startswith("This step cannot be predicted: ValueError: ")
    assert "'9'" in found.failed


def test_another_thread_gets_the_prediction_while_the_main_thread_trains():
    loop = Trained()
    found: list[Prediction] = []
    with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
        loop.step()
        thread = threading.Thread(target=lambda: found.append(live.predict(CHECKPOINT, SECONDS)))
        thread.start()
        ends = time.monotonic() + SECONDS
        while thread.is_alive() and time.monotonic() < ends:
            loop.step()
        thread.join()
    assert found[0].failed == ""
    assert found[0].knobs == CHECKPOINT


def test_a_newer_request_replaces_those_that_wait_and_one_process_serves_all():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
        loop.step()
        settings = [Knobs(checkpoint=f"every {number}") for number in (1, 2, 3, 4)]
        futures = [live.prediction(knobs) for knobs in settings]
        results = [future.result(SECONDS) for future in futures]
        workers = live._session._forecasts._predictor._workers
        ((process, _),) = workers._processes
        assert results[-1].failed == ""
        assert {result.failed for result in results[1:-1]} <= {REPLACED, ""}
        assert REPLACED in {result.failed for result in results}
        live.predict(Knobs(), SECONDS)
        assert live._session._forecasts._predictor._workers is workers
    has_ended(process)


def answer_nothing(packed: bytes, request: Any) -> Generator[Prediction, None, None]:
    """Take a request and never answer it, in place of the process that predicts."""
    time.sleep(10 * SECONDS)
    yield Prediction(request.knobs)


def test_a_process_that_is_busy_with_an_older_request_for_long_is_ended(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.0)
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
        loop.step()
        with monkeypatch.context() as patched:
            patched.setattr(module, "_answer", answer_nothing)
            first = live.prediction(CHECKPOINT)
        predictor = live._session._forecasts._predictor
        ends = time.monotonic() + SECONDS
        while predictor._running is None and time.monotonic() < ends:
            time.sleep(0.01)
        busy = predictor._workers
        second = live.prediction(Knobs(checkpoint="sqrt"))
        assert first.result(SECONDS).failed == REPLACED
        assert second.result(SECONDS).failed == ""
        assert predictor._workers is not busy


def test_no_process_runs_before_the_first_request():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
        loop.step()
        assert live._session._forecasts is None


def test_the_batch_of_a_loop_with_micro_batches_is_predicted_whole():
    with mx.virtual("T4"):
        loop = Trained("cuda")
        with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
            live.predict(Knobs(accumulation=4), SECONDS)
            for number in range(4):
                if number == 1:
                    live.knobs = Knobs(accumulation=4)
                loop.step_of(live)
            found = live.predict(Knobs(), SECONDS)
    peaks = live.steps()["peak_allocated"].tolist()
    assert found.unchanged == Knobs(accumulation=4)
    # The loop holds a loss more, 512 B, and the list of its parts.
    assert found.unchanged_peak == pytest.approx(peaks[3], abs=4096)
    assert found.peak_allocated == pytest.approx(peaks[1], abs=4096)


@pytest.fixture
def on_two_gpus() -> Iterator[None]:
    with mx.virtual("T4"):
        torch.distributed.init_process_group("nccl", rank=0, world_size=2)
        yield
        torch.distributed.destroy_process_group()


def test_what_ddp_adds_to_the_measured_peak_counts_for_a_setting(on_two_gpus: None):
    loop = Trained("cuda")
    model = nn.parallel.DistributedDataParallel(loop.model, device_ids=[0])
    loss = loop.written().loss
    step = mx.Step(model, torch.zeros(loop.batch().shape, device="cpu"), loss=loss, optimizer=loop.optimizer)
    with mx.watch(model, loop.optimizer, step=step) as live:
        for _ in range(3):
            model(loop.batch()).square().mean().backward()
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        found = live.predict(Knobs(precision="off"), SECONDS)
    assert found.failed == ""
    assert found.measured_peak > found.unchanged_peak
    capacity = found.needed + 1
    assert found.refusal() == ""
    assert "are missing" in found._replace(capacity=capacity).refusal()


def test_waiting_for_a_prediction_is_no_part_of_a_step():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
        loop.step()
        began = time.perf_counter()
        live.predict(CHECKPOINT, SECONDS)
        waited = time.perf_counter() - began
        loop.step()
    assert live.steps()["seconds"].iloc[1] < waited
