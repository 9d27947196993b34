"""Knobs switched while a loop runs: on the real model, at the border of steps, undone where they fail."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.live.live import State
from memexplore.live.locks import switchable
from memexplore.live.reasons import Facts, reason
from memexplore.run.knobs.knobs import KNOBS, Knobs
from tests.live.knob_loops import CHECKPOINT, Block, Trained, from_the_start, states, switched
from tests.workspaces import CUBLASLT

pytestmark = pytest.mark.usefixtures("every_setting_fits")


def last_peak(steps: int, knobs: Knobs) -> int:
    """Return the peak of the last step of a run with a setting from the start."""
    with mx.virtual("T4"):
        live = from_the_start(steps, knobs, "cuda")[1]
    return int(live.steps()["peak_allocated"].iloc[-1])


def test_a_setting_takes_effect_after_the_step_in_which_it_was_requested():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step()
        live.knobs = CHECKPOINT
        assert (live.knobs, live.applied, states(live)) == (CHECKPOINT, Knobs(), ["requested"])
        assert "forward" not in vars(loop.model[0])
        loop.step()
        assert (live.applied, states(live)) == (CHECKPOINT, ["applied"])
        assert "forward" in vars(loop.model[0])
    assert live.changes()["step"].tolist() == [3]
    assert "forward" not in vars(loop.model[0])


@pytest.mark.parametrize(
    "knobs",
    [
        Knobs(checkpoint="every 1"),
        Knobs(checkpoint="sqrt"),
        Knobs(checkpoint="layers 0 2"),
        Knobs(checkpoint="keep matmuls"),
        Knobs(inplace="on"),
        Knobs(offload="saved tensors on the CPU"),
        Knobs(inplace="on", checkpoint="every 2"),
    ],
    ids=str,
)
def test_losses_and_weights_are_to_the_last_bit_those_of_the_loop_without_it(knobs):
    plain, _ = switched(8, {})
    turned, live = switched(8, {2: knobs, 5: Knobs()})
    assert torch.equal(torch.stack(plain.losses), torch.stack(turned.losses))
    for one, other in zip(plain.model.parameters(), turned.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert states(live) == ["applied", "applied"]


@pytest.mark.parametrize("knobs", [CHECKPOINT, Knobs(offload="saved tensors on the CPU", inplace="on")], ids=str)
def test_the_peak_is_that_of_a_run_with_the_setting_from_the_start(knobs):
    with mx.virtual("T4"):
        live = switched(6, {2: knobs, 4: Knobs()}, "cuda")[1]
    peaks = live.steps()["peak_allocated"].tolist()
    # Steps 3 and 4 have the setting; all have the state of the optimizer, as the last steps of the other runs.
    written, changed = (last_peak(4, setting) for setting in (Knobs(), knobs))
    assert changed < written
    # Recomputed layers leave a workspace for the bias with the thread of the backward pass.
    after = written + (CUBLASLT if knobs == CHECKPOINT else 0)
    assert peaks[1:] == [written, changed, changed, after, after]
    assert live.changes()["measured_peak"].tolist() == [changed, after]


def test_the_first_step_with_a_setting_is_recorded_and_marked():
    with mx.virtual("T4"):
        _, live = switched(9, {3: CHECKPOINT, 6: Knobs()}, "cuda", first=1, every=1000)
    assert live.steps()["recorded"].tolist()[3] == "first step of a setting"
    assert {1, 4, 7} <= set(live.recorded)
    assert live.tape(4).peak()[0] == live.changes()["measured_peak"][0]


def test_a_rise_of_the_peak_names_the_setting():
    lower, higher = Facts(3, 100, setting="checkpoint sqrt"), Facts(9, 200, setting="as written")
    assert reason(higher, lower, leaks=False) == "setting: as written"


def test_another_thread_switches_while_the_main_thread_trains():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step()
        thread = threading.Thread(target=setattr, args=(live, "knobs", CHECKPOINT))
        thread.start()
        thread.join()
        assert "forward" not in vars(loop.model[0])
        loop.step()
        assert live.applied == CHECKPOINT


def test_a_later_request_replaces_one_that_waits():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        live.knobs = Knobs(inplace="on")
        live.knobs = live.knobs.replace(checkpoint="sqrt")
        loop.step()
        assert live.applied == Knobs(inplace="on", checkpoint="sqrt")
        live.knobs = Knobs()
        live.knobs = live.applied
        loop.step()
    assert states(live) == ["undone", "applied", "undone"]
    assert "replaced it" in live.changes()["reason"][0]


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        (Knobs(batch=4), "data loader"),
        (Knobs(optimizer="SGD"), "The optimizer holds state"),
        (Knobs(frozen="0"), "without their weights"),
        (Knobs(precision="all bf16"), "Weights in bf16 need a new optimizer"),
        (Knobs(precision="fp16"), r"does not use live\.autocast"),
        (Knobs(accumulation=2), r"does not use live\.micro_batches"),
        (Knobs(checkpoint="layers 9"), "has no layer '9'"),
    ],
    ids=str,
)
def test_a_locked_knob_is_refused_with_a_sentence_and_changes_nothing(knobs, sentence):
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step()
        with pytest.raises(ValueError, match=sentence):
            live.knobs = knobs
        loop.step()
        assert live.applied == live.knobs == Knobs()
    assert states(live) == ["refused"]
    assert "\n" not in live.changes()["reason"][0]


def test_locked_names_what_cannot_be_switched():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step()
        locked = live.locked()
        assert {"batch", "optimizer", "gpu", "accumulation", "precision fp16", "precision all bf16"} <= set(locked)
        assert not {"inplace", "checkpoint", "offload", "memory_format", "precision off"} & set(locked)
    with pytest.raises(ValueError, match="The run has ended"):
        live.knobs = CHECKPOINT


def test_every_knob_is_locked_or_switched():
    # A field that nobody follows would be assigned and change nothing.
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step()
        locked = {name.split()[0] for name in live.locked()}
    fields = set(KNOBS) - {"lora_rank"}
    # The loop asks for neither autocast nor micro-batches.
    assert fields - locked == set(switchable()) - {"precision", "accumulation"}


def test_a_fused_optimizer_keeps_the_memory_format():
    loop = Trained(make=lambda weights, lr: torch.optim.AdamW(weights, lr, fused=True))
    with mx.watch(loop.model, loop.optimizer) as live:
        loop.step()
        assert live.locked()["memory_format"].startswith("The fused AdamW needs weights")


def test_channels_last_goes_on_with_the_same_optimizer():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 3)).double()
    turned = copy.deepcopy(plain)
    batch = torch.randn(2, 3, 8, 8, dtype=torch.double)

    def train(model: nn.Module, knobs: Knobs) -> None:
        optimizer = torch.optim.AdamW(model.parameters())
        with mx.watch(model, optimizer) as live:
            for number in range(6):
                if number == 2:
                    live.knobs = knobs
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if number == 3 and knobs != Knobs():
                    assert model[2].weight.is_contiguous(memory_format=torch.channels_last)

    train(plain, Knobs())
    train(turned, Knobs(memory_format="channels last"))
    assert turned[2].weight.is_contiguous()
    for one, other in zip(plain.parameters(), turned.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# --- other models ---------------------------------------------------------------------------------------------------


def test_a_run_without_a_named_model_switches_the_models_that_it_saw():
    loop = Trained()
    with mx.watch() as live:
        assert "No model was called yet" in live.locked()["checkpoint"]
        loop.step()
        live.knobs = CHECKPOINT
        loop.step()
        assert "forward" in vars(loop.model[0])
    assert "forward" not in vars(loop.model[0])


def test_several_models_get_the_layers_that_they_have():
    first, second = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block(), Block())
    weights = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    with mx.watch([first, second], optimizer) as live:
        for _ in range(2):
            live.knobs = Knobs(checkpoint="layers 2")
            second(first(torch.ones(2, 32))).sum().backward()
            optimizer.step()
        assert ["forward" in vars(model) for model in (second[2], second[1], first[1])] == [True, False, False]


def test_a_compiled_model_is_locked():
    loop = Trained()
    loop.model.compile(backend="eager")
    with mx.watch(loop.model, loop.optimizer) as live:
        assert live.locked()["checkpoint"].startswith("The model is compiled")


@pytest.fixture
def gloo(tmp_path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_the_model_inside_of_ddp_is_switched(gloo):
    plain, turned = Trained(), Trained()
    torch.manual_seed(1)
    for _ in range(6):
        plain.step()
    torch.manual_seed(1)
    inside = turned.model
    turned.model = nn.parallel.DistributedDataParallel(inside)
    with mx.watch(turned.model, turned.optimizer) as live:
        for number in range(6):
            if number == 2:
                live.knobs = CHECKPOINT
            turned.step()
            assert ("forward" in vars(inside[0])) == (number >= 2)
        assert live.locked()["memory_format"].startswith("DistributedDataParallel")
    assert states(live) == ["applied"]
    assert torch.equal(torch.stack(plain.losses), torch.stack(turned.losses))


def test_a_pause_switches_too():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        live.pause()
        loop.step()
        assert live.state is State.PAUSED
        live.knobs = CHECKPOINT
        loop.step()
        assert live.applied == CHECKPOINT
    assert live.changes()["measured_peak"].isna().all()
