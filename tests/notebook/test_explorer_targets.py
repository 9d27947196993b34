"""The explorer on a real device, and the explorer of a notebook cell."""

from __future__ import annotations

import pytest
import torch

from memexplore import targets
from memexplore.analysis import curves
from memexplore.knobs.knobs import Knobs
from memexplore.notebook import tabs
from memexplore.notebook.explore import explore, explore_cell
from memexplore.notebook.explorer import Explorer
from memexplore.notebook.main_thread import MainThread
from memexplore.steps.cell import Cell
from memexplore.tape import Source
from tests.notebook.explorer_actions import position, row, sentence, step, turn


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
    assert real.trial.tape.meta.source is Source.MEASURED


def test_real_device_measures_every_knob_and_predicts_another_gpu(real: Explorer) -> None:
    turn(real, "batch", "32")
    assert sentence(real).startswith("Batch of 32: peak ")
    assert "measured on this machine's CPU" in sentence(real)
    turn(real, "gpu", "T4 · 14.4 GiB")
    assert sentence(real).endswith("· predicted")
    assert real.trial.tape.meta.gpu == "T4"
    turn(real, "gpu", "this machine's CPU")
    assert real.trial.knobs == Knobs(batch=32)
    assert "measured on this machine's CPU" in sentence(real)


SETTINGS = "Expandable segments, Split blocks up to, Round sizes up, per 2ⁿ, Collect garbage from"


def test_knobs_without_meaning_on_a_cpu_are_hidden_with_a_reason(real: Explorer) -> None:
    reasons = {one["label"]: one["reason"] for one in real.message()["hidden"]}
    assert reasons[SETTINGS] == "a CPU has no caching allocator"
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
    assert list(points["y"]) == [curves.peak(real._results[knobs].trial.tape, "reserved")[0] for knobs in real.history]
    assert figure["layout"]["yaxis"]["title"]["text"] == "peak reserved, measured"
    assert [row["cells"][0] for row in real.view._tabs[tabs.HISTORY]["rows"]] == ["as written", "batch 32"]


def test_failing_setting_on_a_real_device_keeps_the_chart(real: Explorer) -> None:
    good = real.trial
    turn(real, "frozen", "nowhere")
    assert "nowhere" in row(real, "frozen")["problem"]
    assert real.trial is good


def test_default_gpu_is_the_default_target(shown: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(targets, "default_target", lambda: asked.append(1) or "A100 40GB")
    assert explore(step()).trial.tape.meta.gpu == "A100 40GB"
    assert asked == [1]


CODE = """batch = 128
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).cuda()
print("running")
model(torch.ones(batch, 64, device="cuda")).sum().backward()"""


@pytest.fixture
def of_cell() -> Explorer:
    cell = Cell(CODE, {"torch": torch})
    return explore_cell(cell, cell.run(), {"batch": [64, 128, 256]})


def test_slider_of_a_cell_changes_its_variable(of_cell: Explorer, capsys: pytest.CaptureFixture[str]) -> None:
    turn(of_cell, "variables batch", "256")
    assert of_cell.trial.knobs == Knobs(variables={"batch": 256})
    assert sentence(of_cell).startswith("Batch = 256: peak ")
    turn(of_cell, "variables batch", "128")
    assert of_cell.trial.knobs == Knobs()
    assert capsys.readouterr().out == ""


def test_knobs_unavailable_for_a_cell_are_hidden_with_a_reason(of_cell: Explorer) -> None:
    reasons = {label: one["reason"] for one in of_cell.message()["hidden"] for label in one["label"].split(", ")}
    given = Cell(CODE, {}).unavailable_knobs()
    assert {label: reasons[label] for label in ("Batch", "Optimizer", "LoRA", "LoRA rank")} == {
        "Batch": given["batch"],
        "Optimizer": given["optimizer"],
        "LoRA": given["lora"],
        "LoRA rank": given["lora"],
    }
    names = [knob["field"] for knob in of_cell.message()["knobs"]]
    assert names[:4] == ["variables batch", "precision", "checkpoint", "inplace"]
    assert not {"batch", "optimizer", "lora"} & set(names)
    assert of_cell.message()["search"]["state"] == "unavailable"


def test_batch_of_a_cell_is_named_where_it_has_no_slider() -> None:
    cell = Cell(CODE, {"torch": torch})
    explorer = explore_cell(cell, cell.run(), {})
    reasons = {one["label"]: one["reason"] for one in explorer.message()["hidden"]}
    assert reasons["Batch"] == "the cell sets batch = 128: add --slider batch=LOW:HIGH:STEP to change it"


def test_variable_without_a_literal_shows_no_false_value() -> None:
    cell = Cell(CODE.replace("batch = 128", "batch = 2 * 64"), {"torch": torch})
    explorer = explore_cell(cell, cell.run(), {"batch": [64, 256]})
    assert row(explorer, "variables batch")["options"] == ["as written", "64", "256"]
    assert position(explorer, "variables batch") == "as written"
    turn(explorer, "variables batch", "256")
    assert explorer.trial.knobs == Knobs(variables={"batch": 256})


def test_cell_is_explored_on_the_cpu() -> None:
    code = CODE.replace(".cuda()", "").replace(', device="cuda"', "")
    cell = Cell(code, {"torch": torch})
    explorer = explore_cell(cell, cell.run(gpu="cpu"), {"batch": [64, 128, 256]}, "cpu")
    turn(explorer, "variables batch", "256")
    assert sentence(explorer).startswith("Batch = 256: peak ")
    assert sentence(explorer).endswith("· measured on this machine's CPU")


def test_slider_of_an_unassigned_variable_raises() -> None:
    cell = Cell(CODE, {"torch": torch})
    with pytest.raises(ValueError, match="assigns no variable 'size'; it assigns batch, model"):
        explore_cell(cell, cell.run(), {"size": [1]})
