"""Watched steps on the CPU and on the virtual GPU: where a step ends, its numbers, and which are recorded."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.live.live import State
from tests.live.training import Loop, network, on, watched

BOTH = pytest.mark.parametrize("device", ["cpu", "cuda"])


def rows(live):
    return live.steps().to_dict("records")


@BOTH
def test_each_step_of_the_optimizer_is_a_row(device):
    live = watched(device, 8, 8, 8, 8, 8)
    assert [row["step"] for row in rows(live)] == [1, 2, 3, 4, 5]
    assert all(row["seconds"] > 0 for row in rows(live))
    assert live.state is State.ENDED


@BOTH
def test_the_first_steps_and_every_nth_are_recorded(device):
    live = watched(device, *[8] * 12, first=2, every=5)
    assert live.recorded == [1, 2, 5, 10]
    assert [row["recorded"] for row in rows(live)][:6] == ["first steps"] * 2 + [""] * 2 + ["every n-th step", ""]


@BOTH
def test_the_peak_of_a_step_is_that_of_its_tape(device):
    live = watched(device, 8, 8, 8, first=3)
    for step in (1, 2, 3):
        peak = live.tape(step).peak("allocated")[0]
        assert live.steps().set_index("step").loc[step, "peak_allocated"] == peak


def test_light_steps_of_a_virtual_gpu_have_the_peaks_of_recorded_ones():
    light = watched("cuda", *[8] * 6, first=1, every=1000).steps()
    full = watched("cuda", *[8] * 6, first=6).steps()
    for name in ("peak_allocated", "peak_reserved", "allocated_after", "reserved_after"):
        assert light[name].tolist() == full[name].tolist()


def test_the_users_peak_statistics_stay_as_they_are():
    def peaks(watch: bool) -> list[int]:
        found = []
        with on("cuda"):
            loop = Loop("cuda")
            torch.cuda.reset_peak_memory_stats()
            with mx.watch(loop.model) if watch else contextlib.nullcontext():
                for batch in (8, 64, 8, 8):
                    loop.step(batch)
                    found.append(torch.cuda.max_memory_allocated())
                torch.cuda.reset_peak_memory_stats()
                loop.step(8)
                found.append(torch.cuda.max_memory_allocated())
        return found

    assert peaks(watch=True) == peaks(watch=False)


def test_a_reset_of_the_users_statistics_loses_no_peak():
    with on("cuda"):
        loop = Loop("cuda")
        with mx.watch(loop.model, first=0, every=1000) as live:
            loop.step(8)
            loop.loss(4096).backward()
            torch.cuda.reset_peak_memory_stats()
            loop.optimizer.step()
    first, second = live.steps()["peak_allocated"]
    assert second > first + 4096 * 128 * 4  # the output of the first layer alone


def test_a_step_of_the_cpu_without_a_tape_has_the_peak_of_one_with_the_same_shapes():
    live = watched("cpu", *[8] * 5, first=2, every=1000)
    assert live.steps()["peak_from"].tolist() == ["recorded"] * 2 + ["same shapes"] * 3
    assert live.steps()["peak_allocated"].nunique() == 1


@BOTH
def test_accumulated_micro_batches_are_one_step(device):
    with on(device):
        loop = Loop(device)
        with mx.watch(loop.model) as live:
            for _ in range(2):
                for _ in range(4):
                    loop.loss().backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert [(row["step"], row["micro_batches"]) for row in rows(live)] == [(1, 4), (2, 4)]


@BOTH
@pytest.mark.parametrize("before", [True, False])
def test_gradients_may_be_zeroed_before_or_after_the_step(device, before):
    with on(device):
        loop = Loop(device)
        with mx.watch(loop.model) as live:
            for _ in range(4):
                if before:
                    loop.optimizer.zero_grad()
                loop.loss().backward()
                loop.optimizer.step()
                if not before:
                    loop.optimizer.zero_grad()
    assert len(live.steps()) == 4
    assert live.leak() is None


def test_two_optimizers_that_step_one_after_the_other_end_one_step():
    model = network()
    first, second = torch.optim.SGD(model[0].parameters()), torch.optim.SGD(model[2].parameters())
    with mx.watch(model) as live:
        for _ in range(5):
            model(torch.randn(8, 64)).sum().backward()
            first.step()
            second.step()
    # Two in the first iteration, where it is not seen yet that a second optimizer follows.
    assert len(live.steps()) == 5


def test_named_optimizers_end_a_step_together():
    model = network()
    first, second = torch.optim.SGD(model[0].parameters()), torch.optim.SGD(model[2].parameters())
    with mx.watch(model, [first, second]) as live:
        for _ in range(3):
            model(torch.randn(8, 64)).sum().backward()
            first.step()
            model(torch.randn(8, 64)).sum().backward()
            second.step()
    assert [row["micro_batches"] for row in rows(live)] == [2, 2, 2]


def test_an_optimizer_of_another_model_ends_no_step():
    loop, other = Loop(), Loop()
    with mx.watch(loop.model) as live:
        other.step()
        loop.step()
        other.step()
        loop.step()
    assert len(live.steps()) == 2


def test_without_a_model_every_optimizer_ends_a_step():
    loop, other = Loop(), Loop()
    with mx.watch() as live:
        loop.step()
        other.step()
    assert len(live.steps()) == 2


def test_a_step_that_the_gradient_scaler_skips_ends_too():
    loop = Loop()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with mx.watch(loop.model) as live:
        for scale in (1.0, float("inf"), 1.0):
            scaler.scale(loop.loss() * scale).backward()
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()
    assert live.steps()["skipped"].tolist() == [False, True, False]


def test_a_closure_that_runs_forward_inside_the_step_is_part_of_it():
    loop = Loop(make=lambda weights, lr: torch.optim.LBFGS(weights, max_iter=3))

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    with mx.watch(loop.model) as live:
        loop.optimizer.step(closure)
        loop.optimizer.step(closure)
    assert len(live.steps()) == 2
    assert live.steps()["micro_batches"].min() >= 1


def test_optimizers_that_step_in_backward_end_their_step_when_the_next_begins():
    model = network()
    optimizers = {weight: torch.optim.SGD([weight], lr=0.01) for weight in model.parameters()}

    def update(weight: torch.Tensor) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(update)
    with mx.watch(model) as live:
        for _ in range(3):
            model(torch.randn(8, 64)).sum().backward()
    assert live.steps()["micro_batches"].tolist() == [1, 1, 1]


@BOTH
def test_calls_without_gradients_are_counted_as_evaluations(device):
    with on(device):
        loop = Loop(device)
        with mx.watch(loop.model) as live:
            loop.step()
            with torch.no_grad():
                loop.loss()
                loop.loss()
            loop.step()
    assert live.steps()["evaluations"].tolist() == [0, 2]
    assert live.steps()["micro_batches"].tolist() == [1, 1]


def test_a_step_of_the_cpu_with_a_validation_has_no_peak_of_one_without():
    loop = Loop()
    with mx.watch(loop.model, first=3, every=10) as live:
        for number in range(12):
            if number in (6, 9):
                with torch.no_grad():
                    loop.model(torch.randn(8000, 64))
            loop.step()
    table = live.steps().set_index("step")
    assert table["evaluations"][[7, 10]].tolist() == [1, 1]
    assert (
        table["peak_from"].tolist()[3:]
        == ["same shapes"] * 3 + [""] + ["same shapes"] * 2 + ["recorded"] + ["same shapes"] * 2
    )
    # The tape of step 10 has the validation, whose output of the first layer has 8000 × 128 numbers.
    assert table["peak_allocated"][10] > 8000 * 128 * 4 > table["peak_allocated"][9]


def test_arguments_by_name_have_their_shapes_in_the_row():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, *, values: torch.Tensor) -> torch.Tensor:
            return self.fc(values)

    model = Named()
    optimizer = torch.optim.SGD(model.parameters())
    with mx.watch(model) as live:
        model(values=torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert live.steps()["inputs"].tolist() == ["3×4 float32"]


@BOTH
def test_layers_have_the_bytes_that_they_keep_for_backward(device):
    live = watched(device, 8, 8, 8, 8, 16, first=2, every=1000)
    layers = live.layers()
    # float32 results of the ReLU and of the last layer; that of the first layer is freed once the ReLU has it.
    assert layers[1].tolist() == [8 * 128 * 4, 8 * 10 * 4]
    assert layers[layers.columns[-1]].tolist()[:1] == [16 * 128 * 4]


def test_light_steps_of_a_gpu_have_layers_too():
    live = watched("cuda", 8, 8, 8, 8, first=1, every=1000)
    assert live.steps()["recorded"].tolist()[1] == ""
    assert live.layers()[2].tolist() == [8 * 128 * 4, 8 * 10 * 4]


@BOTH
def test_the_rows_of_a_tape_have_the_number_of_its_step(device):
    live = watched(device, *[8] * 5, first=1, every=4)
    assert sorted(set(live.tape(4).step.tolist())) == [0, 4]


def test_a_step_without_a_tape_is_named():
    live = watched("cpu", *[8] * 5, first=2, every=1000)
    with pytest.raises(LookupError, match="no tape of step 4 is kept; those kept are: 1, 2"):
        live.tape(4)


@BOTH
def test_inputs_of_new_shapes_are_recorded_in_their_own_step(device):
    live = watched(device, 8, 8, 8, 8, 32, 8, 32, first=3, every=1000)
    assert live.recorded == [1, 2, 3, 5]
    assert live.steps()["recorded"].tolist()[4] == "inputs of new shapes"


@BOTH
def test_a_later_micro_batch_of_new_shapes_is_recorded_too(device):
    with on(device):
        loop = Loop(device)
        with mx.watch(loop.model, first=2, every=1000) as live:
            for second in (8, 8, 8, 32, 32):
                loop.loss(8).backward()
                loop.loss(second).backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    recorded = live.steps()["recorded"].tolist()
    assert recorded[:4] == ["first steps", "first steps", "", "inputs of new shapes"]
    assert recorded[4] != "inputs of new shapes"


@BOTH
def test_a_dispatch_mode_of_the_user_may_begin_and_end_at_any_time(device):
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    with on(device):
        loop = Loop(device)
        before = _get_current_dispatch_mode_stack()
        with mx.watch(loop.model, first=1, every=1000) as live:
            with Counting():
                loss = loop.loss()
                loss.backward()
                loop.optimizer.step()  # the recording of step 1 ends inside the block of the mode
                assert len(_get_current_dispatch_mode_stack()) == len(before) + 1
            loop.step()
        assert _get_current_dispatch_mode_stack() == before
    assert Counting.calls > 0
    assert len(live.steps()) == 2


def test_recomputation_in_backward_is_no_call_of_its_own():
    from torch.utils.checkpoint import checkpoint

    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    with mx.watch(model) as live:
        for _ in range(4):
            checkpoint(model, torch.randn(8, 64, requires_grad=True), use_reentrant=False).sum().backward()
            optimizer.step()
    assert live.steps()["micro_batches"].tolist() == [1, 1, 1, 1]


def test_a_second_watch_is_refused():
    loop = Loop()
    with mx.watch(loop.model), pytest.raises(RuntimeError, match="another run is being watched"), mx.watch():
        pass


def test_what_is_watched_is_a_model_and_an_optimizer():
    with pytest.raises(TypeError, match="expected a Optimizer"):
        mx.watch(network(), [1])


def test_the_value_can_be_read_while_another_thread_trains():
    import threading

    loop = Loop()
    errors = []
    with mx.watch(loop.model, every=3) as live:
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                try:
                    live.steps(), live.layers(), live.leak(), live.overhead, repr(live)
                    if live.recorded:
                        live.tape(live.recorded[-1])
                except LookupError:
                    continue  # a tape that was dropped meanwhile
                except Exception as error:
                    errors.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(60):
            loop.step()
        done.set()
        reader.join()
    assert errors == []
    assert len(live.steps()) == 60
