"""Ctrl-C in the middle of a request of memory is raised after it, and is never dropped."""

from __future__ import annotations

import gc
import signal
import threading
import time

import pytest
import torch

import memexplore as mx
from memexplore.allocator import Allocator
from memexplore.virtual_gpu.dispatch.runner import PlanRunner

MIB = 1 << 20


@pytest.fixture(autouse=True)
def python_handles_interrupts():
    """Set Python's handler: a shell ignores Ctrl-C in what it starts in the background, such as this test run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupt_in(monkeypatch):
    """A function that lets the signal of Ctrl-C come at the beginning of a method, once."""

    def set_up(name, kind=Allocator):
        method = getattr(kind, name)

        def interrupted(self, *arguments):
            monkeypatch.setattr(kind, name, method)
            signal.raise_signal(signal.SIGINT)
            return method(self, *arguments)

        monkeypatch.setattr(kind, name, interrupted)

    return set_up


def wait_for_the_interrupt():
    ends = time.monotonic() + 30
    while time.monotonic() < ends:
        time.sleep(0.001)


def test_an_interrupt_while_a_dead_tensor_is_freed_is_raised_and_the_block_is_free(interrupt_in):
    with mx.virtual("T4"):
        x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        interrupt_in("free")
        with pytest.raises(KeyboardInterrupt):
            del x
            wait_for_the_interrupt()
        assert torch.cuda.memory_allocated() == 0


@pytest.mark.parametrize(("name", "kind"), [("malloc", Allocator), ("_watch", PlanRunner)])
def test_an_interrupted_op_leaves_no_block_without_a_tensor(interrupt_in, name, kind):
    with mx.virtual("T4"):
        interrupt_in(name, kind)
        x = None
        with pytest.raises(KeyboardInterrupt):
            x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            wait_for_the_interrupt()
        gc.collect()
        # It is raised after the op, on a busy machine before `x` is assigned: the tensor is freed with the traceback.
        assert torch.cuda.memory_allocated() == (0 if x is None else MIB)


def test_an_interrupt_elsewhere_is_raised_at_once():
    with mx.virtual("T4"), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the program went on")


def test_the_handler_is_restored():
    before = signal.getsignal(signal.SIGINT)
    with mx.virtual("T4"):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def handler():
    """A function that sets a handler; the present one is restored."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda value: signal.signal(signal.SIGINT, value)
    signal.signal(signal.SIGINT, before)


def test_the_handler_of_the_program_is_called(handler, interrupt_in):
    received = []
    handler(lambda number, frame: received.append(number))
    with mx.virtual("T4"):
        x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
        interrupt_in("free")
        del x
        ends = time.monotonic() + 30
        while not received and time.monotonic() < ends:
            time.sleep(0.001)
    assert received == [signal.SIGINT]


def test_a_handler_that_the_program_sets_meanwhile_stays(handler):
    def mine(number, frame):
        pass

    with mx.virtual("T4"):
        handler(mine)
    assert signal.getsignal(signal.SIGINT) is mine


@pytest.mark.parametrize("value", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_of_the_system_is_left_alone(handler, value):
    handler(value)
    with mx.virtual("T4"):
        assert signal.getsignal(signal.SIGINT) is value


def test_a_virtual_gpu_in_another_thread_changes_no_handler():
    before, seen = signal.getsignal(signal.SIGINT), []

    def run():
        with mx.virtual("T4"):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]
