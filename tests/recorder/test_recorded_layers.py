"""Layers of recorded rows: names of modules, gradients, optimizer state, backward and reused storages."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memexplore as mx
from memexplore.recorder.events import Event
from memexplore.recorder.recorder import Recorder
from memexplore.tape import Category, Tape
from tests.recorder.recorded_steps import rows_of, train


def test_a_layer_has_its_qualified_name():
    tape = train("cuda", steps=1)
    born = tape.to_pandas().query("category == 'parameter' and action == 'alloc'")
    assert set(born["module"]) == {"0", "2"}


def test_a_gradient_belongs_to_the_layer_of_its_parameter():
    frame = train("cuda", steps=1).to_pandas()
    gradients = frame[(frame["action"] == "alloc") & (frame["category"] == "gradient")]
    assert dict(zip(gradients["size"], gradients["module"], strict=True)) == {
        80_000: "0", 800: "0", 8_000: "2", 40: "2",
    }  # fmt: skip


class Tied(nn.Module):
    """An embedding whose weight other layers have too."""

    def __init__(self, heads: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 100, bias=False) for _ in range(heads))
        for head in self.heads:
            head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(head(self.embedding(x)) for head in self.heads)


def train_tied(heads: int = 1) -> mx.Tape:
    def run() -> None:
        model = Tied(heads).cuda()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.zeros(4, dtype=torch.long, device="cuda")).sum().backward()
        optimizer.step()

    return mx.simulate(run)


def test_a_tied_weight_belongs_to_the_layer_that_is_defined_first():
    frame = train_tied().to_pandas().query("action == 'alloc'")
    for kind in ("parameter", "gradient", "optimizer state"):
        assert set(frame[frame["category"] == kind]["module"]) == {"embedding"}, kind


@pytest.mark.parametrize(
    ("heads", "others"), [(1, "heads.0"), (2, "heads.0, heads.1"), (6, "heads.0, heads.1, heads.2 and 3 more layers")]
)
def test_layers_that_share_a_weight_are_in_a_note(heads: int, others: str):
    note = f"embedding and {others} share a weight, which counts as memory of embedding"
    assert train_tied(heads).meta.notes == (note,)


def test_layers_with_weights_of_their_own_have_no_note():
    assert train("cuda").meta.notes == ()


def test_an_optimizer_state_belongs_to_the_layer_of_its_parameter():
    frame = train("cuda", steps=1).to_pandas()
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
        loss = layer(torch.ones(4, 10, device="cuda", requires_grad=True)).sum()  # the expected line
        loss.backward()

    line = run.__code__.co_firstlineno + 2
    tape = mx.simulate(run)
    # The gradient of the input, 4 x 10 floats, and cuBLAS's copies of the expanded gradient, of equal size.
    rows = rows_of(tape, action="alloc", op="aten::mm", size=160)
    assert len(rows) == 3
    for row in rows:
        assert tape.modules[tape.module[row]] == "Linear"
        assert any(frame.line == line and frame.filename == __file__ for frame in tape.stacks[tape.stack[row]])


def test_a_backward_row_of_a_step_without_modules_has_the_line_of_the_forward_op_in_each_step():
    def run() -> None:
        weight = torch.ones(10, 1, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            wide = weight.expand(10, 100)
            (wide * 2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    first = run.__code__.co_firstlineno
    tape = mx.simulate(run)
    # The sum of the expanded gradient, and the gradient of the product, 10 x 100 floats.
    for op, size, line in (("aten::sum", 40, first + 4), ("aten::mul", 4000, first + 5)):
        rows = rows_of(tape, action="alloc", phase="backward", op=op, size=size)
        assert [tape.step[row] for row in rows] == [1, 2]
        assert all(tape.stack[row] >= 0 for row in rows)
        assert [tape.stacks[tape.stack[row]][0].line for row in rows] == [line, line]


def test_the_backward_of_an_op_in_place_on_a_view_has_the_line_of_the_op():
    def run() -> None:
        weight = torch.ones(10, 10, device="cuda", requires_grad=True)
        part = (weight * 2)[:5]
        part.relu_()
        part.sum().backward()

    line = run.__code__.co_firstlineno + 3
    tape = mx.simulate(run)
    # The gradient of the whole, 10 x 10 floats, and twice that of the part, 5 x 10 floats.
    for op, size in (("aten::new_empty_strided", 400), ("aten::clone", 200), ("aten::threshold_backward", 200)):
        [row] = rows_of(tape, action="alloc", phase="backward", op=op, size=size)
        assert tape.stack[row] >= 0
        assert tape.stacks[tape.stack[row]][0].line == line


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
    recorder.tags.tag_model(layer)
    recorder.optimizer_begins(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    assert layer_of_an_update() == "Linear"
    recorder.free(512, 64)
    live[key] = types.SimpleNamespace(address=1024, size=64)
    recorder.preexisting(1024, 64, None)
    assert layer_of_an_update() == ""


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


def test_two_runs_in_one_process_give_equal_tapes():
    def columns(tape: Tape) -> list[object]:
        names = ("action", "address", "size", "category", "phase", "step", "op", "module", "stack")
        return [getattr(tape, name).tolist() for name in names]

    first, second = (mx.simulate(_update_in_backward, gpu="T4") for _ in range(2))
    assert first.modules == second.modules
    assert columns(first) == columns(second)


def test_module_that_defines_equality_is_named() -> None:
    class Comparing(torch.nn.Linear):
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("a comparison of two modules has no truth value")

        def __hash__(self) -> int:
            return id(self)

    tape = mx.simulate(lambda: torch.nn.Sequential(Comparing(4, 4), Comparing(4, 4)).cuda()(torch.ones(1, 4).cuda()))
    assert {"0", "1"} <= set(tape.modules)


def test_a_model_may_have_an_attribute_named_parameters():
    class Scaled(nn.Module):
        def __init__(self, parameters):
            super().__init__()
            self.parameters, self.layer = parameters, nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(x) * self.parameters["scale"]

    def run() -> None:
        Scaled({"scale": 2.0}).cuda()(torch.randn(4, 64, device="cuda"))

    born = mx.simulate(run).to_pandas().query("category == 'parameter' and action == 'alloc'")
    assert set(born["module"]) == {"layer"}
