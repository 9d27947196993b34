"""A setting that may end a watched run is refused: it is predicted first, or known not to need more memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.run.knobs.knobs import Knobs
from tests.live.knob_loops import CHECKPOINT, Tight, Trained, judged, states, tight_gpu

OFFLOAD = Knobs(offload="saved tensors on the CPU")
KEPT = Knobs(checkpoint="none")
IN_PLACE = Knobs(inplace="on")
NEEDS_STEP = r"give mx\.watch\(\.\.\., step=mx\.Step\(\.\.\.\)\)"


@pytest.mark.parametrize(
    "knobs",
    [CHECKPOINT, OFFLOAD, Knobs(precision="off"), IN_PLACE.replace(checkpoint="sqrt")],
    ids=str,
)
def test_without_a_step_a_setting_that_may_raise_the_peak_is_refused_with_what_to_give(knobs):
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step()
        with pytest.raises(ValueError, match=NEEDS_STEP):
            live.knobs = knobs
        loop.step()
        assert live.knobs == live.applied == Knobs()
    assert states(live) == ["refused"]


def test_without_a_step_a_setting_that_cannot_raise_the_peak_and_the_way_back_are_taken():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step()
        loop.step()
        live.knobs = IN_PLACE
        loop.step()
        assert live.applied == IN_PLACE
        live.knobs = Knobs()
        loop.step()
    assert states(live) == ["applied", "applied"]


def test_a_setting_that_was_measured_with_less_optimizer_state_may_need_more_now():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        live.knobs = IN_PLACE
        loop.step()  # as written, and the optimizer has no state before
        loop.step()
        with pytest.raises(ValueError, match=NEEDS_STEP):
            live.knobs = Knobs()


def test_a_setting_that_was_measured_with_smaller_inputs_may_need_more_now():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: int) -> None:
        model(torch.ones(batch, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with mx.watch(model, optimizer) as live:
        step(2)
        live.knobs = IN_PLACE
        step(2)
        step(4)
        with pytest.raises(ValueError, match=NEEDS_STEP):
            live.knobs = Knobs()
        step(2)
        live.knobs = Knobs()
    assert states(live) == ["applied", "refused", "undone"]


def test_a_setting_that_does_not_fit_is_refused_and_says_by_how_much():
    with tight_gpu():
        loop = Tight()
        with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
            loop.step()
            live.knobs = KEPT
            assert judged(live, loop.step) == "refused"
            assert live.applied == live.knobs == Knobs()
    reason = live.changes()["reason"][0]
    assert reason.startswith("It needs ")
    assert reason.endswith(" MiB are missing.")


def test_a_setting_that_fits_takes_effect_after_its_prediction_and_then_at_once():
    with tight_gpu():
        loop = Tight()
        with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
            loop.step()
            loop.step()
            live.knobs = OFFLOAD
            assert (states(live), live.knobs, live.applied) == (["predicting"], OFFLOAD, Knobs())
            assert judged(live, loop.step) == "applied"
            live.knobs = Knobs()
            loop.step()
            live.knobs = OFFLOAD
            loop.step()
            assert live.applied == OFFLOAD
    assert states(live) == ["applied"] * 3


def test_a_setting_whose_prediction_fails_is_refused_with_the_error():
    loop = Trained()
    step = mx.Step(loop.model, torch.zeros(4, 3), loss=lambda output: output.sum(), optimizer=loop.optimizer)
    with mx.watch(loop.model, loop.optimizer, step=step) as live:
        loop.step()
        live.knobs = CHECKPOINT
        assert judged(live, loop.step) == "refused"
    assert live.changes()["reason"][0].startswith("This step cannot be predicted: RuntimeError: ")


def test_a_step_with_a_smaller_batch_than_the_loop_does_not_let_too_much_through():
    with tight_gpu():
        loop = Tight()
        small = mx.Step(loop.model, loop.batch[:2000], loss=lambda output: output.sum(), optimizer=loop.optimizer)
        with mx.watch(loop.model, loop.optimizer, step=small) as live:
            loop.step()
            live.knobs = KEPT
            assert judged(live, loop.step) == "refused"


def test_of_several_requests_before_a_border_the_last_one_is_predicted_and_taken():
    with tight_gpu():
        loop = Tight()
        with mx.watch(loop.model, loop.optimizer, step=loop.written()) as live:
            loop.step()
            loop.step()

            def turn() -> None:
                for knobs in (OFFLOAD, KEPT, OFFLOAD):
                    live.knobs = knobs

            thread = threading.Thread(target=turn)
            thread.start()
            thread.join()
            assert judged(live, loop.step) == "applied"
    assert states(live) == ["undone", "undone", "applied"]


def test_a_setting_that_was_measured_with_large_inputs_and_little_state_may_need_more_now():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: int) -> None:
        model(torch.ones(batch, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with mx.watch(model, optimizer) as live:
        step(4)  # without state
        live.knobs = IN_PLACE
        step(2)
        step(4)
        with pytest.raises(ValueError, match=NEEDS_STEP):
            live.knobs = Knobs()
