"""Threads beside the one with the virtual GPU: `torch.cuda` answers them, and naming `cuda` ends in one sentence."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memexplore as mx
from memexplore.virtual_gpu.tensors.value_loops import NotSimulated

USES: dict[str, Callable[[], Any]] = {
    "a factory": lambda: torch.zeros(3, device="cuda"),
    "a factory with an index": lambda: torch.zeros(3, device="cuda:0"),
    "torch.tensor": lambda: torch.tensor([1.0], device="cuda"),
    "Tensor.cuda": lambda: torch.zeros(3).cuda(),
    "Tensor.to": lambda: torch.zeros(3).to("cuda"),
    "Tensor.to a number": lambda: torch.zeros(3).to(0),
    "Tensor.type": lambda: torch.zeros(3).type("torch.cuda.HalfTensor"),
    "Module.cuda": lambda: torch.nn.Linear(2, 2).cuda(),
    "Module.to": lambda: torch.nn.Linear(2, 2).to("cuda"),
    "torch.cuda.FloatTensor": lambda: torch.cuda.FloatTensor([1.0]),
}


@pytest.fixture
def earlier() -> Iterator[concurrent.futures.Executor]:
    """A pool whose thread runs since before the virtual GPU is on."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield pool


def _in_thread(function: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("name", USES)
def test_cuda_in_a_new_thread_raises_a_clear_error(name):
    with (
        mx.virtual("T4"),
        pytest.raises(NotSimulated, match=r"^the thread \S+ uses cuda, and the virtual Tesla T4.*; use"),
    ):
        _in_thread(USES[name])


EARLIER_THREAD = """
import concurrent.futures
import memexplore as mx
from tests.virtual_gpu.test_threads import USES

with concurrent.futures.ThreadPoolExecutor(1) as pool:
    pool.submit(int).result()
    with mx.virtual("T4"):
        for name, use in USES.items():
            print(name, type(pool.submit(use).exception()).__name__, sep=": ")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="a thread from before the virtual GPU still finds the real one")
def test_cuda_in_an_earlier_thread_raises_a_clear_error():
    # In a process of its own: C++ calls `_lazy_init` only once in a process.
    output = subprocess.run([sys.executable, "-c", EARLIER_THREAD], capture_output=True, text=True, check=True).stdout
    errors = dict(line.split(": ") for line in output.splitlines())
    # From torch 2.13 on C++ raises for these two before it looks for a device.
    del errors["Tensor.to a number"], errors["Tensor.type"]
    assert errors == dict.fromkeys(errors, "NotSimulated")
    assert len(errors) == len(USES) - 2


def test_functions_of_torch_cuda_work_in_every_thread(earlier):
    with mx.virtual("T4"):
        kept = torch.zeros(1000, 1000, device="cuda")
        # 1000 x 1000 numbers of 4 bytes, in blocks of 512 bytes: 7813 x 512
        assert _in_thread(torch.cuda.memory_allocated) == 4_000_256
        assert earlier.submit(torch.cuda.memory_allocated).result() == 4_000_256
        assert earlier.submit(torch.cuda.is_available).result()
        assert kept.is_cuda


def test_work_on_the_cpu_runs_in_every_thread(earlier):
    with mx.virtual("T4"):
        assert _in_thread(lambda: torch.ones(3).sum().item()) == 3
        assert earlier.submit(lambda: torch.ones(3).to(torch.float64).sum().item()).result() == 3


def test_cuda_in_a_thread_subclass_with_its_own_run_raises():
    raised: list[BaseException] = []

    class Loader(threading.Thread):
        def run(self) -> None:
            try:
                torch.zeros(3, device="cuda")
            except NotSimulated as error:
                raised.append(error)

    with mx.virtual("T4"):
        thread = Loader()
        thread.start()
        thread.join()
    assert len(raised) == 1


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


def test_a_thread_that_outlives_the_virtual_gpu_runs_on():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with mx.virtual("T4"):
            pool.submit(int).result()
        assert pool.submit(lambda: torch.ones(3, device="cpu").sum().item()).result() == 3
        error = pool.submit(USES["a factory"]).exception()
    assert not isinstance(error, NotSimulated)


def test_a_loader_that_pins_memory_in_a_thread_works():
    dataset = torch.utils.data.TensorDataset(torch.ones(4, 2))
    with mx.virtual("T4"):
        loader = torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1, pin_memory=True)
        assert [batch.cuda().shape for (batch,) in loader] == [(2, 2), (2, 2)]
