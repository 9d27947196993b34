"""How far a prediction may be off: replays with other workspaces, and shares where none is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.analysis.error_range import (
    Range,
    need_range,
    reserved_range,
    reserved_under_assumptions,
    under_assumption,
)
from memexplore.analysis.need import need
from memexplore.analysis.summary import summary
from memexplore.tape import Action, Category, Meta, Source, Tape
from memexplore.virtual_gpu.kernels.tensor_core_convolutions import Assumption
from tests.gpu import zoo

MIB = 1 << 20
META = Meta(Source.PREDICTED, "H100", gpu="H100 SXM")


def requests(*sizes: int, workspaces: dict[int, tuple[int, ...]]) -> Tape:
    """Return a tape of blocks that stay, behind some of which a workspace of the first of its sizes was requested."""
    rows: list[tuple[int, int, int, int, int]] = []
    for number, size in enumerate(sizes):
        possible = list(workspaces).index(number) if number in workspaces else -1
        rows.append((Action.ALLOC, number, size, Category.ACTIVATION, possible))
        own = workspaces.get(number, (0,))[0]
        if own:
            actions = (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
            rows += [(action, 1000 + number, own, Category.WORKSPACE, -1) for action in actions]
    names = ("action", "address", "size", "category", "workspace")
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)) | {"op": [0] * len(rows)}
    ops = ["aten::convolution" if workspaces else "aten::mm"]
    return Tape.from_columns(columns, workspaces=tuple(workspaces.values()), ops=ops, meta=META)


def test_a_workspace_gets_the_size_of_an_assumption() -> None:
    tape = requests(MIB, 2 * MIB, workspaces={0: (8 * MIB, 4 * MIB)})
    assert under_assumption(tape, 0).size.tolist() == [MIB, *[8 * MIB] * 3, 2 * MIB]
    assert under_assumption(tape, 1).size.tolist() == [MIB, *[4 * MIB] * 3, 2 * MIB]


def test_a_workspace_goes_and_comes() -> None:
    tape = requests(MIB, 2 * MIB, 3 * MIB, workspaces={0: (8 * MIB, 0), 2: (0, 4 * MIB)})
    other = under_assumption(tape, 1)
    assert other.size.tolist() == [MIB, 2 * MIB, 3 * MIB, *[4 * MIB] * 3]
    assert other.action[-3:].tolist() == [Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED]
    assert other.category[-3:].tolist() == [Category.WORKSPACE] * 3
    assert np.count_nonzero(other.address == other.address[-1]) == 3


def test_an_assumption_of_which_an_entry_says_nothing_leaves_it() -> None:
    tape = requests(MIB, 2 * MIB, workspaces={0: (8 * MIB,), 1: (0, 4 * MIB)})
    assert under_assumption(tape, 1).size.tolist() == [MIB, *[8 * MIB] * 3, 2 * MIB, *[4 * MIB] * 3]


def test_the_range_is_that_of_the_replays_and_two_percent() -> None:
    # When the second block is requested the workspace is free again: its 30 MiB are reused, and 60 are split.
    tape = requests(30 * MIB, 30 * MIB, workspaces={0: (30 * MIB, 0, 60 * MIB)})
    assert reserved_under_assumptions(tape) == (60 * MIB, 60 * MIB, 90 * MIB)
    # The lowest and the highest, and 2 % at both ends.
    assert reserved_range(tape) == Range(round(60 * MIB * 0.98), round(90 * MIB * 1.02))


def test_a_convolution_needs_no_workspace_that_does_not_fit() -> None:
    # With room 90 MiB are reserved, as above; with 60 the blocks fit, and the workspace of 60 is not there.
    tape = requests(30 * MIB, 30 * MIB, workspaces={0: (30 * MIB, 0, 60 * MIB)})
    assert need_range(tape, 60 * MIB) == Range(round(60 * MIB * 0.98), round(60 * MIB * 1.02))


def test_recurrent_layers_keep_their_error_beside_convolutions() -> None:
    tape = requests(30 * MIB, workspaces={0: (30 * MIB, 0)})
    row = np.flatnonzero(tape.category == Category.WORKSPACE)[0]
    both = tape.replace(ops=(*tape.ops, "aten::_cudnn_rnn"), op=np.where(np.arange(len(tape)) == row, 1, tape.op))
    assert reserved_range(both).high == round(60 * MIB * 1.08)


def test_a_measured_run_and_one_without_cudnn_have_no_range() -> None:
    tape = requests(30 * MIB, workspaces={0: (30 * MIB, 0)})
    assert need_range(tape.replace(meta=META._replace(source=Source.MEASURED)), 100) == Range(100, 100)
    assert need_range(requests(30 * MIB, workspaces={}), 100) == Range(100, 100)


def _train() -> None:
    layer = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).cuda()
    layer(torch.zeros(8, 3, 64, 64, device="cuda")).sum().backward()


@pytest.mark.parametrize("gpu", ["H100", "A100"])
def test_a_run_has_an_entry_for_each_convolution_whose_workspace_may_differ(gpu: str) -> None:
    tape = mx.simulate(_train, gpu=gpu)
    assert {len(sizes) for sizes in tape.workspaces} == {len(Assumption)}
    of_convolutions = {tape.ops[op] for op in tape.op[tape.workspace >= 0]}
    assert of_convolutions <= {"aten::convolution", "aten::convolution_backward"}
    assert reserved_under_assumptions(tape)[0] == mx.peak(tape, "reserved")[0]


def test_the_summary_and_a_file_have_the_range(tmp_path) -> None:
    tape = mx.simulate(_train, gpu="A100")
    needed = summary(tape)["need"]
    assert needed["low"] < needed["smallest"] < needed["high"]
    assert needed["reserved_low"] < needed["without_pressure"] < needed["reserved_high"]
    path = tmp_path / "run.tape"
    tape.save(path)
    assert summary(Tape.load(path))["need"] == needed


def test_a_gpu_without_tensor_cores_has_no_assumptions() -> None:
    assert mx.simulate(_train, gpu="GTX 1080 Ti").workspaces == ()


MEASURED = json.loads(zoo.measured_files()[0].read_text())["peaks"]
"""Of three training steps on an H100 (docs/accuracy.md)."""


@pytest.mark.parametrize("name", ["unet fp32", "unet bf16", "unet all", "lenet fp32", "resnet50 fp32", "resnet50 bf16"])
def test_the_range_has_what_an_h100_has_measured(name: str) -> None:
    kind, precision = name.split(" ", 1)
    tape = mx.simulate(lambda: zoo.train(kind, precision), gpu="H100 SXM", release="2.11")
    expected = reserved_range(tape)
    assert expected.low <= MEASURED[name]["reserved"] <= expected.high


def test_a_verdict_has_the_needs_under_all_assumptions() -> None:
    tape = mx.simulate(lambda: zoo.train("unet", "bf16"), gpu="H100 SXM", release="2.11")
    own = need(tape)
    assert own is not None
    others = [need(under_assumption(tape, number)) for number in range(len(Assumption))]
    sizes = [each.smallest for each in others if each is not None]
    assert need_range(tape, own.smallest) == Range(round(min(sizes) * 0.98), round(max(sizes) * 1.02))


def test_what_is_not_measured_on_ampere_has_a_range() -> None:
    """Results of few aligned channels have no workspace there, or one as large as the operands."""

    def infer() -> None:
        layers = nn.Sequential(*(nn.Conv2d(128, 128, 3, padding=1) for _ in range(3))).cuda()
        with torch.no_grad():
            layers(torch.zeros(4, 128, 224, 224, device="cuda"))

    tape = mx.simulate(infer, gpu="A100")
    assert not (tape.category == Category.WORKSPACE).any()
    # Input, result, and a workspace that has both.
    assert reserved_range(tape).high > 1.9 * mx.peak(tape, "reserved")[0]


def test_a_tape_without_requests_reserves_nothing() -> None:
    assert reserved_range(mx.simulate(_train, gpu="A100")[:0]) == Range(0, 0)
