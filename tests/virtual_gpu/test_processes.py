"""Child processes of a program on a virtual GPU: those that were not measured are reported."""

from __future__ import annotations

import io
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import memexplore as mx
from memexplore.analysis.verdict import Verdict, verdict
from memexplore.analysis.verdict_content import verdict_content
from memexplore.tape import Tape

forks = pytest.mark.skipif(sys.platform == "win32", reason="no fork on Windows")


def _run_a_model() -> None:
    # Without a backward pass: after one in this process torch refuses another in a forked one.
    nn.Linear(8, 8).cuda()(torch.ones(2, 8, device="cuda"))


def _on_the_cpu() -> None:
    torch.ones(2, 8).sum()


def _fail() -> None:
    sys.exit(3)


def _run(method: str, target: Callable[[], Any], *, on_the_gpu: bool = True) -> Tape:
    """Return the tape of a program that puts a tensor on the GPU and runs `target` in a process."""

    def program() -> None:
        kept = torch.ones(4, device="cuda") if on_the_gpu else None
        process = multiprocessing.get_context(method).Process(target=target)
        process.start()
        process.join()
        del kept

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mx.simulate(program, gpu="T4")


@forks
@pytest.mark.parametrize("on_the_gpu", [True, False])
def test_a_forked_child_that_runs_a_model_is_reported(on_the_gpu):
    tape = _run("fork", _run_a_model, on_the_gpu=on_the_gpu)
    assert verdict(tape) is Verdict.PARTLY_MEASURED
    assert tape.meta.unmeasured.startswith("forked child processes used the GPU, and their memory was not measured: ")
    assert verdict_content(tape).headline.startswith("Not all was measured: forked child processes used the GPU")
    assert "fits" not in verdict_content(tape).text.lower()


@forks
def test_the_report_of_one_recording_says_nothing_of_the_one_before():
    with mx.virtual("T4"):
        for target, expected in ((_run_a_model, True), (_on_the_cpu, False)):
            with mx.record() as recording:
                process = multiprocessing.get_context("fork").Process(target=target)
                process.start()
                process.join()
            assert bool(recording.tape.meta.unmeasured) is expected


@forks
def test_forked_children_that_work_on_the_cpu_are_not_reported():
    assert verdict(_run("fork", _on_the_cpu)) is Verdict.FITS

    def program() -> None:
        torch.ones(4, device="cuda")
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
            assert list(pool.map(abs, [-1, -2])) == [1, 2]
        with multiprocessing.get_context("fork").Pool(2) as more:
            # Leaving the block terminates the processes.
            assert more.map(abs, [-1]) == [1]

    assert verdict(mx.simulate(program, gpu="T4")) is Verdict.FITS


@forks
def test_a_child_that_fails_is_reported_with_its_exit_status():
    tape = _run("fork", _fail)
    assert tape.meta.unmeasured.startswith("1 child process failed (exit status 3), and its")
    assert verdict(tape) is Verdict.PARTLY_MEASURED


def test_a_spawned_child_is_reported():
    assert _run("spawn", _fail).meta.unmeasured.startswith(
        "1 child process ran without the virtual GPU (exit status 3), and its memory was not measured: "
    )


@pytest.mark.parametrize("method", [pytest.param("fork", marks=forks), "spawn"])
def test_workers_of_a_data_loader_are_not_reported(method):
    def program() -> None:
        loader = DataLoader(TensorDataset(torch.ones(4, 3)), 2, num_workers=2, multiprocessing_context=method)
        for (batch,) in loader:
            batch.cuda()

    tape = mx.simulate(program, gpu="T4")
    assert (tape.meta.unmeasured, verdict(tape)) == ("", Verdict.FITS)


class _OnTheGpu(Dataset):
    """Samples that are made on the GPU, for which CUDA needs spawned workers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((3,), float(i)).cuda().mul(2).cpu()


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_spawned_workers_of_a_data_loader_may_use_the_gpu_and_are_reported():
    batches: list[list[float]] = []

    def program() -> None:
        loader = DataLoader(_OnTheGpu(), 2, num_workers=1, multiprocessing_context="spawn")
        batches.extend(batch.cuda()[:, 0].tolist() for batch in loader)

    with pytest.warns(UserWarning, match="Not all was measured"):
        tape = mx.simulate(program, gpu="T4")
    assert batches == [[0, 2], [4, 6]]
    assert tape.meta.unmeasured.startswith("forked child processes used the GPU, and their memory was not measured: ")


@forks
def test_workers_put_batches_together_of_features_that_came_from_the_gpu():
    def program() -> None:
        features = torch.nn.Linear(3, 5).cuda()(torch.ones(4, 3, device="cuda")).detach().cpu()
        loader = DataLoader(TensorDataset(features), 2, num_workers=1, multiprocessing_context="fork")
        batches = [batch for (batch,) in loader]
        assert [(batch.shape, batch.device.type) for batch in batches] == [((2, 5), "cpu")] * 2

    assert verdict(mx.simulate(program, gpu="T4")) is Verdict.FITS


def _sent(value: Any) -> Any:
    return ForkingPickler.loads(ForkingPickler.dumps(value))


def test_a_queue_or_a_pipe_sends_virtual_tensors_without_their_memory():
    with mx.virtual("T4"):
        scores = torch.empty(4, 3, device="cuda").relu()
        for tensor in (scores, scores.t(), scores.cpu(), nn.Parameter(scores)):
            sent = _sent(tensor)
            assert type(sent) is type(tensor)
            assert (sent.shape, sent.stride(), sent.device) == (tensor.shape, tensor.stride(), tensor.device)
            assert sent.requires_grad == tensor.requires_grad
        with pytest.raises(RuntimeError, match="refusing to serialize non-leaf tensor"):
            _sent(nn.Parameter(scores) + 1)
    assert ForkingPickler(io.BytesIO()).dispatch_table[torch.Tensor] is reduce_tensor


def test_a_spawned_child_that_gets_a_tensor_of_the_gpu_is_reported():
    def program() -> None:
        process = multiprocessing.get_context("spawn").Process(target=abs, args=(torch.empty(4, device="cuda").relu(),))
        process.start()
        process.join()

    with pytest.warns(UserWarning, match="Not all was measured"):
        tape = mx.simulate(program, gpu="T4")
    assert tape.meta.unmeasured.startswith(
        "1 child process ran without the virtual GPU (exit status 1), and its memory was not measured: "
    )
