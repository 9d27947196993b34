"""Threads: code in every thread runs on the virtual GPU, also in threads from before it was turned on."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.tape import Action
from memexplore.torch_internals.dispatch import FakeTensorMode
from memexplore.torch_internals.state import dispatch_mode_stack, push_dispatch_mode
from memexplore.virtual_gpu.dispatch import runner
from tests.threads import in_thread

USES: dict[str, Callable[[], Any]] = {
    "a factory": lambda: torch.zeros(3, device="cuda"),
    "a factory with an index": lambda: torch.zeros(3, device="cuda:0"),
    "torch.tensor": lambda: torch.tensor([1.0], device="cuda"),
    "Tensor.cuda": lambda: torch.zeros(3).cuda(),
    "Tensor.to": lambda: torch.zeros(3).to("cuda"),
    "Tensor.to a number": lambda: torch.zeros(3).to(0),
    "Tensor.type": lambda: torch.zeros(3).type("torch.cuda.HalfTensor"),
    "Tensor.type of a class": lambda: torch.zeros(3).type(torch.cuda.HalfTensor),
    "Tensor.pin_memory": lambda: torch.zeros(3).pin_memory().cuda(),
    "Module.cuda": lambda: nn.Linear(2, 2).cuda().weight,
    "Module.to": lambda: nn.Linear(2, 2).to("cuda").weight,
    "torch.cuda.FloatTensor": lambda: torch.cuda.FloatTensor([1.0]),
}
WORKSPACE = 2 * 4 * 1024**2 + 8 * 16 * 1024
"""Bytes of a cuBLAS workspace."""


class _Worker:
    """A thread that runs functions from a queue, without a thread pool."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[Any] = queue.Queue()
        self._results: queue.Queue[Any] = queue.Queue()
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()
        self(int)

    def _loop(self) -> None:
        while (function := self._tasks.get()) is not None:
            try:
                self._results.put(function())
            except BaseException as error:
                self._results.put(error)
            del function

    def __call__(self, function: Callable[[], Any] | None) -> Any:
        self._tasks.put(function)
        if function is None:
            return self.thread.join()
        result = self._results.get()
        # Until it waits again, when it has no modes: the virtual GPU may be turned off next.
        while True:
            with self._tasks.mutex:
                if self._tasks.not_empty._waiters:  # type: ignore[attr-defined]
                    return result
            time.sleep(0.001)


@pytest.fixture
def pool() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """A thread pool whose thread runs since before the virtual GPU is on."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        yield lambda function: executor.submit(function).result()


@pytest.fixture
def worker() -> Iterator[_Worker]:
    """A thread that waits for a queue since before the virtual GPU is on."""
    worker = _Worker()
    yield worker
    worker(None)


def _modes() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())


@pytest.mark.parametrize("name", USES)
def test_cuda_in_any_thread_is_the_virtual_gpu(name, pool, worker):
    with mx.virtual("T4"):
        for run in (in_thread, pool, worker):
            result = run(USES[name])
            assert isinstance(result, torch.Tensor), result
            assert result.device == torch.device("cuda:0")
            # One block of 512 bytes; the thread of a worker drops its result before the next task.
            assert torch.cuda.memory_allocated() in (512, 1024)
            del result


def test_a_thread_with_the_number_of_an_ended_one_is_on_the_virtual_gpu():
    worker = _Worker()
    with mx.virtual("T4"):
        worker(None)
        number, result = in_thread(lambda: (threading.get_ident(), USES["a factory"]()))
        if number != worker.thread.ident:
            pytest.skip("the system gave the new thread another number")
        assert result.is_cuda


def test_asyncio_runs_a_function_of_a_thread_on_the_virtual_gpu():
    with mx.virtual("T4"):
        assert asyncio.run(asyncio.to_thread(USES["a factory"])).is_cuda


def test_a_thread_that_python_does_not_know_runs_ops_on_virtual_tensors():
    import _thread

    results: list[torch.Tensor] = []
    done = threading.Lock()
    with mx.virtual("T4"):
        x = torch.ones(100, 1000, device="cuda")
        done.acquire()

        def multiply() -> None:
            results.append((x * 2).detach())
            done.release()

        _thread.start_new_thread(multiply, ())
        assert done.acquire(timeout=60)
        assert results[0].is_cuda
        # Twice 100 x 1000 numbers of 4 bytes, in blocks of 512 bytes: 2 x 782 x 512
        assert torch.cuda.memory_allocated() == 800_768


NAMES_CUDA = """
import threading, _thread
import memexplore as mx
import torch

go, done = threading.Lock(), threading.Lock()
go.acquire(), done.acquire()

def use() -> None:
    for _ in range(2):
        go.acquire()
        try:
            torch.zeros(3, device="cuda")
        except Exception as error:
            print(type(error).__name__, str(error).replace(threading.current_thread().name, "NAME"), sep=": ")
        done.release()

_thread.start_new_thread(use, ())
for _ in range(2):
    with mx.virtual("T4"):
        go.release()
        done.acquire()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a thread from before the virtual GPU still finds the real one")
def test_cuda_in_an_earlier_thread_that_waits_for_a_lock_raises_a_clear_error():
    # In a process of its own: C++ calls `_lazy_init` until it returns once.
    output = subprocess.run([sys.executable, "-c", NAMES_CUDA], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == 2 * [
        "NotSimulated: the thread NAME was started before the virtual Tesla T4 was turned on, and uses cuda: "
        "start the thread afterwards"
    ]


def test_threads_have_no_modes_after_the_virtual_gpu(pool, worker):
    with mx.virtual("T4"):
        assert pool(_modes) == worker(_modes) == (1, 1)
    assert pool(_modes) == worker(_modes) == (0, 0)


def test_the_virtual_gpu_of_a_new_thread_leaves_the_thread_that_starts_it_unchanged():
    on, read = threading.Event(), threading.Event()

    def run() -> None:
        with mx.virtual("T4"):
            on.set()
            read.wait()

    class Late(threading.Event):
        """Set when the virtual GPU is on, as on a busy machine, where the starting thread wakes late."""

        def set(self) -> None:
            threading.Thread(target=lambda: on.wait() and super(Late, self).set()).start()

    thread = threading.Thread(target=run)
    thread._started = Late()
    thread.start()
    modes = _modes()
    read.set()
    thread.join()
    assert modes == _modes() == (0, 0)


def test_a_thread_that_keeps_modes_after_the_virtual_gpu_can_use_fake_tensors():
    def modes_that_are_off() -> Any:
        with mx.virtual("T4"):
            return dispatch_mode_stack()

    def run() -> Any:
        (mode,) = in_thread(modes_that_are_off)
        push_dispatch_mode(mode)
        with FakeTensorMode() as fake:
            x = fake.from_tensor(torch.arange(6).view(3, 2))
            return x[torch.tensor([0, 1])].shape, x.device

    assert in_thread(run) == ((2, 2), torch.device("cpu"))


def test_a_mode_of_the_user_stays_above_those_of_the_virtual_gpu(worker):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    mode = Mode()
    worker(mode.__enter__)
    with mx.virtual("T4"):
        assert worker(lambda: torch.overrides._get_current_function_mode_stack()[-1] is mode)
        assert worker(USES["a factory"]).is_cuda
        worker(lambda: mode.__exit__(None, None, None))
        assert worker(USES["a factory"]).is_cuda
    assert worker(_modes) == (0, 0)


def test_a_thread_that_outlives_the_virtual_gpu_runs_on():
    go, ended = threading.Event(), threading.Event()
    results: list[Any] = []

    def run() -> None:
        x = torch.ones(3, device="cuda")
        go.set()
        ended.wait()
        results.append(torch.ones(3).sum().item())
        for use in (lambda: x + 1, lambda: torch.ones(3, device="meta") * 2):
            try:
                results.append(use())
            except RuntimeError as error:
                results.append(str(error))

    with mx.virtual("T4"):
        thread = threading.Thread(target=run)
        thread.start()
        go.wait()
    ended.set()
    thread.join()
    assert results[0] == 3
    assert results[1].startswith("this tensor was made on a virtual GPU, which is off now")
    assert type(results[2]) is torch.Tensor


def test_a_thread_that_outlives_a_virtual_gpu_is_on_the_next():
    worker: list[_Worker] = []
    with mx.virtual("T4"):
        worker.append(_Worker())
    with mx.virtual("A100"):
        assert worker[0](lambda: torch.cuda.get_device_name()) == "NVIDIA A100-SXM4-40GB"
        assert worker[0](USES["a factory"]).is_cuda
        assert worker[0](_modes) == (1, 1)
    worker[0](None)


def test_functions_of_torch_cuda_work_in_every_thread(pool, worker):
    with mx.virtual("T4"):
        kept = torch.zeros(1000, 1000, device="cuda")
        for run in (in_thread, pool, worker):
            # 1000 x 1000 numbers of 4 bytes, in blocks of 512 bytes: 7813 x 512
            assert run(torch.cuda.memory_allocated) == 4_000_256
            assert run(torch.cuda.is_available)
        assert kept.is_cuda


def test_work_on_the_cpu_runs_in_every_thread(pool):
    with mx.virtual("T4"):
        assert in_thread(lambda: torch.ones(3).sum().item()) == 3
        assert pool(lambda: torch.ones(3).to(torch.float64).sum().item()) == 3


def test_the_default_device_of_a_thread_is_not_that_of_another():
    with mx.virtual("T4"):
        torch.set_default_device("cuda")
        assert torch.ones(3).is_cuda
        # torch.set_default_device sets the default of its own thread.
        assert not in_thread(lambda: torch.ones(3)).is_cuda


def test_a_thread_subclass_with_its_own_run_is_on_the_virtual_gpu():
    results: list[torch.Tensor] = []

    class Loader(threading.Thread):
        def run(self) -> None:
            results.append(torch.zeros(3, device="cuda"))

    with mx.virtual("T4"):
        thread = Loader()
        thread.start()
        thread.join()
        assert results[0].is_cuda


def test_a_run_function_of_a_thread_object_stays_its_own():
    results: list[float] = []
    thread = threading.Thread()
    thread.run = run = lambda: results.append(torch.ones(3).sum().item())  # type: ignore[method-assign]
    with mx.virtual("T4"):
        thread.start()
        thread.join()
    assert results == [3.0]
    assert thread.run is run


def test_a_second_start_of_a_thread_leaves_it_unchanged():
    with mx.virtual("T4"):
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="threads can only be started once"):
            thread.start()
    assert "run" not in vars(thread)


def test_a_loader_that_pins_memory_in_a_thread_works():
    dataset = torch.utils.data.TensorDataset(torch.ones(4, 2))
    with mx.virtual("T4"):
        loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1, pin_memory=True)
        assert [batch.cuda().shape for (batch,) in loader] == [(2, 2), (2, 2)]


# Many threads at once.


def test_concurrent_threads_leave_no_memory_behind():
    def work() -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64)).cuda()
        for step in range(20):
            model(torch.ones(step + 2, 64, device="cuda")).sum().backward()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with mx.virtual("T4", release="2.13"), mx.record() as recording:
            with concurrent.futures.ThreadPoolExecutor(4) as executor:
                for future in [executor.submit(work) for _ in range(8)]:
                    future.result()
            gc.collect()
            used = torch.cuda.memory_allocated()
    finally:
        sys.setswitchinterval(before)
    # A workspace for each thread that multiplied, and one for the autograd thread.
    assert used % WORKSPACE == 0
    assert 2 <= used // WORKSPACE <= 5
    tape = recording.tape
    allocs, frees = (int((tape.action == action).sum()) for action in (Action.ALLOC, Action.FREE_REQUESTED))
    assert allocs - frees == used // WORKSPACE


def test_a_storage_that_dies_while_another_thread_runs_an_op_is_freed_later():
    with mx.virtual("T4"):
        x = torch.ones(1000, device="cuda")
        holder = [torch.ones(1000, device="cuda")]
        begun, end = threading.Event(), threading.Event()

        def hold() -> None:
            with runner.lock:
                begun.set()
                end.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        begun.wait()
        holder.clear()
        end.set()
        thread.join()
        # 1000 numbers of 4 bytes, in blocks of 512 bytes: 8 x 512
        assert torch.cuda.memory_allocated() == 4096
        assert x.is_cuda
