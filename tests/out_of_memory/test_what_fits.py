"""What would have fitted: the search goes on where a step cannot be run in another process."""

from __future__ import annotations

import multiprocessing
import queue
import time
from pathlib import Path

import cloudpickle
import pytest
import torch

import memexplore
from memexplore.out_of_memory import failed_cell, failed_step, what_fits
from memexplore.out_of_memory.failed_step import FailedStep
from memexplore.recorder.recording import record
from memexplore.run.search.search_process import Ended, Found
from tests.threads import has_ended


def failed() -> FailedStep:
    """A step that runs out of memory."""
    with memexplore.virtual("64MiB"), record():
        model = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        try:
            model(torch.zeros(8192, 1024, device="cuda")).sum().backward()
        except torch.OutOfMemoryError as error:
            step = failed_step.failed_step(error, None, [optimizer])
    assert isinstance(step, FailedStep)
    return step


def raises() -> None:
    raise ValueError("not here")


class Unreadable:
    def __reduce__(self) -> tuple[object, tuple[()]]:
        return raises, ()


def first_event(step: FailedStep) -> tuple[Found | Ended, FailedStep]:
    """The first report of a search with advice, and the step that it is of."""
    with memexplore.virtual("64MiB"), record() as recording:
        pass
    events: queue.SimpleQueue[Found | Ended] = queue.SimpleQueue()
    search = what_fits.FailedStepSearch(step, recording.tape.meta, events.put)
    try:
        while isinstance(event := events.get(timeout=200), Found) and event.advice is None:
            pass
        return event, search.step
    finally:
        search.stop()


def test_a_step_that_cannot_be_run_is_replaced_by_the_next() -> None:
    known = failed()
    step = known.otherwise
    assert step is not None
    broken = known._replace(packed=cloudpickle.dumps(Unreadable()))
    event, searched = first_event(broken)
    assert isinstance(event, Found)
    assert searched is step
    found = what_fits.what_fits(searched, event.advice, None)
    assert (found.failed, found.assumed) == ("", (failed_step.LOSS,))


def test_allocator_settings_are_those_of_the_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.875")
    step = failed()
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    event, _ = first_event(step)
    assert event.advice is not None
    # 7 / 8 of the 64 MiB
    assert event.advice.as_written.capacity == 56 << 20


def test_the_error_of_the_last_step_is_reported() -> None:
    broken = failed()._replace(packed=cloudpickle.dumps(Unreadable()), otherwise=None)
    event, searched = first_event(broken)
    assert isinstance(event, Ended)
    assert what_fits.what_fits(searched, None, event.error).failed == "The search failed: ValueError: not here"


def test_a_part_that_fits_is_no_answer_for_the_step_that_failed() -> None:
    # Each output takes 2⁹ · 1024 · 4 B = 2 MiB: 32 of these are 64 MiB, and a step of one model needs one.
    with memexplore.virtual("64MiB"), record() as recording:
        seen = failed_step.SeenCall()
        assert recording.recorder is not None
        seen.follow(recording.recorder)
        first, second = (torch.nn.Linear(1024, 1024).cuda() for _ in range(2))
        x = torch.zeros(1 << 9, 1024, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as failure:
            [layer(x) for layer in [first, second] * 16]
    step = failed_step.failed_step(failure.value, seen, [])
    assert isinstance(step, FailedStep)
    assert (step.part, step.calls_others) == ("Linear", True)
    event, searched = first_event(step)
    assert isinstance(event, Ended)
    found = what_fits.what_fits(searched, event.advice, event.error)
    assert (found.options, found.assumed) == ((), ())
    assert found.failed.startswith("The step of the model Linear alone fits as written, with ")


def test_that_one_call_fits_is_said_where_a_loss_has_several() -> None:
    # As above: 32 outputs of 2 MiB of one model.
    with memexplore.virtual("64MiB"), record() as recording:
        seen = failed_step.SeenCall()
        assert recording.recorder is not None
        seen.follow(recording.recorder)
        model, x = torch.nn.Linear(1024, 1024).cuda(), torch.zeros(1 << 9, 1024, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as failure:
            [model(x) for _ in range(32)]
    step = failed_step.failed_step(failure.value, seen, [])
    assert isinstance(step, FailedStep)
    found = what_fits.search(step, recording.tape.meta)
    assert found.advice is not None
    assert found.advice.fits
    assert found.assumed[0].startswith("A step is one call of the model Linear, with nothing else in memory, and fits ")


LOST = "class Lost:\n    def __del__(self): time.sleep(0.2)\nwhile True: Lost()"
"""The exception of a signal is raised in a callback, where Python prints and drops it."""
CAUGHT = "while True:\n    try: torch.zeros(8, device='cuda')\n    except BaseException: pass"


@pytest.mark.parametrize("loop", ["while True: torch.zeros(8, device='cuda')", LOST, CAUGHT])
def test_a_search_of_a_cell_that_does_not_end_is_stopped(tmp_path: Path, loop: str) -> None:
    begun = tmp_path / "begun.txt"
    code = f"import time, torch\nbegun.write_text('yes')\n{loop}"
    cell = failed_cell.failed_cell(code, {"begun": begun}, [], "No step.")
    assert isinstance(cell, FailedStep)
    with memexplore.virtual("64MiB"), record() as recording:
        pass
    events: queue.SimpleQueue[Found | Ended] = queue.SimpleQueue()
    before = multiprocessing.active_children()
    search = what_fits.FailedStepSearch(cell, recording.tape.meta, events.put)
    (process,) = [each for each in multiprocessing.active_children() if each not in before]
    while not begun.exists():
        assert process.is_alive()
        time.sleep(0.1)
    search.stop()
    has_ended(process)
    assert events.empty()
