"""What would have fitted: the cell or the script that failed is run again in another process."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

import memexplore
from memexplore.out_of_memory import what_fits
from memexplore.out_of_memory.failed_program import FailedProgram, failed_cell, failed_script
from memexplore.out_of_memory.names_before import NamesBefore
from memexplore.out_of_memory.what_fits import WhatFits
from memexplore.recorder.recording import record
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.script import Script
from memexplore.run.search.process_settings import process_settings
from memexplore.run.search.search_process import Ended, Found
from memexplore.tape import Meta
from tests.threads import has_ended

MIB = 1 << 20
# 4 blocks keep 2 × 2048 × 1024 × 4 B = 16 MiB each, beside 16 MiB of weights and 16 MiB of gradients.
STEP = """
import torch
model = torch.nn.Sequential(
    *[torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(4)]
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(2048, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def meta_of(gpu: str) -> Meta:
    with memexplore.virtual(gpu), record() as recording:
        pass
    return recording.tape.meta


def cell_of(code: str, **names: Any) -> FailedProgram:
    cell = failed_cell(code, names, NamesBefore(names))
    assert isinstance(cell, FailedProgram), cell
    return cell


def searched(code: str, gpu: str, **names: Any) -> WhatFits:
    return what_fits.search(cell_of(code, **names), meta_of(gpu))


def test_settings_of_a_cell_are_run_and_their_lines_name_its_layers() -> None:
    names: dict[str, Any] = {}
    with memexplore.virtual("T4"):
        exec(STEP, names)
    # The names are those of after the run: the model is alive.
    found = searched(STEP, "128MiB", **names)
    assert not found.fits
    codes = {str(option.knobs): option.code for option in found.options}
    # The blocks are the model's own layers.
    assert "for block in model:" in codes["checkpoint every 1"]
    assert found.largest_batch is not None
    assert 0 < found.largest_batch < 2048
    assert f"A batch of {found.largest_batch} would fit." in found.text


def test_a_cell_that_fits_as_written_says_only_that() -> None:
    found = searched(STEP, "16GiB")
    assert found.advice is not None
    (sentence,) = found.sentences
    assert sentence.startswith("As written it fits by 15.")
    assert found.text == sentence
    assert [option.knobs for option in found.options] == [Knobs()]


def test_a_batch_that_cannot_change_has_no_largest_batch() -> None:
    # The inputs are a tensor of an earlier cell, whose samples the model mixes with a weight of that size.
    code = (
        "weight = torch.nn.Parameter(torch.ones(64, device='cuda'))\n"
        "model = torch.nn.Linear(1 << 18, 64, bias=False).cuda()\n"
        "(model(x).T * weight).sum().backward()"
    )
    found = searched(code, "128MiB", torch=torch, x=torch.ones(64, 1 << 18))
    assert not found.fits
    assert found.largest_batch is None
    assert "batch of" not in found.text


def test_weights_are_sent_as_shapes_and_a_watched_model_as_it_was() -> None:
    with memexplore.virtual("T4"):
        model = torch.nn.Linear(4096, 4096, bias=False).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        names = {"torch": torch, "model": model, "optimizer": optimizer}
        code = "model(torch.ones(2, 4096, device='cuda')).sum().backward()\noptimizer.step()"
        with memexplore.watch(model, optimizer):
            exec(code, names)
            program = cell_of(code, **names)
    assert len(program.packed) < MIB
    tape = pickle.loads(program.packed).execute(Knobs(), machine_of("T4")).tape
    # Weights, their gradients and Adam's two states, 4096 × 4096 × 4 B each
    assert tape.peak()[0] >= 4 * 64 * MIB


def raises() -> None:
    raise ValueError("not here")


class Unreadable:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return raises, ()


def test_a_program_that_raises_there_says_so_and_what_to_do() -> None:
    broken = cell_of("pass")._replace(packed=cloudpickle.dumps(Unreadable()))
    found = what_fits.search(broken, meta_of("64MiB"))
    assert found.failed == (
        "The cell cannot be run again: ValueError: not here. "
        "Search with mx.advise(mx.Step(model, batch, loss, optimizer))."
    )


def test_allocator_settings_are_those_of_the_failed_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.875")
    cell = cell_of("pass")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    found = what_fits.search(cell, meta_of("64MiB"))
    assert found.advice is not None
    # 7 / 8 of the 64 MiB
    assert found.advice.as_written.capacity == 56 * MIB


def test_a_script_is_run_again_with_its_arguments_and_knobs(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    arguments = "import sys\nassert sys.argv[1:] == ['now']\n"
    path.write_text(arguments + STEP)
    base, machine = Knobs(batch=1024), machine_of("88MiB")
    script = failed_script(Script(path, ("now",)), {}, base, machine, process_settings(), 1.0)
    found = what_fits.search(script, meta_of("88MiB"))
    assert found.advice is not None
    assert found.advice.sentences[0].startswith("With batch 1024 it needs ")
    assert "checkpoint" in {name for option in found.options for name in option.knobs.changed()}
    assert found.largest_batch is not None
    assert found.largest_batch < 1024


LOST = "class Lost:\n    def __del__(self): time.sleep(0.2)\nwhile True: Lost()"
"""The exception of a signal is raised in a callback, where Python prints and drops it."""
CAUGHT = "while True:\n    try: torch.zeros(8, device='cuda')\n    except BaseException: pass"
IGNORED = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nbegun.write_text('ignored')\nwhile True: pass"
"""As scripts do for which a scheduler's signal means to save a checkpoint."""


@pytest.mark.parametrize("loop", ["while True: torch.zeros(8, device='cuda')", LOST, CAUGHT, IGNORED])
def test_a_search_of_a_cell_that_does_not_end_is_stopped(tmp_path: Path, loop: str) -> None:
    begun = tmp_path / "begun.txt"
    cell = cell_of(f"import time, torch\nbegun.write_text('yes')\n{loop}", begun=begun)
    events: queue.SimpleQueue[Found | Ended] = queue.SimpleQueue()
    before = multiprocessing.active_children()
    search = what_fits.FailedProgramSearch(cell, meta_of("64MiB"), events.put)
    (process,) = [each for each in multiprocessing.active_children() if each not in before]
    while not begun.exists():
        assert process.is_alive()
        time.sleep(0.1)
    search.stop()
    has_ended(process)
    assert events.empty()
