"""The loss of a rebuilt step is that of the code: its peak is that of the program on a larger GPU, to the byte."""

from __future__ import annotations

import linecache
import pickle
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import memexplore
from memexplore.analysis import curves
from memexplore.out_of_memory import failed_step
from memexplore.out_of_memory.failed_step import FailedStep, SeenCall
from memexplore.recorder.recording import record
from memexplore.run.machine import machine_of
from memexplore.run.run import run
from memexplore.tape import Tape

LARGE = "80GiB"
# The classifier's output has 4096 × 4096 × 4 bytes, 64 MiB; three or four of them are alive at the peak.
IN_FORWARD, IN_LOSS, IN_BACKWARD = "80MiB", "140MiB", "200MiB"
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4096)).cuda()
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = {"x": torch.randn(4096, 64, device="cuda"), "y": torch.randint(0, 4096, (4096,), device="cuda")}
def loss_of(out, target, scale):
    return F.cross_entropy(out, target) * scale
"""
IN_FUNCTION = """
def train(x, y):
    {}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
for _ in range(2):
    train(**batch)
"""
IN_LOOP = """
x, y = batch.values()
for _ in range(3):
    optimizer.zero_grad()
    {}
    loss.backward()
    optimizer.step()
"""


def ran(path: Path, source: str, gpu: str) -> tuple[Tape, FailedStep | str | None]:
    """Run a program on a GPU; return its tape and the step that failed."""
    path.write_text(source)
    linecache.checkcache(str(path))
    names: dict[str, Any] = {"__name__": "__main__"}
    step = None
    with memexplore.virtual(gpu), record() as recording:
        seen = SeenCall()
        assert recording.recorder is not None
        seen.follow(recording.recorder)
        try:
            exec(compile(source, str(path), "exec"), names)
        except torch.OutOfMemoryError as error:
            step = failed_step.failed_step(error, seen, list(names.values()))
    names.clear()
    return recording.tape, step


def peak_of(step: FailedStep | str | None) -> int:
    """The peak allocated of the rebuilt step on a large GPU."""
    assert isinstance(step, FailedStep), step
    return curves.peak(run(pickle.loads(step.packed), machine=machine_of(LARGE)).tape)[0]


@pytest.mark.parametrize("gpu", [IN_FORWARD, IN_LOSS, IN_BACKWARD])
@pytest.mark.parametrize(
    "lines",
    [
        "out = model(x)\nloss = criterion(out, y)",
        "out = model(x)\nloss = F.cross_entropy(out, y)",
        "loss = criterion(model(x), y)",
        "out = model(x)\nloss = F.cross_entropy(out.view(-1, 4096), y.view(-1))\nloss = loss + out.square().mean()",
        "out = model(x)\nprobabilities = out.softmax(1)\nloss = loss_of(out, batch['y'], scale=2)",
        "out = model(x)\nloss = loss_of(out.float(), y, 0.5)\ndel out",
        "with torch.autocast('cuda', dtype=torch.bfloat16):\n    out = model(x)\n    loss = criterion(out, y)",
        "with torch.autocast('cuda', dtype=torch.bfloat16):\n    out = model(x)\nloss = criterion(out, y)",
    ],
    ids=["module", "function", "unheld", "sum", "held", "deleted", "autocast", "beside autocast"],
)
def test_peak_is_that_of_the_program(tmp_path: Path, lines: str, gpu: str) -> None:
    source = MODEL + IN_FUNCTION.format(textwrap.indent(lines, "    ").strip())
    whole, _ = ran(tmp_path / "train.py", source, LARGE)
    _, step = ran(tmp_path / "train.py", source, gpu)
    assert peak_of(step) == curves.peak(whole)[0]
    assert isinstance(step, FailedStep)
    assert step.assumed == ()


def test_variables_of_a_loop_hold_the_output_until_the_next_one(tmp_path: Path) -> None:
    source = MODEL + IN_LOOP.format("out = model(x)\n    loss = F.cross_entropy(out, y)")
    whole, _ = ran(tmp_path / "train.py", source, LARGE)
    _, step = ran(tmp_path / "train.py", source, IN_BACKWARD)
    assert peak_of(step) == curves.peak(whole)[0]


def test_autocast_around_forward_and_backward_is_that_of_the_loss_too(tmp_path: Path) -> None:
    lines = "with torch.autocast('cuda', dtype=torch.bfloat16):\n    out = model(x)\n    loss = criterion(out, y)"
    source = MODEL + IN_FUNCTION.format(textwrap.indent(lines, "    ").strip()).replace("    loss.b", "        loss.b")
    whole, _ = ran(tmp_path / "train.py", source, LARGE)
    _, step = ran(tmp_path / "train.py", source, IN_BACKWARD)
    # Autocast's copies in bf16 of weights that backward does not need live to the end of its block in the program.
    copies = (64 * 256 + 256 + 4096) * 2
    assert peak_of(step) == curves.peak(whole)[0] - copies


@pytest.mark.parametrize("gpu", [IN_FORWARD, IN_LOSS, IN_BACKWARD])
def test_a_function_that_returns_the_loss_releases_the_output(tmp_path: Path, gpu: str) -> None:
    source = MODEL + (
        "def loss_of_batch(x, y):\n    out = model(x)\n    return F.cross_entropy(out, y)\n"
        "for _ in range(2):\n    loss_of_batch(**batch).backward()\n    optimizer.step()\n    optimizer.zero_grad()"
    )
    whole, _ = ran(tmp_path / "train.py", source, LARGE)
    _, step = ran(tmp_path / "train.py", source, gpu)
    assert peak_of(step) == curves.peak(whole)[0]


def test_a_trainer_has_its_model_and_its_criterion_as_attributes(tmp_path: Path) -> None:
    source = (
        MODEL
        + """
class Trainer:
    def __init__(self):
        self.model, self.criterion = model, criterion
    def loss(self, x, y):
        out = self.model(x)
        return self.criterion(out, y)
    def step(self, x, y):
        loss = self.loss(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
for _ in range(2):
    Trainer().step(**batch)
"""
    )
    whole, _ = ran(tmp_path / "train.py", source, LARGE)
    _, step = ran(tmp_path / "train.py", source, IN_BACKWARD)
    assert peak_of(step) == curves.peak(whole)[0]


@pytest.mark.parametrize(
    "lines",
    [
        # Names that the lines have assigned again.
        "y = y + 1\n    out = model(x)\n    y = F.one_hot(y, 4096).float()\n    loss = F.cross_entropy(out, y)",
        # Two backward passes.
        "out = model(x)\n    F.cross_entropy(out, y).backward(retain_graph=True)\n    loss = out.square().mean()",
        # Two calls of the model.
        "loss = F.cross_entropy(model(x), y) + model(x).square().mean()",
    ],
    ids=["assigned again", "two losses", "two calls"],
)
def test_lines_that_are_not_understood_leave_the_mean_squared_error(tmp_path: Path, lines: str) -> None:
    _, step = ran(tmp_path / "train.py", MODEL + IN_FUNCTION.format(lines), IN_BACKWARD)
    assert isinstance(step, FailedStep)
    assert step.assumed == (failed_step.LOSS,)


def test_weights_of_a_criterion_are_on_the_gpu(tmp_path: Path) -> None:
    weighted = MODEL.replace("label_smoothing=0.1)", "weight=torch.rand(4096)).cuda()")
    source = weighted + IN_FUNCTION.format("loss = criterion(model(x), y)")
    whole, _ = ran(tmp_path / "train.py", source, LARGE)
    _, step = ran(tmp_path / "train.py", source, IN_BACKWARD)
    assert peak_of(step) == curves.peak(whole)[0]


def test_other_models_that_the_program_calls_are_named(tmp_path: Path) -> None:
    teacher = "teacher = nn.Linear(64, 64).cuda()\n"
    source = MODEL + teacher + IN_FUNCTION.format("x = teacher(x)\n    loss = F.cross_entropy(model(x), y)")
    _, step = ran(tmp_path / "train.py", source, IN_BACKWARD)
    assert isinstance(step, FailedStep)
    assert failed_step.ONE_OF_SEVERAL.format("Sequential") in step.assumed


def test_looking_at_a_function_that_calls_a_model_keeps_none_of_its_variables_alive():
    model = torch.nn.Linear(4, 1)
    x = torch.zeros(2, 4)
    weak, seen = weakref.ref(x), SeenCall()
    seen.see(model, (x,), sys._getframe())
    assert seen.call is not None
    x = None
    assert weak() is None
