"""Recorded steps on the CPU and on the virtual GPU: sizes, phases, steps and preexisting blocks, counted by hand."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.tape import Action, Category, Phase, Source
from tests.recorder.recorded_steps import block_sizes, train

WEIGHTS = [100 * 200 * 4, 200 * 4, 200 * 10 * 4, 10 * 4]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parameters_have_their_sizes(device):
    assert sorted(block_sizes(train(device), Category.PARAMETER)) == sorted(WEIGHTS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_step_has_one_gradient_per_parameter(device):
    assert sorted(block_sizes(train(device), Category.GRADIENT)) == sorted(WEIGHTS * 2)


def test_adam_keeps_two_states_per_parameter():
    assert sorted(block_sizes(train("cuda"), Category.OPTIMIZER_STATE)) == sorted(WEIGHTS * 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_count_from_one(device):
    tape = train(device, steps=3)
    assert sorted(set(tape.step.tolist())) == [0, 1, 2, 3]


def test_segments_of_a_request_belong_to_its_phase():
    def forward():
        weight = torch.zeros(1024, 1024, device="cuda", requires_grad=True)  # a segment of 20 MiB
        weight[None].repeat(8, 1, 1)  # one of 32 MiB

    tape = mx.simulate(forward, gpu="T4")
    (output,) = np.flatnonzero((tape.action == Action.ALLOC) & (tape.size == 32 << 20) & (tape.phase == Phase.FORWARD))
    before = slice(output - 2, output + 1)
    assert tape.action[before].tolist() == [Action.MARK, Action.SEGMENT_ALLOC, Action.ALLOC]
    assert tape.phase[before].tolist() == [Phase.FORWARD] * 3
    assert tape.step[before].tolist() == [1] * 3


def test_a_step_is_forward_backward_optimizer():
    tape = train("cuda", steps=1)
    marks = tape.phase[tape.action == Action.MARK].tolist()
    assert marks == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER]


def test_accumulated_micro_batches_are_one_step():
    def run() -> None:
        model = nn.Linear(10, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for _ in range(4):
                model(torch.ones(2, 10, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert int(mx.simulate(run).step.max()) == 2


def test_a_recording_does_not_keep_tensors_alive():
    with mx.record() as recording:
        x = torch.ones(1000, requires_grad=True)
        y = (x * 2).sum()
        y.backward()
        seen = weakref.ref(x)
        del x, y
        gc.collect()
        assert seen() is None
    assert len(recording.tape)


def test_preexisting_blocks_come_first():
    model = nn.Linear(100, 100)
    with mx.record() as recording:
        model(torch.ones(1, 100)).sum().backward()
    tape = recording.tape
    before = tape.action == Action.PREEXISTING
    assert tape.size[before].tolist() == [40_000, 400]
    assert before[:2].all()


def test_a_recording_begun_later_has_the_peak_of_the_allocator():
    with mx.virtual("A100 80GB"):
        before = torch.empty(25 * 2**20, dtype=torch.uint8, device="cuda")
        with mx.record() as recording:
            after = torch.empty(25 * 2**20, dtype=torch.uint8, device="cuda")
        peak = torch.cuda.max_memory_allocated()
        del before, after
    # A request of 25 MiB gets a segment of 26 MiB, whose remainder of 1 MiB is too small to be split off.
    assert mx.peak(recording.tape)[0] == peak == 2 * 26 * 2**20


def test_memory_on_the_cpu_is_equal_after_every_step():
    tape = train("cpu", steps=3)
    signed = np.where(np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING)), tape.size, 0)
    signed -= np.where(tape.action == Action.FREE_COMPLETED, tape.size, 0)
    level = np.cumsum(signed)
    ends = np.flatnonzero((tape.action == Action.MARK) & (tape.phase == Phase.FORWARD))
    assert level[ends[1]] == level[ends[2]]


def test_cpu_training_is_measured():
    assert train("cpu").meta.source is Source.MEASURED


def test_an_out_of_memory_row_has_its_op_and_layer():
    def run() -> None:
        layer = nn.Linear(1 << 15, 1 << 15).cuda()  # 4 GiB of weights
        while layer is not None:
            layer(torch.ones(1 << 16, 1 << 15, device="cuda"))  # 8 GiB of input, 8 GiB of output: 14.6 GiB are there

    tape = mx.simulate(run, gpu="T4")
    assert tape.action[-1] == Action.OOM or Action.OOM in tape.action
    row = int(np.flatnonzero(tape.action == Action.OOM)[0])
    assert tape.ops[tape.op[row]] == "aten::addmm"
    assert tape.modules[tape.module[row]] == "Linear"
    assert tape.size[row] == 1 << 33


def test_an_optimizer_that_steps_in_backward_belongs_to_the_running_step():
    def run() -> None:
        model = nn.Sequential(nn.Linear(100, 200, bias=False), nn.Linear(200, 10, bias=False)).cuda()
        for weight in model.parameters():
            own = torch.optim.SGD([weight], momentum=0.9)

            def update(_: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
                own.step()
                own.zero_grad()

            weight.register_post_accumulate_grad_hook(update)
        for _ in range(2):
            model(torch.ones(64, 100, device="cuda")).sum().backward()

    tape = mx.simulate(run, gpu="T4")
    marks = [(tape.step[row], Phase(tape.phase[row]).text) for row in np.flatnonzero(tape.action == Action.MARK)]
    step = ["forward", "backward", *["optimizer", "backward"] * 2]
    assert [phase for number, phase in marks if number == 1 and phase != "other"] == step
    assert [phase for number, phase in marks if number == 2 and phase != "other"] == step
    # The first step makes the momentum of each weight, and both steps a gradient of each.
    weights = [100 * 200 * 4, 200 * 10 * 4]
    assert sorted(block_sizes(tape, Category.OPTIMIZER_STATE)) == sorted(weights)
    assert sorted(block_sizes(tape, Category.GRADIENT)) == sorted(weights * 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_op_outside_of_modules_has_the_line_that_calls_it(device):
    def scaled(weight: torch.Tensor) -> torch.Tensor:
        return weight * 2  # the line of the op, not that of its caller

    def run() -> None:
        scaled(torch.ones(8, device=device, requires_grad=True))

    tape = _recorded(run, device)
    [row] = [row for row in np.flatnonzero(tape.action == Action.ALLOC) if tape.ops[tape.op[row]] == "aten::mul"]
    assert tape.stacks[tape.stack[row]][0].line == scaled.__code__.co_firstlineno + 1


def _recorded(run, device: str) -> mx.Tape:
    if device == "cuda":
        return mx.simulate(run)
    with mx.record() as recording:
        run()
    return recording.tape


def test_tensors_around_others_are_recorded_by_the_tensors_inside():
    from torch.testing._internal.two_tensor import TwoTensor

    weight = nn.Parameter(TwoTensor(torch.ones(8), torch.ones(8)))
    with mx.record() as recording:
        doubled = weight * 2
    tape = recording.tape
    # Both halves of the product, and no memory of the wrapper.
    made = (tape.action == Action.ALLOC) & (tape.op == list(tape.ops).index("aten::mul"))
    assert tape.size[made].tolist() == [8 * 4, 8 * 4]
    assert doubled is not None


def test_tensors_without_memory_are_not_recorded():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with mx.record() as recording, FakeTensorMode():
        fake = torch.ones(1000) * 2
    assert recording.tape.size.sum() == 0
    assert fake is not None


def test_weights_of_a_model_that_is_never_called_are_parameters():
    def build():
        layers = [nn.Linear(512, 512, bias=False, device="cuda") for _ in range(3)]
        torch.zeros(512, 512, device="cuda")
        return layers

    assert block_sizes(mx.simulate(build, gpu="T4"), Category.PARAMETER) == [512 * 512 * 4] * 3
