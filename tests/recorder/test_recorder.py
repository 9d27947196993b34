"""What the recorder notes, seen on plain CPU training and on the virtual GPU: expected bytes by hand."""

from __future__ import annotations

import gc
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memexplore as mx
from memexplore.recorder.events import Event
from memexplore.recorder.recorder import Recorder
from memexplore.tape import Action, Category, Phase, Source, Tape


def _blocks(tape: Tape, category: Category) -> list[int]:
    """Sizes of the blocks of a category, in the order in which they were made."""
    born = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING))
    return tape.size[born & (tape.category == category)].tolist()


def _rows(tape: Tape, **wanted: object) -> list[int]:
    frame = tape.to_pandas()
    for name, value in wanted.items():
        frame = frame[frame[name] == value]
    return frame.index.tolist()


def _train(device: str, steps: int = 2) -> Tape:
    """A 100 -> 200 -> 10 network and Adam, recorded from outside the loop."""

    def run() -> None:
        model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10)).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        x, y = torch.randn(64, 100, device=device), torch.randint(10, (64,), device=device)
        for _ in range(steps):
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    if device == "cuda":
        return mx.simulate(run, gpu="T4")
    with mx.record() as recording:
        run()
    return recording.tape


WEIGHTS = [100 * 200 * 4, 200 * 4, 200 * 10 * 4, 10 * 4]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parameters_are_told_by_their_size(device):
    assert sorted(_blocks(_train(device), Category.PARAMETER)) == sorted(WEIGHTS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_step_has_one_gradient_a_parameter(device):
    assert sorted(_blocks(_train(device), Category.GRADIENT)) == sorted(WEIGHTS * 2)


def test_adam_keeps_two_states_a_parameter():
    assert sorted(_blocks(_train("cuda"), Category.OPTIMIZER_STATE)) == sorted(WEIGHTS * 2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_steps_count_from_one(device):
    tape = _train(device, steps=3)
    assert sorted(set(tape.step.tolist())) == [0, 1, 2, 3]


def test_phases_follow_each_other():
    tape = _train("cuda", steps=1)
    marks = tape.phase[tape.action == Action.MARK].tolist()
    assert marks == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER]


def test_a_layer_has_its_qualified_name():
    tape = _train("cuda", steps=1)
    born = tape.to_pandas().query("category == 'parameter' and action == 'alloc'")
    assert set(born["module"]) == {"0", "2"}


def test_a_gradient_belongs_to_the_layer_of_its_parameter():
    frame = _train("cuda", steps=1).to_pandas()
    gradients = frame[(frame["action"] == "alloc") & (frame["category"] == "gradient")]
    assert dict(zip(gradients["size"], gradients["module"], strict=True)) == {
        80_000: "0", 800: "0", 8_000: "2", 40: "2",
    }  # fmt: skip


def test_an_optimizer_state_belongs_to_the_layer_of_its_parameter():
    frame = _train("cuda", steps=1).to_pandas()
    states = frame[(frame["action"] == "alloc") & (frame["category"] == "optimizer state")]
    assert set(zip(states["size"], states["module"], strict=True)) == {
        (80_000, "0"),
        (800, "0"),
        (8_000, "2"),
        (40, "2"),
    }


def test_a_backward_row_has_the_layer_and_line_of_the_forward_op():
    def run() -> None:
        layer = nn.Linear(10, 10).cuda()
        loss = layer(torch.ones(4, 10, device="cuda", requires_grad=True)).sum()  # the line that is meant
        loss.backward()

    line = run.__code__.co_firstlineno + 2
    tape = mx.simulate(run)
    # Gradient of the input, 4 x 10 floats, and cuBLAS's copies of the expanded gradient, as large.
    rows = _rows(tape, action="alloc", op="aten::mm", size=160)
    assert len(rows) == 3
    for row in rows:
        assert tape.modules[tape.module[row]] == "Linear"
        assert any(frame.line == line and frame.filename == __file__ for frame in tape.stacks[tape.stack[row]])


def test_saved_tensors_are_told_from_temporaries():
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # exp keeps its result for backward; the negation dies inside the call.
            return (-x).exp() * 2

    def run() -> None:
        Chain()(torch.ones(1000, device="cuda", requires_grad=True))

    tape = mx.simulate(run)
    kinds = {
        op: tape.to_pandas().iloc[_rows(tape, action="alloc", op=op)[0]]["category"]
        for op in ("aten::neg", "aten::exp")
    }
    assert kinds == {"aten::neg": "temporary", "aten::exp": "activation"}


def test_without_gradients_nothing_is_an_activation():
    def run() -> None:
        with torch.no_grad():
            nn.Sequential(nn.Linear(100, 100), nn.ReLU()).cuda()(torch.ones(5, 100, device="cuda"))

    assert _blocks(mx.simulate(run), Category.ACTIVATION) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_an_activation_of_the_backward_pass(reentrant):
    block = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())

    def run() -> None:
        model = block.cuda()
        x = torch.ones(8, 64, device="cuda", requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()

    tape = mx.simulate(run)
    again = [row for row in _rows(tape, action="alloc", op="aten::sigmoid") if tape.phase[row] == Phase.BACKWARD]
    assert len(again) == 1
    assert tape.category[again[0]] == Category.ACTIVATION
    assert tape.modules[tape.module[again[0]]].endswith("1")


class Chained(nn.Module):
    """Two blocks, computed again in backward by the form of checkpoints that runs forward without gradients."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 64, bias=False), nn.Sigmoid()) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def _kinds(tape: Tape, phase: str) -> list[tuple[str, str]]:
    """Op and category of each block that was made in a phase."""
    frame = tape.to_pandas()
    frame = frame[(frame["action"] == "alloc") & (frame["phase"] == phase) & (frame["category"] != "workspace")]
    return list(zip(frame["op"], frame["category"], strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_results_of_a_reentrant_checkpoint_are_activations_and_what_is_inside_is_none(device):
    def run() -> None:
        Chained().to(device)(torch.ones(8, 64, device=device, requires_grad=True)).sum().backward()

    if device == "cuda":
        tape = mx.simulate(run, gpu="T4")
    else:
        with mx.record() as recording:
            run()
        tape = recording.tape
    first, second = ("aten::mm", "temporary"), ("aten::sigmoid", "activation")
    assert _kinds(tape, "forward")[:4] == [first, second] * 2
    assert "unknown" not in {category for _, category in _kinds(tape, "backward")}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # there are no gradients in the outer one
def test_results_of_a_checkpoint_inside_a_reentrant_one_are_activations_when_it_runs_again():
    outer = Chained()

    def run() -> None:
        model, x = outer.cuda(), torch.ones(8, 64, device="cuda", requires_grad=True)
        checkpoint(model, x, use_reentrant=True).sum().backward()

    kinds = _kinds(mx.simulate(run, gpu="T4"), "backward")
    # The outer one runs both blocks again, then each block runs a third time, the last one first.
    made = [kind for kind in kinds if kind[0] == "aten::sigmoid"]
    assert made == [("aten::sigmoid", "activation")] * 4


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        kept = x.exp()
        ctx.save_for_backward(kept)
        return (kept + 1) * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 2


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)


def test_what_an_autograd_function_keeps_and_returns_is_an_activation():
    def run() -> None:
        Doubling()(torch.ones(1000, device="cuda", requires_grad=True)).sum().backward()

    kinds = _kinds(mx.simulate(run, gpu="T4"), "forward")
    assert kinds[:3] == [("aten::exp", "activation"), ("aten::add", "temporary"), ("aten::mul", "activation")]


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_all_that_a_forward_pass_makes_without_gradients_is_temporary(without):
    kept = []

    def run() -> None:
        model = nn.Sequential(nn.Linear(64, 64), Doubling()).cuda()
        for _ in range(2):
            with without():
                kept.append(model(torch.ones(8, 64, device="cuda")))

    tape = mx.simulate(run, gpu="T4")
    once = [("aten::addmm", "temporary"), *((f"aten::{op}", "temporary") for op in ("exp", "add", "mul"))]
    assert _kinds(tape, "forward") == once * 2


def test_a_model_that_is_not_trained_inside_one_that_is_makes_temporaries():
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                wanted = Doubled.apply(self.teacher(x))
            return (self.student(x) - wanted).square()

    def run() -> None:
        Distilled().cuda()(torch.ones(8, 64, device="cuda")).sum().backward()

    kinds = _kinds(mx.simulate(run, gpu="T4"), "forward")
    # The teacher's product and what the function made of it, then the student's product.
    assert [category for _, category in kinds[:5]] == ["temporary"] * 4 + ["activation"]


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


def test_layers_of_a_second_model_carry_its_name():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    def run() -> None:
        first, second = Pair().cuda(), Pair().cuda()
        second(first(torch.ones(1, 4, device="cuda")))

    assert {"inner", "Pair#2.inner"} <= set(mx.simulate(run).modules)


def test_a_recording_keeps_no_tensor_alive():
    with mx.record() as recording:
        x = torch.ones(1000, requires_grad=True)
        y = (x * 2).sum()
        y.backward()
        seen = weakref.ref(x)
        del x, y
        gc.collect()
        assert seen() is None
    assert len(recording.tape)


def test_what_was_there_before_comes_first():
    model = nn.Linear(100, 100)
    with mx.record() as recording:
        model(torch.ones(1, 100)).sum().backward()
    tape = recording.tape
    before = tape.action == Action.PREEXISTING
    assert tape.size[before].tolist() == [40_000, 400]
    assert before[:2].all()


def test_a_recording_that_begins_late_has_the_peak_that_the_allocator_has():
    with mx.virtual("A100 80GB"):
        before = torch.empty(25 * 2**20, dtype=torch.uint8, device="cuda")
        with mx.record() as recording:
            after = torch.empty(25 * 2**20, dtype=torch.uint8, device="cuda")
        peak = torch.cuda.max_memory_allocated()
        del before, after
    # a request of 25 MiB gets a segment of 26, of which 1 MiB is too little to be split off
    assert mx.peak(recording.tape)[0] == peak == 2 * 26 * 2**20


def test_memory_returns_after_every_step_on_the_cpu():
    tape = _train("cpu", steps=3)
    signed = np.where(np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING)), tape.size, 0)
    signed -= np.where(tape.action == Action.FREE_COMPLETED, tape.size, 0)
    level = np.cumsum(signed)
    ends = np.flatnonzero((tape.action == Action.MARK) & (tape.phase == Phase.FORWARD))
    assert level[ends[1]] == level[ends[2]]


def test_a_second_recording_inside_another_is_refused():
    with mx.record(), pytest.raises(RuntimeError, match="already"), mx.record():
        pass


def test_cpu_training_is_measured():
    assert _train("cpu").meta.source is Source.MEASURED


def test_an_out_of_memory_error_names_its_op_and_layer():
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


def test_an_optimizer_that_steps_in_backward_is_part_of_its_step():
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
    assert sorted(_blocks(tape, Category.OPTIMIZER_STATE)) == sorted(weights)
    assert sorted(_blocks(tape, Category.GRADIENT)) == sorted(weights * 2)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class CheckpointedResiduals(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def test_a_gradient_sum_in_a_reentrant_checkpoint_has_the_layer_whose_backward_gave_the_second_summand():
    steps, blocks = 10, 8

    def run() -> None:
        model = CheckpointedResiduals(blocks).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(steps):
            model(torch.ones(8, 64, device="cuda", requires_grad=True)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    frame = mx.simulate(run, gpu="T4").to_pandas()
    # The residual's addition runs first in backward, so the linear layer's gradient is added to the residual's.
    sums = frame[(frame["action"] == "alloc") & (frame["op"] == "aten::add") & (frame["category"] == "gradient")]
    assert sums["module"].tolist() == [f"blocks.{number}.linear" for number in reversed(range(blocks))] * steps


def _update_in_backward() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))).cuda()
    for weight in model.parameters():
        own = torch.optim.Adam([weight], foreach=True)

        def update(_: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        weight.register_post_accumulate_grad_hook(update)
    for _ in range(4):
        model(torch.ones(8, 64, device="cuda")).sum().backward()


def test_a_storage_at_the_c_address_of_a_freed_weight_has_no_layer():
    layer = nn.Linear(4, 4, bias=False)
    key = layer.weight.untyped_storage()._cdata
    live = {key: types.SimpleNamespace(address=512, size=64)}
    recorder = Recorder(live)

    def layer_of_an_update() -> str:
        recorder.alloc(4096, 64, torch.ops.aten.sqrt.default, (layer.weight,), 0, Category.UNKNOWN)
        number = Event(*recorder.events[-1]).module
        return recorder.names.table[number] if number >= 0 else ""

    recorder.preexisting(512, 64, None)
    recorder.tag_model(layer)
    recorder.optimizer_begins(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    assert layer_of_an_update() == "Linear"
    recorder.free(512, 64)
    live[key] = types.SimpleNamespace(address=1024, size=64)
    recorder.preexisting(1024, 64, None)
    assert layer_of_an_update() == ""


def test_two_runs_in_one_process_give_equal_tapes():
    def columns(tape: Tape) -> list[object]:
        names = ("action", "address", "size", "category", "phase", "step", "op", "module", "stack")
        return [getattr(tape, name).tolist() for name in names]

    first, second = (mx.simulate(_update_in_backward, gpu="T4") for _ in range(2))
    assert first.modules == second.modules
    assert columns(first) == columns(second)
