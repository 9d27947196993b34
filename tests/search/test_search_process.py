"""Searches in a process of their own."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch
from torch import nn

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.search import search_process
from memexplore.run.search.advise import advise
from memexplore.run.search.search_process import Ended, Found, SearchProcess
from tests.threads import has_ended


def step() -> Step:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)), nn.Linear(64, 10))
    inputs = torch.zeros(64, 64), torch.zeros(64, dtype=torch.long)
    return Step(model, inputs, loss=nn.functional.cross_entropy, optimizer=torch.optim.AdamW)


def step_with_lock() -> Step:
    lock = threading.Lock()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with lock:
            return nn.functional.cross_entropy(output, target)

    given = step()
    return Step(given.model, given.batch, loss=loss, optimizer=torch.optim.AdamW)


def test_process_streams_advice_and_ends_with_that_of_advise() -> None:
    events: queue.Queue[Found | Ended] = queue.Queue()
    base = Knobs(batch=128)
    SearchProcess(step(), machine_of("24MiB"), events.put, base=base)
    seen = [events.get(timeout=200)]
    while not isinstance(seen[-1], Ended):
        seen.append(events.get(timeout=200))
    *found, end = seen
    assert isinstance(end, Ended)
    assert end.error is None
    assert end.advice is not None
    expected = advise(step(), "24MiB", base=base, progress=None)
    assert end.advice.base == base
    assert [option.knobs for option in end.advice.options] == [option.knobs for option in expected.options]
    # one report a run, and the advice grows from the first one on
    assert [one.progress.done for one in found if isinstance(one, Found)][:3] == [1, 2, 3]
    tried = [len(one.advice.tried) for one in found if one.advice is not None]
    assert tried == sorted(tried)
    assert tried[0] == 1


def test_process_searches_for_a_function_that_builds_the_model() -> None:
    events: queue.Queue[Found | Ended] = queue.Queue()
    built = Step(lambda: nn.Linear(64, 64), torch.zeros(64, 64), loss=torch.mean)
    SearchProcess(built, machine_of("T4"), events.put)
    end = events.get(timeout=200)
    while not isinstance(end, Ended):
        end = events.get(timeout=200)
    assert end.error is None
    assert end.advice is not None
    assert end.advice.fits
    assert not end.advice.errors


def test_stopped_process_ends_without_a_report() -> None:
    events: queue.Queue[Found | Ended] = queue.Queue()

    def slow(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(0.2)  # else all runs may have ended before this process is stopped
        return nn.functional.cross_entropy(output, target)

    given = step()
    slowed = Step(given.model, given.batch, loss=slow, optimizer=torch.optim.AdamW)
    search = SearchProcess(slowed, machine_of("T4"), events.put)
    first = events.get(timeout=200)
    assert isinstance(first, Found)
    ((process, _),) = search._workers._processes
    search.stop()
    has_ended(process)
    assert process.exitcode != 0
    time.sleep(0.1)
    assert not any(isinstance(event, Ended) for event in events.queue)


def test_step_that_cannot_be_sent_is_refused_before_a_process_starts() -> None:
    with pytest.raises(TypeError, match="cannot be sent to another process"):
        SearchProcess(step_with_lock(), machine_of("T4"), print)


def test_error_of_the_step_ends_the_search() -> None:
    wrong = Step(nn.Linear(8, 8), torch.zeros(4, 9), loss=torch.mean)
    events: queue.Queue[Found | Ended] = queue.Queue()
    SearchProcess(wrong, machine_of("T4"), events.put)
    end = events.get(timeout=200)
    while not isinstance(end, Ended):
        end = events.get(timeout=200)
    assert end.advice is None
    assert isinstance(end.error, RuntimeError)
    assert "same reduction dim" in str(end.error)


def test_advice_so_far_is_advice_about_the_runs_so_far() -> None:
    sizes: list[int] = []
    whole = advise(step(), "24MiB", budget=5, progress=None, found=lambda advice: sizes.append(len(advice.tried)))
    assert sizes[:5] == [1, 2, 3, 4, 5]
    assert whole.as_written.knobs == Knobs()


def test_prepared_process_does_the_next_search_and_only_that() -> None:
    search_process.prepare()
    prepared = search_process._prepared
    search_process.prepare()
    assert search_process._prepared is prepared
    events: queue.Queue[Found | Ended] = queue.Queue()
    first = SearchProcess(step(), machine_of("T4"), events.put)
    assert first._workers is prepared
    assert isinstance(events.get(timeout=200), Found)
    first.stop()
    second = SearchProcess(step(), machine_of("T4"), events.put)
    assert second._workers is not prepared
    second.stop()


def test_prepared_process_imports_installed_libraries_of_models() -> None:
    pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    names = search_process.installed_layers()
    assert "transformers.models.gpt2.modeling_gpt2" in names
    # Neither torch's own, nor those of this file.
    assert not [name for name in names if name.startswith(("torch.", "tests", "__main__"))]


def test_prepared_process_that_died_is_replaced() -> None:
    search_process.prepare()
    prepared = search_process._prepared
    assert prepared is not None
    ((process, _),) = prepared._processes
    process.kill()
    process.join()
    events: queue.Queue[Found | Ended] = queue.Queue()
    search = SearchProcess(step(), machine_of("T4"), events.put)
    assert search._workers is not prepared
    assert isinstance(events.get(timeout=200), Found)
    search.stop()


def test_no_process_waits_where_the_machine_has_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_process, "_prepared", None)
    monkeypatch.setattr(search_process, "available_system_memory", lambda: 1 << 30)
    search_process.prepare()
    assert search_process._prepared is None
