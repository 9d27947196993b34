"""Processes that run settings of a step: which setting each gets, and how they start and end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections import deque

import cloudpickle
import pytest
import torch
from torch import nn

from memexplore.codegen.lines import lines
from memexplore.knobs.knobs import Knobs
from memexplore.search import executors, workers
from memexplore.search import lanes as processes
from memexplore.search.lanes import Lane, Lanes, next_for
from memexplore.search.sweep import sweep
from memexplore.search.workers import Done
from memexplore.steps.outcome import run_outcome
from memexplore.steps.step import Step
from memexplore.virtual_gpu.dispatch import autograd_engine
from tests.search.sweep_steps import same, step

EXPANDABLE = "expandable_segments:True"
SQRT, BF16 = Knobs(checkpoint="sqrt"), Knobs(precision="bf16")


def lane(*ran: Knobs) -> Lane:
    """A process that has run some settings."""
    mine, _ = multiprocessing.Pipe()
    found = Lane(mine, is_ready=True)
    for knobs in ran:
        found.send(knobs, b"")
    return found


def test_a_setting_of_the_allocator_goes_where_its_trace_is():
    first, second = lane(SQRT), lane(BF16)
    waiting = deque([SQRT.replace(settings=EXPANDABLE), BF16.replace(settings=EXPANDABLE)])
    assert next_for(second, waiting, [first, second]) == BF16.replace(settings=EXPANDABLE)
    # The other one waits for the process that has its trace.
    assert next_for(second, waiting, [first, second]) is None
    assert next_for(first, waiting, [first, second]) == SQRT.replace(settings=EXPANDABLE)


def test_another_batch_goes_where_its_code_ran_and_elsewhere_only_if_nothing_else_waits():
    first, second = lane(SQRT), lane(BF16)
    waiting = deque([SQRT.replace(batch=4), Knobs(accumulation=2), BF16.replace(batch=4)])
    order = [next_for(second, waiting, [first, second]) for _ in range(3)]
    assert order == [BF16.replace(batch=4), Knobs(accumulation=2), SQRT.replace(batch=4)]


def results(given: Step, settings: list[Knobs]) -> list[object]:
    """Results of one process for one setting after another."""
    known = workers.process_settings(None)
    opened = Lanes(given, 1, known)
    try:
        (only,) = opened.lanes
        assert only.receive() is None
        found = []
        for knobs in settings:
            only.send(knobs, cloudpickle.dumps((knobs, "T4", run_outcome, known, workers.this_thread())))
            found.append(pickle.loads(only.receive() or b""))
        return found
    finally:
        opened.close()


def test_runs_in_a_process_give_the_tapes_of_runs_here():
    settings = [Knobs(), Knobs(batch=4)]
    for knobs, result in zip(settings, results(step(), settings), strict=True):
        assert isinstance(result, Done)
        trial, outcome = run_outcome(step(), knobs, gpu="T4")
        assert same(result.trial.tape, trial.tape)
        assert result.outcome == outcome


def test_without_forks_every_process_is_a_fresh_one(monkeypatch):
    # As on a machine with a real GPU.
    monkeypatch.setattr(processes.targets, "default_target", lambda: processes.targets.CUDA)
    opened = Lanes(step(), 2, workers.process_settings(None))
    try:
        assert len(opened._processes) == len(opened.lanes) == 2
        assert [one.receive() for one in opened.lanes] == [None, None]
    finally:
        opened.close()


def test_an_error_of_the_function_that_builds_the_model_is_that_of_each_setting():
    home = os.getpid()

    def build():
        if os.getpid() != home:
            raise RuntimeError("no model here")
        return nn.Linear(4, 4)

    found = results(Step(build, torch.zeros(2, 4), loss=torch.mean), [Knobs(), Knobs(batch=1)])
    assert ["no model here" in str(one.error) for one in found] == [True, True]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
@pytest.mark.parametrize("end", ["close", "kill"])
def test_forked_processes_end_with_the_process_that_forked_them(end):
    def loss(output):
        raise RuntimeError(str(os.getpid()))

    known = workers.process_settings(None)
    opened = Lanes(Step(nn.Linear(4, 4), torch.zeros(2, 4), loss=loss), 2, known)
    pids = []
    for one in opened.lanes:
        one.receive()
        one.send(Knobs(), cloudpickle.dumps((Knobs(), "T4", run_outcome, known, workers.this_thread())))
        pids.append(int(str(pickle.loads(one.receive() or b"").error)))
    assert len({*pids, os.getpid()}) == 3
    if end == "kill":
        (process,) = opened._processes
        os.kill(process.pid or 0, signal.SIGKILL)
    opened.close()
    for _ in range(600):
        if not any(map(is_running, pids)):
            return
        time.sleep(0.1)
    pytest.fail("a process was left behind")


@pytest.mark.skipif(not processes.can_fork(), reason="no forks")
def test_forks_share_the_model_that_was_built_before():
    # In a fresh process, as this one may have run a backward pass, after which torch refuses one in a fork.
    process = workers.new_process(_fork_and_run, (queue := multiprocessing.get_context("spawn").Queue(),))
    process.start()
    built, error = queue.get(timeout=200)
    process.join()
    assert built == process.pid
    assert error == ""


def _fork_and_run(queue):
    processes.fork_here()
    builders = []

    def build():
        builders.append(os.getpid())
        return nn.Linear(64, 64)

    given = Step(build, torch.zeros(8, 64), loss=torch.mean)
    (result,) = results(given, [Knobs()])
    queue.put((builders[0], "" if isinstance(result, Done) and len(builders) == 1 else str(result)))


def test_in_place_sites_come_back_with_the_run_that_found_them():
    layers = [layer for _ in range(2) for layer in (nn.Linear(256, 256), nn.ReLU())]
    given = Step(nn.Sequential(*layers), torch.zeros(8, 256), loss=torch.mean)
    plain, inplace = results(given, [Knobs(), Knobs(inplace="on")])
    assert plain.sites is None
    assert lines(given, Knobs(inplace="on"), inplace.sites) != lines(given, Knobs(inplace="on"))
    run_outcome(given, Knobs(inplace="on"), gpu="T4")
    assert lines(given, Knobs(inplace="on"), inplace.sites) == lines(given, Knobs(inplace="on"))


def test_settings_run_here_where_torch_refuses_a_backward_pass_in_forked_processes(monkeypatch):
    monkeypatch.setattr(processes, "_forks_here", processes.can_fork())
    monkeypatch.setattr(executors, "_START", -1.0)
    monkeypatch.setattr(workers, "processor_count", lambda: 2)

    def refused():
        raise RuntimeError("Unable to handle autograd's threading")

    before = autograd_engine.sole_owner_counts()
    monkeypatch.setattr(autograd_engine, "sole_owner_counts", lambda: before if os.getpid() == home else refused())
    home = os.getpid()
    done = sweep(step(), [Knobs(batch=2), Knobs(batch=4)], gpu="T4", progress=None)
    assert list(done) == [Knobs(batch=2), Knobs(batch=4)]
    assert not done.errors
