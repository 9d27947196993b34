"""Worker processes: how they start, answer and end."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from typing import Any, NamedTuple

import pytest

from memexplore.run.programs.packing import unpacked
from memexplore.run.search import workers
from memexplore.run.search.process_settings import process_settings
from memexplore.run.search.workers import NICENESS, Workers

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")


class Answer(NamedTuple):
    process: int
    parent: int
    niceness: int
    program: Any
    request: Any


def answer(program: Any, request: Any) -> Generator[Answer, None, None]:
    for number in range(2):
        yield Answer(os.getpid(), os.getppid(), os.nice(0), unpacked(program), (request, number))


def started(count: int, answer: workers.Answer = answer) -> Workers:
    new = Workers(answer)
    new.start(count)
    new.give(pickle.dumps("program"), process_settings())
    for worker in new.all:
        worker.wait_until_ready()
        worker.send("request")
    return new


def test_a_request_has_any_number_of_answers() -> None:
    with contextlib.closing(started(1)) as one:
        (worker,) = one.all
        first, second = worker.receive(), worker.receive()
        assert (first.program, first.request, second.request) == ("program", ("request", 0), ("request", 1))
        # It gives way to what started it, and is a process of its own.
        assert first.niceness == min(os.nice(0) + NICENESS, 19)
        assert first.parent == os.getpid()


@ON_LINUX
@pytest.mark.parametrize("name", ["T4", workers.CUDA])
def test_workers_are_forks_of_one_process_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(workers, "default_name", lambda: name)
    with contextlib.closing(started(2)) as two:
        first, second = (worker.receive() for worker in two.all)
    assert first.process != second.process
    assert first.parent == second.parent
    assert (first.parent == os.getpid()) == (name == workers.CUDA)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def have_ended(*processes: int) -> bool:
    end = time.monotonic() + 60
    while any(map(is_running, processes)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(is_running, processes))


def answer_for_ever(program: Any, request: Any) -> Generator[Answer, None, None]:
    yield from answer(program, request)
    while True:
        time.sleep(1)


@ON_LINUX
def test_forks_that_are_at_work_end_with_the_process_that_forked_them() -> None:
    with contextlib.closing(started(2, answer_for_ever)) as two:
        answers = [worker.receive() for worker in two.all]
        os.kill(answers[0].parent, signal.SIGKILL)
        assert have_ended(*(answer.process for answer in answers))


class Library:
    """A library whose destructor does not end, as one in C++ may wait for a thread that has ended."""

    def __init__(self) -> None:
        self.wait = threading.Event().wait

    def __del__(self) -> None:
        self.wait()


def load_library() -> None:
    sys.modules["a library"] = Library()  # type: ignore[assignment]


def test_a_worker_ends_without_the_destructors_of_its_libraries() -> None:
    one = Workers(answer)
    one.start(before=load_library)
    one.give(pickle.dumps("program"), process_settings())
    one.all[0].wait_until_ready()
    one.stop()
    one.join()
    assert not one.are_alive
    one.close()


ASKED_TWICE = """
import functools, multiprocessing, time
from memexplore.run.search import workers

for round in range(60):
    # Its program has not come yet.
    arguments = [None], None, workers.NICENESS, functools.partial(time.sleep, 60)
    process = multiprocessing.get_context("fork").Process(target=workers._main, args=arguments)
    process.start()
    time.sleep(0.05)
    process.terminate()
    second = time.perf_counter() + 5e-6 * round
    while time.perf_counter() < second:
        pass
    process.terminate()
    process.join(20)
    if process.is_alive():
        process.kill()
        raise SystemExit(f"does not end where it is asked again after {5 * round} microseconds")
"""


@ON_LINUX
def test_a_worker_ends_that_is_asked_to_twice() -> None:
    # As where the program that started it ends beside the thread that waits for its answers.
    assert subprocess.run([sys.executable, "-c", ASKED_TWICE], timeout=240).returncode == 0


@ON_LINUX
@pytest.mark.parametrize("end", ["close", "kill"])
def test_forks_end_with_the_process_that_forked_them(end: str) -> None:
    two = started(2)
    first, second = (worker.receive() for worker in two.all)
    if end == "kill":
        os.kill(first.parent, signal.SIGKILL)
    two.close()
    two.close()
    assert have_ended(first.process, second.process)


PARENT = """
import time
from tests.search.test_workers import started
print(*(worker.receive().process for worker in started(2).all), flush=True)
time.sleep(600)
"""


@ON_LINUX
def test_workers_end_when_the_process_that_started_them_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        first, second = map(int, parent.stdout.readline().split())
        parent.kill()
    assert have_ended(first, second)


def test_a_worker_that_has_died_raises_where_it_is_used() -> None:
    with contextlib.closing(started(1)) as one:
        (worker,) = one.all
        worker.receive()
        os.kill(worker.receive().process, signal.SIGKILL)
        with pytest.raises((EOFError, OSError)):
            worker.receive()
    assert not one.all
