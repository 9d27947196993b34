"""Measured against predicted: what differs is named, and what it does to the peaks.

The measured side is a predicted run in which one thing was changed, or a recording of a real GPU.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import memexplore as mx
from memexplore.analysis.comparison import Change, Peaks, compare_tapes
from memexplore.page.report import comparison_html
from memexplore.run import comparing
from memexplore.run.machine import machine_of
from memexplore.run.run import run
from memexplore.run.shared_measurement import shared
from memexplore.tape import COLUMNS, Action, Category, Meta, Source, Tape
from memexplore.virtual_gpu import device
from memexplore.virtual_gpu.kernels import tensor_core_convolutions
from tests import real_gpu
from tests.gpu import golden
from tests.virtual_gpu.test_golden import RECORDED, measured, predicted

MIB = 1 << 20


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 64, 3, padding=1)
        self.body = torch.nn.Conv2d(64, 64, 3, padding=1)
        self.head = torch.nn.Linear(64 * 32 * 32, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x).relu()).relu().flatten(1))


@pytest.fixture(scope="module")
def tape() -> Tape:
    step = mx.Step(Net(), torch.zeros(16, 3, 32, 32), loss=torch.mean, optimizer=torch.optim.AdamW)
    return run(step, machine=machine_of("H100")).tape


def rows_of(tape: Tape, op: str, category: Category, layer: str) -> np.ndarray[Any, Any]:
    """Return the requests of an op, a category and a layer."""
    return np.flatnonzero(
        (tape.action == Action.ALLOC)
        & (tape.category == category)
        & (tape.op == tape.ops.index(op))
        & (tape.module == tape.modules.index(layer))
    )


def replaced(tape: Tape, **columns: Any) -> Tape:
    return mx.replay(_without_segments(tape.replace(**columns)))


def _without_segments(tape: Tape) -> Tape:
    return tape[~np.isin(tape.action, (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE))]


def with_size(tape: Tape, rows: Any, factor: float) -> Tape:
    size = tape.size.copy()
    size[rows] = (size[rows] * factor).astype(np.int64)
    return replaced(tape, size=size)


def without(tape: Tape, row: int) -> Tape:
    """Leave a request out, with its frees."""
    gone = _rows_of_block(tape, row)
    return mx.replay(_without_segments(tape[np.setdiff1d(np.arange(len(tape)), gone)]))


def _rows_of_block(tape: Tape, row: int) -> list[int]:
    address = tape.address[row]
    rows = [row]
    for later in range(row + 1, len(tape)):
        if tape.address[later] == address and tape.action[later] in (Action.FREE_REQUESTED, Action.FREE_COMPLETED):
            rows.append(later)
            if tape.action[later] == Action.FREE_COMPLETED:
                break
    return rows


def moved(tape: Tape, row: int, by: int) -> Tape:
    """Free a block so many rows later."""
    frees = _rows_of_block(tape, row)[1:]
    order = np.argsort(
        [number + (by if number in frees else 0) + 0.5 * (number in frees) for number in range(len(tape))]
    )
    unique = tape.address.copy()  # blocks that take the place meanwhile would end this one
    unique[_rows_of_block(tape, row)] = 1 << 50
    return mx.replay(_without_segments(tape.replace(address=unique)[order]))


def inserted(tape: Tape, row: int, size: int) -> Tape:
    """Request scratch memory before a row, and free it at once."""
    columns = {}
    for name in COLUMNS:
        values = getattr(tape, name)
        new = np.repeat(values[row], 3)
        if name == "action":
            new = np.array([Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED])
        if name == "address":
            new = np.full(3, 1 << 51)
        if name == "size":
            new = np.full(3, size)
        if name == "category":
            new = np.full(3, Category.TEMPORARY)
        if name == "tensor":
            new = np.full(3, -1)
        columns[name] = np.insert(values, np.full(3, row), new)
    return mx.replay(_without_segments(tape.with_rows(columns)))


def swapped(tape: Tape, row: int, other: int) -> Tape:
    order = np.arange(len(tape))
    order[[row, other]] = order[[other, row]]
    return mx.replay(_without_segments(tape[order]))


FORWARD, BACKWARD = "aten::convolution", "aten::convolution_backward"


def _workspace(tape: Tape, op: str = FORWARD, layer: str = "body") -> np.ndarray[Any, Any]:
    return rows_of(tape, op, Category.WORKSPACE, layer)


def _activation(tape: Tape) -> int:
    return int(rows_of(tape, FORWARD, Category.ACTIVATION, "stem")[0])


def _states(tape: Tape) -> np.ndarray[Any, Any]:
    return np.flatnonzero(
        (tape.action == Action.ALLOC) & (tape.category == Category.OPTIMIZER_STATE) & (tape.size > MIB)
    )


def on_another_stream(tape: Tape) -> Tape:
    rows, stream = _rows_of_block(tape, _activation(tape)), tape.stream.copy()
    stream[rows] = 7
    return replaced(tape, stream=stream)


def out_of_memory(tape: Tape) -> Tape:
    row = int(rows_of(tape, "aten::mm", Category.GRADIENT, "head")[0])
    action = tape.action.copy()
    action[row] = Action.OOM
    return mx.replay(_without_segments(tape.replace(action=action)[: row + 1].replace(meta=_small(tape))))


def _small(tape: Tape) -> Any:
    return tape.meta._replace(capacity=64 * MIB)


def with_expandable_segments(tape: Tape) -> Tape:
    return mx.replay(tape, mx.Settings.parse("expandable_segments:True"))


def order_of_results(tape: Tape) -> Tape:
    rows = rows_of(tape, BACKWARD, Category.GRADIENT, "body")
    later = rows[(rows > rows[0]) & (tape.size[rows] != tape.size[rows[0]])][0]
    return swapped(tape, int(rows[0]), int(later))


PLANTED: dict[str, tuple[Callable[[Tape], Tape], Change | None, str]] = {
    "a workspace of cuDNN is larger": (
        lambda tape: with_size(tape, _workspace(tape), 3),
        Change.SIZE,
        "cuDNN's workspace in aten::convolution (body)",
    ),
    "a workspace of cuDNN is smaller": (
        lambda tape: with_size(tape, _workspace(tape, BACKWARD), 0.25),
        Change.SIZE,
        "cuDNN's workspace in aten::convolution_backward (body)",
    ),
    "a workspace of cuDNN is not there": (
        lambda tape: without(tape, int(_workspace(tape)[0])),
        Change.PREDICTED,
        "cuDNN's workspace in aten::convolution (body)",
    ),
    "cuBLAS's workspace is larger": (
        lambda tape: with_size(tape, rows_of(tape, "aten::addmm", Category.WORKSPACE, "head"), 4),
        Change.SIZE,
        "cuBLAS's workspace in aten::addmm (head)",
    ),
    "an op has scratch memory that is not predicted": (
        lambda tape: inserted(tape, int(np.flatnonzero(tape.op == tape.ops.index("aten::relu"))[0]), 40 * MIB),
        Change.MEASURED,
        "temporary in aten::relu",
    ),
    "an activation lives longer": (
        lambda tape: moved(tape, _activation(tape), 60),
        Change.FREED,
        "activation in aten::convolution (stem)",
    ),
    "an activation is half as large": (
        lambda tape: with_size(tape, _activation(tape), 0.5),
        Change.SIZE,
        "activation in aten::convolution (stem)",
    ),
    "the optimizer keeps half as much": (
        lambda tape: with_size(tape, _states(tape), 0.5),
        Change.SIZE,
        "optimizer state in aten::zeros_like (head)",
    ),
    "a tensor is on another stream": (
        on_another_stream,
        Change.STREAM,
        "activation in aten::convolution (stem)",
    ),
    "an op makes its results in another order": (order_of_results, None, "gradient in aten::convolution_backward"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_named(tape, name):
    plant, change, expected = PLANTED[name]
    comparison = compare_tapes(plant(tape), tape)
    named = [group for group in comparison.differing if group.name.startswith(expected)]
    assert named, str(comparison)
    assert change is None or {group.change for group in named} == {change}
    assert not comparison.is_equal


@pytest.mark.parametrize("name", [name for name in PLANTED if "workspace" in name])
def test_requests_as_measured_explain_the_difference_of_the_peaks(tape, name):
    """With the one planted group as measured the prediction has the measured peak allocated."""
    comparison = compare_tapes(PLANTED[name][0](tape), tape)
    effects = [group.effect[0] for group in comparison.differing if group.effect is not None]
    peaks = comparison.peaks["allocated"]
    assert sum(effects) == peaks.measured - peaks.predicted


def test_a_run_out_of_memory_is_the_answer(tape):
    comparison = compare_tapes(out_of_memory(tape), tape)
    assert comparison.text.startswith("The measured run ran out of memory, the predicted one ended")


def test_other_allocator_settings_are_the_answer_where_no_request_differs(tape):
    comparison = compare_tapes(with_expandable_segments(tape), tape)
    assert not comparison.differing
    assert "no request differs, but the allocator's settings do (expandable_segments:True measured, the defaults" in (
        comparison.text
    )


def test_equal_runs_are_equal(tape):
    comparison = compare_tapes(tape, tape[:])
    assert comparison.is_equal
    count = comparison.requests[0]
    assert comparison.text == (
        f"Allocated and reserved memory equal to the byte; all {count} requests are equal in order and size."
    )


def test_the_difference_that_moves_the_peak_is_the_cause_and_not_the_one_with_most_bytes(tape):
    """The backward pass of the head is the peak; a larger workspace of the first layer is gone by then."""
    measured = with_size(with_size(tape, _workspace(tape, FORWARD, "stem"), 1.5), _states(tape), 1.5)
    comparison = compare_tapes(measured, tape)
    assert comparison.cause is not None
    assert comparison.cause.category == "optimizer state"


# --- recordings of a real GPU -----------------------------------------------------------------------------------------


GOLDEN: dict[str, set[str]] = {
    "mlp_adamw_foreach": set(),
    "transformer_bf16": set(),
    "resnet_momentum": {"cuDNN"},
    "unet_bf16": {"cuDNN"},
    "cnn_sgd": {"cuDNN"},
}
"""Scenario -> libraries whose workspaces may differ."""


@pytest.mark.parametrize(("path", "name"), [case for case in RECORDED if case[1] in GOLDEN])
def test_a_golden_recording_is_the_measured_side(path, name):
    file = golden.read(path)
    gpu, release = file["gpu"]["name"], file["versions"]["torch"]
    comparison = compare_tapes(measured(file, name), predicted(name, gpu, release))
    # Of what was only measured the file knows no op.
    predicted_ones = [group for group in comparison.differing if group.change in (Change.SIZE, Change.PREDICTED)]
    assert {group.library for group in predicted_ones} <= GOLDEN[name]
    assert comparison.equal >= 0.8 * comparison.requests[0]


# --- a GPU that is recorded, and that differs in known places ---------------------------------------------------------


def _step() -> None:
    model = Net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.zeros(16, 3, 32, 32, device="cuda")).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_recorded_gpu_that_is_as_predicted_is_equal(monkeypatch):
    comparison = compare_tapes(real_gpu.recorded(monkeypatch, _step, "H100"), mx.simulate(_step, gpu="H100"))
    assert comparison.is_equal, str(comparison)


def test_a_workspace_of_a_recorded_gpu_is_named_with_library_op_and_layer(monkeypatch):
    with monkeypatch.context() as patched:
        possible = tensor_core_convolutions.possible_workspaces
        patched.setattr(
            tensor_core_convolutions, "possible_workspaces", lambda *args: tuple(3 * size for size in possible(*args))
        )
        patched.setattr(device, "_plans", {})
        measured = real_gpu.recorded(monkeypatch, _step, "H100")
    comparison = compare_tapes(measured, mx.simulate(_step, gpu="H100"))
    assert {group.library for group in comparison.differing} == {"cuDNN"}
    assert any(group.name == "cuDNN's workspace in aten::convolution (body)" for group in comparison.differing)


def test_a_step_is_measured_and_predicted(monkeypatch):
    """The measured side is a virtual T4 in the place of the real GPU, with 700 MiB outside the allocator."""
    monkeypatch.setattr(comparing, "default_name", lambda: "cuda")
    monkeypatch.setattr(comparing, "machine_of", lambda name: machine_of("T4", release="2.14"))
    monkeypatch.setattr(
        comparing, "DriverMemory", lambda device: SimpleNamespace(outside=lambda: SimpleNamespace(size=700 * MIB))
    )
    comparison = mx.compare(mx.Step(Net(), torch.zeros(4, 3, 32, 32), loss=torch.mean))
    assert comparison.is_equal
    assert comparison.outside == Peaks(700 * MIB, int(140.875 * MIB))  # tests/test_outside_allocator.py


def test_without_a_gpu_the_error_says_what_to_do():
    with pytest.raises(ValueError, match=r"torch finds none that is not virtual: record the program where one is"):
        mx.compare(mx.Step(Net(), torch.zeros(4, 3, 32, 32), loss=torch.mean))


# --- what is shown and shared -----------------------------------------------------------------------------------------


def test_the_table_has_the_memory_outside_the_allocator(tape):
    comparison = dataclasses.replace(compare_tapes(tape, tape[:]), outside=Peaks(600 * MIB, 504 * MIB))
    assert "outside the allocator" in str(comparison)
    assert "600 MiB" in comparison._repr_html_()


def test_the_page_has_the_answer_and_both_runs(tape):
    measured = with_size(tape, _workspace(tape), 3)
    page = comparison_html(compare_tapes(measured, tape))
    assert "cuDNN&#x27;s workspace in aten::convolution (body)" in page
    assert '"name":"before"' in page  # the outline of the predicted run


def test_a_shared_file_has_nothing_of_the_program(tape):
    """Names of layers, files, functions and custom ops are the user's; sizes, shapes and torch's ops are not."""
    secret = dataclasses.replace(
        tape,
        modules=tuple(f"secret.{name}" for name in tape.modules),
        ops=tuple("secret::op" if op == "aten::relu" else op for op in tape.ops),
        stacks=tuple(
            tuple(frame._replace(filename="/home/secret/train.py") for frame in stack) for stack in tape.stacks
        ),
    )
    row = int(np.flatnonzero(secret.op == secret.ops.index("secret::op"))[0])
    measured = inserted(with_size(secret, _workspace(tape), 3), row, 40 * MIB)
    comparison = compare_tapes(measured, secret)
    assert "secret" in str(comparison)
    text = json.dumps(shared(comparison))
    assert "secret" not in text
    assert "aten::convolution" in text
    assert "float32[64, 64, 3, 3]" in text


def test_many_differences_do_not_hide_each_other():
    """Every third request of a thousand differs in size, one in ten is missing."""
    generator = np.random.default_rng(0)
    size = generator.integers(1, 1000, 1000) * 512
    other = np.where(np.arange(1000) % 3 == 0, size + 512, size)
    kept = np.arange(1000) % 10 != 5
    sides = [_allocs(size, np.arange(1000)), _allocs(other[kept], np.arange(1000)[kept])]
    comparison = compare_tapes(*sides)
    counts = {group.change: 0 for group in comparison.differing}
    for group in comparison.differing:
        counts[group.change] += len(group.sizes)
    assert counts[Change.MEASURED] == 100
    assert counts[Change.SIZE] == 334 - 33  # 5, 15, 25, ... are missing, and every third of these is in every third
    assert comparison.equal == 1000 - 301 - 100


def _allocs(size: np.ndarray[Any, Any], op: np.ndarray[Any, Any]) -> Tape:
    rows = {"address": np.cumsum(size), "size": size, "op": op % 7}
    return Tape.from_columns(rows, meta=Meta(Source.PREDICTED, "T4"), ops=[f"aten::op{number}" for number in range(7)])


def test_workspaces_of_equal_layers_are_all_that_differs() -> None:
    """A100s compute these layers without a workspace: the tensors around them are of one size, and stay matched."""

    def train() -> None:
        layers = [torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)]
        model = torch.nn.Sequential(*(torch.nn.Sequential(layer, torch.nn.ReLU()) for layer in layers)).cuda()
        model(torch.zeros(16, 64, 32, 32, device="cuda")).sum().backward()

    comparison = compare_tapes(mx.simulate(train, gpu="H100"), mx.simulate(train, gpu="A100"))
    (group,) = [
        each for each in comparison.differing if each.name.startswith("cuDNN's workspace in aten::convolution (")
    ]
    assert group.change is Change.MEASURED
    assert len(group.sizes) == 4
    others = [each for each in comparison.differing if each is not group]
    assert all(each.library == "cuDNN" for each in others), str(comparison)
