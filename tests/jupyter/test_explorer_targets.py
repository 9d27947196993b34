"""The explorer on a real device, and the explorer of a notebook cell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memexplore.analysis import curves
from memexplore.jupyter import tabs
from memexplore.jupyter.explore import explore, explore_cell
from memexplore.jupyter.explorer import Explorer
from memexplore.jupyter.main_thread import MainThread
from memexplore.run import machine
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.cell import Cell
from memexplore.tape import Source
from tests.jupyter.explorer_actions import position, row, sentence, step, turn
from tests.programs import loops


@pytest.fixture
def shown() -> Explorer:
    return explore(step())


@pytest.fixture
def real() -> Explorer:
    return explore(step(), gpu="cpu")


def test_real_device_is_listed_first_and_named_in_the_sentence(real: Explorer) -> None:
    assert row(real, "gpu")["options"][0] == position(real, "gpu") == "this machine's CPU"
    assert sentence(real).startswith("As written · measured on")
    assert "· measured on this machine's CPU, " in sentence(real)
    assert real.run.tape.meta.source is Source.MEASURED


def test_real_device_measures_every_knob_and_predicts_another_gpu(real: Explorer) -> None:
    turn(real, "batch", "32")
    assert sentence(real).startswith("Batch of 32: peak ")
    assert "measured on this machine's CPU" in sentence(real)
    turn(real, "gpu", "T4 · 14.4 GiB")
    assert sentence(real).endswith("· predicted")
    assert real.run.tape.meta.gpu == "T4"
    turn(real, "gpu", "this machine's CPU")
    assert real.run.knobs == Knobs(batch=32)
    assert "measured on this machine's CPU" in sentence(real)


def test_knobs_without_meaning_on_a_cpu_are_hidden_with_a_reason(real: Explorer) -> None:
    reasons = {one["label"]: one["reason"] for one in real.message()["hidden"]}
    assert reasons["Settings"] == "a CPU has no caching allocator"
    search = real.message()["search"]
    assert search["state"] == "unavailable"
    assert "gpu= the name of a GPU" in search["text"]


def test_no_prefetch_on_a_real_device(real: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    turn(real, "batch", "32")
    monkeypatch.setattr(MainThread, "has_pending_events", lambda _: False)
    monkeypatch.setattr(real, "_run_step", lambda knobs: pytest.fail(f"{knobs} was run"))
    real._prefetch(real._shown)


def test_tabs_of_a_real_device_show_measured_memory(real: Explorer) -> None:
    turn(real, "batch", "32")
    figure = real.view._tabs[tabs.TRADE_OFFS]["figure"]
    points = next(trace for trace in figure["data"] if trace["name"] == "fits")
    assert list(points["y"]) == [curves.peak(real._results[knobs].tape, "reserved")[0] for knobs in real.history]
    assert figure["layout"]["yaxis"]["title"]["text"] == "needed memory, measured"
    assert [row["cells"][0] for row in real.view._tabs[tabs.HISTORY]["rows"]] == ["as written", "batch 32"]


def test_failing_setting_on_a_real_device_keeps_the_chart(real: Explorer) -> None:
    good = real.run
    turn(real, "frozen", "nowhere")
    assert "nowhere" in row(real, "frozen")["problem"]
    assert real.run is good


def test_default_gpu_is_that_of_the_default_machine(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(machine, "default_name", lambda: asked.append(1) or "A100 40GB")
    assert explore(step()).run.tape.meta.gpu == "A100 40GB"
    assert asked == [1]


CODE = """batch = 128
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
print("running")
model(torch.ones(batch, 64, device="cuda")).sum().backward()"""


def explored(cell: Cell, sliders: dict[str, list[Any]], gpu: str = "T4") -> Explorer:
    on = machine_of(gpu)
    return explore_cell(cell, cell.execute(Knobs(), on), sliders, on)


@pytest.fixture
def of_cell() -> Explorer:
    cell = Cell(CODE, {"torch": torch})
    return explored(cell, {"batch": [64, 128, 256]})


def test_slider_of_a_cell_changes_its_variable(of_cell: Explorer, capsys: pytest.CaptureFixture[str]) -> None:
    turn(of_cell, "variables batch", "256")
    assert of_cell.run.knobs == Knobs(variables={"batch": 256})
    assert sentence(of_cell).startswith("Batch = 256: peak ")
    turn(of_cell, "variables batch", "128")
    assert of_cell.run.knobs == Knobs()
    assert capsys.readouterr().out == ""


def test_knobs_unavailable_for_a_cell_are_hidden_with_a_reason(of_cell: Explorer) -> None:
    reasons = {label: one["reason"] for one in of_cell.message()["hidden"] for label in one["label"].split(", ")}
    assert {label: reasons[label] for label in ("Batch", "Optimizer", "LoRA", "LoRA rank")} == {
        "Batch": "the slider batch sets it",
        "Optimizer": "this cell makes no optimizer",
        "LoRA": "this cell makes no optimizer",
        "LoRA rank": "this cell makes no optimizer",
    }
    names = [knob["field"] for knob in of_cell.message()["knobs"]]
    assert names[:4] == ["variables batch", "inplace", "checkpoint", "precision"]
    assert not {"batch", "optimizer", "lora"} & set(names)
    assert of_cell.message()["search"]["state"] == "unavailable"


def test_batch_of_a_cell_that_trains_no_model_is_named_where_it_has_no_slider() -> None:
    cell = Cell("batch = 128\nx = torch.ones(batch, device='cuda')", {"torch": torch})
    reasons = {one["label"]: one["reason"] for one in explored(cell, {}).message()["hidden"]}
    assert reasons["Batch"] == "the cell sets batch = 128: add --slider batch=LOW:HIGH:STEP to change it"


def test_batch_and_optimizer_of_a_cell_that_makes_them() -> None:
    explorer = explored(Cell(loops.mlp(), {}), {})
    primary = [knob["field"] for knob in explorer.message()["knobs"] if knob["primary"]]
    assert primary == ["batch", "accumulation", "checkpoint", "precision", "optimizer", "gpu"]
    assert (position(explorer, "batch"), position(explorer, "optimizer")) == ("32", "AdamW (as written)")
    turn(explorer, "batch", "64")
    turn(explorer, "accumulation", "4")
    turn(explorer, "optimizer", "SGD")
    assert explorer.run.applied.texts == ("batch of 64", "accumulation over 4 micro-batches of 16", "SGD")
    turn(explorer, "update", "in backward")
    assert "this cell calls it itself" in row(explorer, "update")["problem"]
    assert explorer.run.knobs == Knobs(batch=64, accumulation=4, optimizer="SGD")


def test_variable_without_a_literal_shows_no_false_value() -> None:
    cell = Cell(CODE.replace("batch = 128", "batch = 2 * 64"), {"torch": torch})
    explorer = explored(cell, {"batch": [64, 256]})
    assert row(explorer, "variables batch")["options"] == ["as written", "64", "256"]
    assert position(explorer, "variables batch") == "as written"
    turn(explorer, "variables batch", "256")
    assert explorer.run.knobs == Knobs(variables={"batch": 256})


def test_cell_is_explored_on_the_cpu() -> None:
    code = CODE.replace(".cuda()", "").replace(', device="cuda"', "")
    cell = Cell(code, {"torch": torch})
    explorer = explored(cell, {"batch": [64, 128, 256]}, "cpu")
    turn(explorer, "variables batch", "256")
    assert sentence(explorer).startswith("Batch = 256: peak ")
    assert sentence(explorer).endswith("· measured on this machine's CPU")


def test_slider_of_an_unassigned_variable_raises() -> None:
    cell = Cell(CODE, {"torch": torch})
    with pytest.raises(ValueError, match="assigns no variable 'size'; it assigns batch, model"):
        explored(cell, {"size": [1]})
