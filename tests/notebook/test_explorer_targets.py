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
from tests.notebook.explorer_actions import control, headline, step, turn


@pytest.fixture
def shown() -> Explorer:
    return explore(step())


@pytest.fixture
def real() -> Explorer:
    return explore(step(), gpu="cpu")


def test_real_device_is_listed_first_and_named_in_the_headline(real: Explorer) -> None:
    options = control(real, "gpu").widget.options
    assert options[0] == ("this machine's CPU", "cpu")
    assert headline(real).startswith("As written · measured on")
    assert "· measured on this machine's CPU, " in headline(real)
    assert real.trial.tape.meta.source is Source.MEASURED


def test_real_device_measures_every_knob_and_predicts_another_gpu(real: Explorer) -> None:
    turn(real, "batch", 32)
    assert headline(real).startswith("Batch of 32: peak ")
    assert "measured on this machine's CPU" in headline(real)
    turn(real, "gpu", "T4")
    assert headline(real).endswith("· predicted")
    assert real.trial.tape.meta.gpu == "T4"
    turn(real, "gpu", "cpu")
    assert real.trial.knobs == Knobs(batch=32)
    assert "measured on this machine's CPU" in headline(real)


def test_knobs_without_meaning_on_a_cpu_are_disabled_with_a_reason(real: Explorer) -> None:
    for number in range(4):
        widget = control(real, "settings", number).widget
        assert (widget.disabled, widget.tooltip) == (True, "a CPU has no caching allocator")
    assert real._advise_button.disabled
    assert "gpu= the name of a GPU" in real._advise_button.tooltip


def test_no_prefetch_on_a_real_device(real: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    turn(real, "batch", 32)
    monkeypatch.setattr(MainThread, "has_pending_events", lambda _: False)
    monkeypatch.setattr(real, "_run_step", lambda knobs: pytest.fail(f"{knobs} was run"))
    real._prefetch(real._shown)


def test_tabs_of_a_real_device_show_measured_memory(real: Explorer) -> None:
    turn(real, "batch", 32)
    figure = real.view._tabs[tabs.TRADE_OFFS]["figure"]
    points = next(trace for trace in figure["data"] if trace["name"] == "fits")
    assert list(points["y"]) == [curves.peak(real._results[knobs].trial.tape, "reserved")[0] for knobs in real.history]
    assert figure["layout"]["yaxis"]["title"]["text"] == "peak reserved, measured"
    assert [row["cells"][0] for row in real.view._tabs[tabs.HISTORY]["rows"]] == ["as written", "batch 32"]


def test_failing_setting_on_a_real_device_keeps_the_chart(real: Explorer) -> None:
    good = real.trial
    turn(real, "frozen", "nowhere")
    assert "nowhere" in headline(real)
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
    turn(of_cell, "variables", 256)
    assert of_cell.trial.knobs == Knobs(variables={"batch": 256})
    assert headline(of_cell).startswith("Batch = 256: peak ")
    turn(of_cell, "variables", 128)
    assert of_cell.trial.knobs == Knobs()
    assert capsys.readouterr().out == ""


def test_knobs_unavailable_for_a_cell_are_disabled_with_a_reason(of_cell: Explorer) -> None:
    for field in ("batch", "optimizer", "lora"):
        widget = control(of_cell, field).widget
        assert widget.disabled
        assert widget.tooltip == Cell(CODE, {}).unavailable_knobs()[field]
    assert of_cell._advise_button.disabled
    assert not control(of_cell, "precision").widget.disabled


def test_cell_is_explored_on_the_cpu() -> None:
    code = CODE.replace(".cuda()", "").replace(', device="cuda"', "")
    cell = Cell(code, {"torch": torch})
    explorer = explore_cell(cell, cell.run(gpu="cpu"), {"batch": [64, 128, 256]}, "cpu")
    turn(explorer, "variables", 256)
    assert headline(explorer).startswith("Batch = 256: peak ")
    assert headline(explorer).endswith("· measured on this machine's CPU")


def test_slider_of_an_unassigned_variable_raises() -> None:
    cell = Cell(CODE, {"torch": torch})
    with pytest.raises(ValueError, match="assigns no variable 'size'; it assigns batch, model"):
        explore_cell(cell, cell.run(), {"size": [1]})
