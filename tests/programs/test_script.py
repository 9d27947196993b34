"""Scripts as programs: their knobs act at run time, and what a run changes is restored."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import random
import sys
import textwrap

import pytest
import torch

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.script import Script
from memexplore.run.run import Run, run
from memexplore.tape import Action

TRAIN = """
import argparse
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from net_of_the_script import net

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--loader", action="store_true")
args = parser.parse_args()

def batches():
    x, y = torch.randn(64, 50), torch.randint(10, (64,))
    if args.loader:
        return DataLoader(TensorDataset(x, y), batch_size=args.batch_size)
    return zip(x.split(args.batch_size), y.split(args.batch_size))

def main():
    os.environ["OF_THE_SCRIPT"] = "1"
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    for epoch in range(args.epochs):
        for x, y in batches():
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), "model.pt")
    print("trained")

if __name__ == "__main__":
    main()
"""
NET = """
from torch import nn
def net():
    return nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 10))
"""


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "net_of_the_script.py").write_text(textwrap.dedent(NET))
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    return script


def ran(path: pathlib.Path, *arguments: str, knobs: Knobs | None = None) -> Run:
    return run(Script(path, arguments), knobs or Knobs(), machine_of("T4"))


def requests(result: Run) -> list[int]:
    return result.tape.size[result.tape.action == Action.ALLOC].tolist()


@pytest.mark.parametrize("loader", [(), ("--loader",)], ids=["argument", "loader"])
def test_batch_of_a_script(path: pathlib.Path, loader: tuple[str, ...]) -> None:
    result = ran(path, *loader, knobs=Knobs(batch=16))
    assert requests(result) == requests(ran(path, *loader, "--batch-size", "16"))
    assert result.applied.texts == ("batch of 16",)


def test_optimizer_and_micro_batches_of_a_script(path: pathlib.Path) -> None:
    result = ran(path, "--loader", knobs=Knobs(accumulation=2, optimizer="SGD"))
    assert result.applied.texts == ("accumulation over 2 micro-batches of 16", "SGD")
    # 64 samples in micro-batches of 16, 2 to a step
    assert int(result.tape.step.max()) == 2
    text = path.read_text().replace("torch.optim.AdamW", "torch.optim.SGD")
    text = text.replace("for x, y in batches():", "for number, (x, y) in enumerate(batches()):")
    text = text.replace("optimizer.zero_grad()", "number % 2 or optimizer.zero_grad()")
    text = text.replace("loss.backward()", "(loss / 2).backward()")
    path.write_text(text.replace("optimizer.step()", "number % 2 and optimizer.step()"))
    assert requests(result) == requests(ran(path, "--loader", "--batch-size", "16"))


ONE_STEP = (
    "With accumulation=2 this script ends after one step, and later ones may need more memory: they begin with the "
    "optimizer's state. Let the loop make more passes."
)


@pytest.mark.parametrize(("epochs", "notes"), [("1", (ONE_STEP,)), ("2", ())])
def test_accumulation_that_leaves_one_step_says_so(path: pathlib.Path, epochs: str, notes: tuple[str, ...]) -> None:
    # An epoch is one batch of 64, hence one step.
    result = ran(path, "--loader", "--batch-size", "64", "--epochs", epochs, knobs=Knobs(accumulation=2))
    assert (int(result.tape.step.max()), result.applied.notes) == (int(epochs), notes)


def test_a_recorded_script_has_the_notes_of_its_knobs(path: pathlib.Path) -> None:
    net = path.parent / "net_of_the_script.py"
    net.write_text(net.read_text().replace("nn.ReLU()", "nn.BatchNorm1d(100), nn.Sigmoid(), nn.ReLU()"))
    knobs = Knobs(accumulation=2, inplace="on")
    recorded = Script(path, ("--loader",)).record(knobs, machine_of("T4"), lambda recording: contextlib.nullcontext())
    assert recorded.error is None
    # Two batches of 32; the sigmoid keeps its output, which the ReLU would overwrite.
    assert recorded.tape.meta.notes[-3:] == (
        "Knobs: inplace on, accumulation 2.",
        "Batch norm sees one micro-batch at a time: losses and gradients differ from those of the whole batch.",
        "Left as written: 1 site, such as '3': "
        "its input is kept for the backward pass of aten::sigmoid at train.py:27.",
    )


def test_what_a_run_changes_is_restored(path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> list[object]:
        return [
            sys.argv, list(sys.path), sys.modules["__main__"], dict(os.environ), os.getcwd(), set(sys.modules),
            random.getstate(), torch.get_rng_state().tolist(), sorted(os.listdir(path.parent)),
        ]  # fmt: skip

    ran(path)  # imports what torch imports late
    before = state()
    for _ in range(2):
        ran(path, knobs=Knobs(batch=16, precision="bf16"))
        assert [entry for entry in state()[-1] if entry != "__pycache__"] == ["net_of_the_script.py", "train.py"]  # type: ignore[attr-defined]
        assert state()[:-1] == before[:-1]
    assert capsys.readouterr().out == ""


def test_a_script_goes_to_another_process(path: pathlib.Path) -> None:
    copy = pickle.loads(pickle.dumps(Script(path, ("--batch-size", "16"))))
    assert requests(run(copy, Knobs(), machine_of("T4"))) == requests(ran(path, knobs=Knobs(batch=16)))


def test_what_cannot_act_says_why(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import torch\ntorch.zeros(3, device='cuda')")
    reasons = Script(path).unavailable_knobs()
    assert reasons["batch"] == "this script trains no model"
    assert reasons["variables"] == "those of a script are its own; give it an argument"
    with pytest.raises(ValueError, match="optimizer cannot be changed: this script makes no optimizer; explore a Step"):
        run(Script(path), Knobs(optimizer="SGD"), machine_of("T4"))


def test_exit_statuses(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import sys, torch\ntorch.zeros(3, device='cuda')\nsys.exit(int(sys.argv[1]))")
    assert requests(ran(path, "0")) == [12]
    with pytest.raises(RuntimeError, match="ended with exit status 2"):
        ran(path, "2")
