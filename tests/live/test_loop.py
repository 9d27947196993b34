"""What a watched run hands its loop: a plain loop's gradients, then precision and accumulation that can be switched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.run.knobs.knobs import Knobs
from tests.live.knob_loops import Trained
from tests.live.training import on

pytestmark = pytest.mark.usefixtures("every_setting_fits")


def run(steps: int, knobs: dict[int, Knobs], device: str = "cpu") -> tuple[Trained, Any]:
    loop = Trained(device)
    with mx.watch(loop.model, loop.optimizer) as live:
        for number in range(steps):
            if number in knobs:
                live.knobs = knobs[number]
            loop.step_of(live)
    return loop, live


def test_without_a_knob_the_loop_is_the_plain_one_to_the_last_bit():
    plain = Trained()
    for _ in range(4):
        plain.step()
    turned, _ = run(4, {})
    assert torch.equal(torch.stack(plain.losses), torch.stack(turned.losses))
    for one, other in zip(plain.model.parameters(), turned.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_loop_that_uses_them_unlocks_its_knobs():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        assert {"accumulation", "precision bf16", "precision fp16"} <= set(live.locked())
        loop.step_of(live)
        assert not {"accumulation", "precision bf16", "precision fp16"} & set(live.locked())
        assert "precision all bf16" in live.locked()


def test_bf16_runs_the_forward_pass_in_autocast_from_the_next_step_on():
    kinds = []
    loop = Trained()
    loop.model[0].register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
    with mx.watch(loop.model, loop.optimizer) as live:
        for number in range(6):
            if number in (1, 4):
                live.knobs = Knobs(precision="bf16" if number == 1 else "as written")
            loop.step_of(live)
    assert kinds == [torch.float32] * 2 + [torch.bfloat16] * 3 + [torch.float32]
    assert all(weight.dtype is torch.float32 for weight in loop.model.parameters())


def test_the_dtype_as_written_is_the_one_without_a_knob():
    kinds = []
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
    optimizer = torch.optim.SGD(linear.parameters())
    with mx.watch(linear, optimizer) as live:
        for number in range(3):
            if number == 1:
                live.knobs = Knobs(precision="off")
            with live.autocast(torch.bfloat16):
                loss = linear(torch.ones(1, 2)).sum()
            live.backward(loss)
            live.step(optimizer)
    assert kinds == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_fp16_scales_the_loss_and_skips_steps_with_gradients_that_are_not_finite():
    torch.manual_seed(0)
    linear = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    batch = torch.ones(2, 4)
    gradients, stepped = [], []
    with mx.watch(linear, optimizer) as live:
        for number in range(6):
            if number == 1:
                live.knobs = Knobs(precision="fp16")
            with live.autocast():
                # Of step 4, counted from 0, a loss whose gradients overflow when they are scaled.
                loss = linear(batch).float().mean() * (1e38 if number == 4 else 0.25)
            live.backward(loss)
            gradients.append(linear.weight.grad[0, 0].item())
            live.unscale(optimizer)
            gradients.append(linear.weight.grad[0, 0].item())
            before = linear.weight.detach().clone()
            stepped.append(live.step(optimizer))
            assert torch.equal(before, linear.weight) != stepped[-1]
            optimizer.zero_grad()
    # A quarter of the mean of ones has a gradient of 0.25; the scale begins at 65536.
    assert gradients[:2] == [0.25, 0.25]
    assert gradients[4:6] == [16384.0, 0.25]
    assert stepped == [True] * 4 + [False, True]
    assert gradients[10] == 8192.0  # halved after the skipped step
    assert live.steps()["skipped"].tolist() == [False] * 4 + [True, False]


@pytest.mark.parametrize("samples", [8, 5, 1])
def test_accumulated_gradients_are_those_of_the_whole_batch(samples):
    torch.manual_seed(0)
    linear = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.0)
    batch = torch.randn(samples, 4, dtype=torch.double), torch.randn(samples, 1, dtype=torch.double)
    found, sizes = [], []
    with mx.watch(linear, optimizer) as live:
        for number in range(4):
            if number == 1:
                live.knobs = Knobs(accumulation=4)
            for part, target in live.micro_batches(batch):
                sizes.append(len(part))
                live.backward(nn.functional.mse_loss(linear(part), target))
            live.step(optimizer)
            found.append(linear.weight.grad.clone())
            optimizer.zero_grad()
    # 5 samples in 4 parts: one of 2, three of 1; a batch of one sample has one part.
    parts = {8: [2, 2, 2, 2], 5: [2, 1, 1, 1], 1: [1]}[samples]
    assert sizes == [samples] * 2 + parts * 2
    torch.testing.assert_close(found[3], found[0], rtol=1e-12, atol=1e-14)
    assert live.steps()["micro_batches"].tolist() == [1, 1, len(parts), len(parts)]


def test_accumulation_lowers_the_peak_of_the_virtual_gpu():
    with mx.virtual("T4"):
        _, live = run(6, {1: Knobs(accumulation=4)}, "cuda")
    peaks = live.steps()["peak_allocated"].tolist()
    assert live.changes()["measured_peak"].tolist() == [peaks[2]]
    # 4096 samples * 128 numbers * 4 bytes in each of four blocks: three quarters of 8 MiB at least.
    assert peaks[1] - peaks[5] > 6 * 2**20


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everything_can_be_switched_together(device):
    everything = Knobs(checkpoint="every 1", inplace="on", precision="bf16", accumulation=2)
    with on(device):
        loop, live = run(5, {1: everything, 3: Knobs()}, device)
    assert live.changes()["state"].tolist() == ["applied", "applied"]
    assert len(loop.losses) == len(live.steps()) == 5


def test_a_batch_without_samples_undoes_the_accumulation():
    linear = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(linear.parameters())
    with mx.watch(linear, optimizer) as live:
        for number in range(4):
            if number == 1:
                live.knobs = Knobs(accumulation=2)
            for scale in live.micro_batches(2.0):
                live.backward(linear(torch.ones(2, 4)).sum() * scale)
            live.step(optimizer)
        assert live.applied == Knobs()
    assert live.changes()["state"].tolist() == ["undone"]
    assert "no tensor in the batch" in live.changes()["reason"][0]


def test_the_loop_of_another_library_says_what_it_follows():
    loop = Trained()
    with mx.watch(loop.model, loop.optimizer) as live:
        live.follows("accumulation")
        live.knobs = Knobs(accumulation=2)
        loop.step()
        assert live.applied.accumulation == 2
        assert "precision bf16" in live.locked()
