"""Categories of recorded blocks: activations and temporaries, with checkpoints and autograd functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memexplore as mx
from memexplore.analysis.curves import category_bytes
from memexplore.tape import Category, Phase, Tape
from tests.recorder.recorded_steps import block_sizes, rows_of


def test_saved_tensors_are_activations_and_others_temporaries():
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # exp saves its result for backward; the negation is freed inside the call.
            return (-x).exp() * 2

    def run() -> None:
        Chain()(torch.ones(1000, device="cuda", requires_grad=True))

    tape = mx.simulate(run)
    kinds = {
        op: tape.to_pandas().iloc[rows_of(tape, action="alloc", op=op)[0]]["category"]
        for op in ("aten::neg", "aten::exp")
    }
    assert kinds == {"aten::neg": "temporary", "aten::exp": "activation"}


def test_an_optimizer_may_keep_a_number_beside_the_states_of_parameters():
    class Counting(torch.optim.Adagrad):
        def step(self, closure=None):
            self.state["steps"] = 1
            return super().step(closure)

    def run() -> None:
        model = nn.Linear(100, 1, bias=False).cuda()
        optimizer = Counting(model.parameters())
        model(torch.ones(1, 100, device="cuda")).sum().backward()
        optimizer.step()

    # The sum of squared gradients of 100 weights.
    assert block_sizes(mx.simulate(run), Category.OPTIMIZER_STATE) == [400]


def test_the_history_of_lbfgs_is_state_of_the_optimizer():
    made: list[torch.optim.LBFGS] = []

    def run() -> None:
        model = nn.Linear(100, 1, bias=False).cuda()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, history_size=2)
        batch = torch.ones(1, 100, device="cuda")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        made.append(optimizer)

    tape = mx.simulate(run)
    [state] = made[0].state.values()
    kept = [*state["old_dirs"], *state["old_stps"], *state["ro"], *state["al"]]
    kept += [state[name] for name in ("d", "prev_flat_grad", "H_diag")]
    # The weights are drawn, and how many steps the history has depends on them: each has 2 vectors of 100 numbers and 2
    # numbers. Beside it are 2 vectors and a number; each block is rounded up to 512 bytes.
    steps = len(state["old_dirs"])
    assert steps > 0
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept if tensor is not None}) == steps * 4 + 3
    assert category_bytes(tape, len(tape) - 1)[Category.OPTIMIZER_STATE] == 512 * (steps * 4 + 3)


def test_without_gradients_nothing_is_an_activation():
    def run() -> None:
        with torch.no_grad():
            nn.Sequential(nn.Linear(100, 100), nn.ReLU()).cuda()(torch.ones(5, 100, device="cuda"))

    assert block_sizes(mx.simulate(run), Category.ACTIVATION) == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_an_activation_of_the_backward_pass(reentrant):
    block = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())

    def run() -> None:
        model = block.cuda()
        x = torch.ones(8, 64, device="cuda", requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()

    tape = mx.simulate(run)
    recomputed = [row for row in rows_of(tape, action="alloc", op="aten::sigmoid") if tape.phase[row] == Phase.BACKWARD]
    assert len(recomputed) == 1
    assert tape.category[recomputed[0]] == Category.ACTIVATION
    assert tape.modules[tape.module[recomputed[0]]].endswith("1")


class Chained(nn.Module):
    """Two blocks under re-entrant checkpoints, whose forward runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(64, 64, bias=False), nn.Sigmoid()) for _ in range(2))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def _kinds(tape: Tape, phase: str) -> list[tuple[str, str]]:
    """Return op and category of each block made in a phase."""
    frame = tape.to_pandas()
    frame = frame[(frame["action"] == "alloc") & (frame["phase"] == phase) & (frame["category"] != "workspace")]
    return list(zip(frame["op"], frame["category"], strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_the_results_of_a_reentrant_checkpoint_are_activations(device):
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


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in the outer checkpoint
def test_recomputed_results_of_a_nested_reentrant_checkpoint_are_activations():
    outer = Chained()

    def run() -> None:
        model, x = outer.cuda(), torch.ones(8, 64, device="cuda", requires_grad=True)
        checkpoint(model, x, use_reentrant=True).sum().backward()

    kinds = _kinds(mx.simulate(run, gpu="T4"), "backward")
    # The outer checkpoint recomputes both blocks, then each block is computed a third time, the last block first.
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


def test_saved_tensors_and_results_of_an_autograd_function_are_activations():
    def run() -> None:
        Doubling()(torch.ones(1000, device="cuda", requires_grad=True)).sum().backward()

    kinds = _kinds(mx.simulate(run, gpu="T4"), "forward")
    assert kinds[:3] == [("aten::exp", "activation"), ("aten::add", "temporary"), ("aten::mul", "activation")]


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_blocks_of_a_forward_pass_without_gradients_are_temporaries(without):
    kept = []

    def run() -> None:
        model = nn.Sequential(nn.Linear(64, 64), Doubling()).cuda()
        for _ in range(2):
            with without():
                kept.append(model(torch.ones(8, 64, device="cuda")))

    tape = mx.simulate(run, gpu="T4")
    once = [("aten::addmm", "temporary"), *((f"aten::{op}", "temporary") for op in ("exp", "add", "mul"))]
    assert _kinds(tape, "forward") == once * 2


def test_a_teacher_inside_a_trained_model_makes_temporaries():
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
    # The teacher's product and the three blocks of the function, then the student's product.
    assert [category for _, category in kinds[:5]] == ["temporary"] * 4 + ["activation"]


@pytest.mark.filterwarnings("error")
def test_weights_of_a_functional_call_that_autograd_computed_give_no_warning():
    def run() -> None:
        model = nn.Linear(1000, 1, bias=False).cuda()
        x = torch.ones(1, 1000, device="cuda")
        (gradient,) = torch.autograd.grad(model(x).sum(), model.weight, create_graph=True)
        fast = {"weight": model.weight - gradient}
        torch.func.functional_call(model, fast, (x,)).sum().backward()

    tape = mx.simulate(run)
    # 1000 values of 4 bytes, in the second pass: what `autograd.grad` returned in the first one is an intermediate.
    assert block_sizes(tape, Category.GRADIENT) == [1000 * 4]
