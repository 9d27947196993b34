"""A watched loop in a notebook that was given no step: its settings are predicted by running its cell."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from IPython.core.display_functions import DisplayHandle

from memexplore.jupyter import live_page
from memexplore.run.knobs.knobs import Knobs
from memexplore.text import ipython_shell
from tests.jupyter.magics_shell import Shell

MODEL = """
from torch import nn
import memexplore as mx
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
scale = 1.0
def step():
    (scale * model(torch.ones(1000, 256, device="cuda"))).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""
WATCHED = """
with mx.watch(model, optimizer) as live:
    for _ in range(4):
        step()
    found = live.predict(mx.Knobs({knobs}), 200)
"""


@pytest.fixture
def notebook(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A notebook with a model on a virtual GPU."""
    monkeypatch.setattr(ipython_shell, "is_notebook", lambda: True)
    monkeypatch.setattr(live_page, "display", lambda *values, **options: DisplayHandle())
    shell.run("%memgpu T4").raise_error()
    shell.run(MODEL).raise_error()
    return shell


def found(notebook: Shell, cell: str) -> Any:
    notebook.run(cell).raise_error()
    return notebook.shell.user_ns["found"]


def test_a_setting_is_predicted_by_the_cell(notebook: Shell) -> None:
    prediction = found(notebook, WATCHED.format(knobs="checkpoint='every 1'"))
    assert prediction.failed == ""
    assert prediction.unchanged_peak == prediction.measured_peak
    assert prediction.peak_allocated < prediction.unchanged_peak
    assert prediction.refusal() == ""
    (assumed,) = prediction.assumed
    assert assumed.startswith("The cell was run again")


def test_a_number_that_the_cell_has_changed_is_as_it_was_before(notebook: Shell) -> None:
    prediction = found(notebook, f"scale = scale / 2{WATCHED.format(knobs='')}")
    assert prediction.failed == ""
    assert prediction.unchanged_peak == prediction.measured_peak


def test_a_cell_that_has_dropped_what_it_read_is_not_run(notebook: Shell) -> None:
    notebook.run("parts = [1]").raise_error()
    prediction = found(notebook, f"parts = [*parts, 2]{WATCHED.format(knobs='')}")
    assert "step=mx.Step(...)" in prediction.failed
    assert "parts has the value" in prediction.failed


def test_what_the_loop_itself_follows_needs_a_step(notebook: Shell) -> None:
    prediction = found(notebook, WATCHED.format(knobs="accumulation=2"))
    assert prediction.failed == "The step of this run is not known: give mx.watch(..., step=mx.Step(...))."


def test_a_knob_that_is_turned_while_an_endless_cell_trains_takes_effect(notebook: Shell, tmp_path: Path) -> None:
    done = tmp_path / "done"
    loop = f"""
import os, time
with mx.watch(model, optimizer) as live:
    while not os.path.exists({str(done)!r}):
        step()
        time.sleep(0.01)
"""

    def turn() -> None:
        names, ends = notebook.shell.user_ns, time.monotonic() + 200
        while time.monotonic() < ends and ("live" not in names or len(names["live"].steps()) < 3):
            time.sleep(0.1)
        live = names["live"]
        live.knobs = Knobs(checkpoint="every 1")
        while time.monotonic() < ends and live.requested[-1].state == "predicting":
            time.sleep(0.1)
        time.sleep(1)
        done.touch()

    thread = threading.Thread(target=turn)
    thread.start()
    notebook.run(loop).raise_error()
    thread.join()
    changes = notebook.shell.user_ns["live"].changes()
    assert changes["state"].tolist() == ["applied"]
    assert changes["predicted_peak"].tolist() == changes["measured_peak"].tolist()
