"""The code for a real run on a CUDA device, run on a virtual GPU that holds unrelated tensors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.recorder import cuda, isolation
from memexplore.recorder.real_device import CudaMode
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs import real_run
from memexplore.run.programs.step_run import traced
from memexplore.run.run import run
from memexplore.tape import Action, Meta, Source, Tape
from tests.programs.test_real_run import MIB, everything, rows, step


def unrelated_tensors() -> list[torch.Tensor]:
    """Return tensors that leave gaps in small and in large segments."""
    sizes = (100, 3 * MIB, 5 * MIB, 700, 1000 * 1024, 21 * MIB)
    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    return [tensors[0], tensors[2], tensors[4]]


CUDA_KNOBS = [
    Knobs(),
    Knobs(precision="bf16"),
    Knobs(precision="fp16"),
    Knobs(precision="all bf16"),
    Knobs(accumulation=2, batch=16),
    Knobs(checkpoint="every 1"),
    Knobs(update="fused"),
    Knobs(update="in backward"),
    Knobs(lora="0"),
    Knobs(offload="saved tensors on the CPU"),
    Knobs(mode="inference"),
]


@pytest.mark.parametrize("knobs", CUDA_KNOBS, ids=str)
def test_run_beside_unrelated_tensors_is_the_run_of_a_fresh_process(knobs: Knobs) -> None:
    of = step(model=nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(), nn.Linear(256, 10)))
    before = everything(of)
    expected = traced(of, knobs, machine_of()).tape
    with mx.virtual("T4"):
        others = unrelated_tensors()
        ran = real_run.run(of, knobs, torch.device("cuda"), 2)
    nothing = Tape.from_columns({"action": [], "address": [], "size": []}, meta=ran.tape.meta)
    mine, held = isolation.drop_unrelated(ran.tape, nothing)
    # A small segment of 2 MiB, one of 20 MiB with the 5 MiB; that of the 21 MiB was given back.
    assert held == 22 * MIB
    assert rows(mine) == rows(expected)
    assert mx.peak(mine, "reserved") == mx.peak(expected, "reserved")
    assert len(others) == 3
    assert everything(of) == before


def test_a_run_frees_its_memory_and_unrelated_tensors_keep_theirs() -> None:
    with mx.virtual("T4"):
        others = unrelated_tensors()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        with real_run.preserve_device(torch.device("cuda")):
            during = torch.cuda.memory_reserved()
            mine = torch.empty(30 * MIB, device="cuda", dtype=torch.uint8)
            del mine
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
        # The gaps are filled within the existing segments.
        assert during == before[1]
        assert len(others) == 3


def test_running_out_of_memory_ends_the_tape_and_keeps_unrelated_tensors() -> None:
    of = step(1 << 14, model=nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), loss=lambda output, _: output.sum())
    before = everything(of)
    with mx.virtual("40MiB"):
        ran = real_run.run(of, Knobs(), torch.device("cuda"), 2)
        assert torch.cuda.memory_allocated() <= 2 * 8_519_680  # cuBLAS's own
    assert np.count_nonzero(ran.tape.action == Action.OOM) == 1
    assert math.isnan(ran.seconds)
    assert everything(of) == before


def test_an_earlier_tensor_that_an_op_gets_is_on_the_tape() -> None:
    mode = CudaMode(torch.device("cpu"))
    given, other = torch.ones(100), torch.ones(200)
    with mode:
        torch.stack([given, given]).sum()
    noted = [event for event in mode.recorder.events if event[1] == Action.PREEXISTING]
    assert [(event[2], event[3]) for event in noted] == [(given.data_ptr(), 400)]
    assert other.data_ptr() not in {event[2] for event in noted}


def test_unrelated_tensors_are_dropped_except_those_that_the_run_uses() -> None:
    meta = Meta(Source.IMPORTED, "cuda:0")
    there, alloc, free, done = Action.PREEXISTING, Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED
    history = Tape.from_columns(
        {
            "action": [*[Action.SEGMENT_ALLOC] * 3, there, there, there, there, Action.SEGMENT_ALLOC, alloc]
            + [free, done, Action.SEGMENT_FREE],
            "address": [0, 4096, 8192, 0, 4096, 4608, 8192, 16384, 16384, 8192, 8192, 8192],
            "size": [2048, 4096, 4096, 512, 512, 512, 512, 2048, 512, 512, 512, 4096],
        },
        meta=meta,
    )
    noted = Tape.from_columns({"action": [there, alloc], "address": [4608, 16384], "size": [512, 512]}, meta=meta)
    mine, held = isolation.drop_unrelated(history, noted)
    # The run used nothing of the first and the third segment, and the third was released by its owner.
    assert held == 2048 + 4096
    kinds = [Action.SEGMENT_ALLOC, there, Action.SEGMENT_ALLOC, alloc]
    assert list(zip(mine.action.tolist(), mine.address.tolist(), strict=True)) == list(
        zip(kinds, [4096, 4608, 16384, 16384], strict=True)
    )
    assert mx.peak(mine, "reserved")[0] == 4096 + 2048


def test_twin_of_a_gpu_is_its_entry_with_its_memory() -> None:
    with mx.virtual("RTX 3060 8GB"):
        found = cuda.catalogue_gpu(torch.device("cuda"))
    assert (found.key, found.total) == ("RTX 3060 8GB", mx.gpus().loc["RTX 3060 8GB", "total"])


def test_twin_of_a_mig_slice_is_that_slice() -> None:
    with mx.virtual("A100 80GB MIG 2g.20gb"):
        found = cuda.catalogue_gpu(torch.device("cuda"))
    assert (found.key, found.multiprocessors) == ("A100 80GB MIG 2g.20gb", 28)


def test_twin_of_an_unknown_gpu_is_one_of_its_size_and_compute_capability() -> None:
    with mx.virtual("24GiB"):
        found = cuda.catalogue_gpu(torch.device("cuda"))
    assert (found.total, found.compute_capability) == (24 * 1024**3, (8, 0))
    assert "This GPU is not in the catalogue" in found.note


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("knobs", CUDA_KNOBS, ids=str)
def test_gpu_measures_what_was_predicted(knobs: Knobs) -> None:
    of = step(256, model=nn.Sequential(nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 10)))
    before = torch.cuda.memory_allocated()
    measured, predicted = (
        run(of, knobs, machine_of("cuda")).tape,
        traced(of, knobs, machine_of("cuda").twin()).tape,
    )
    assert measured.meta.source is Source.MEASURED
    assert mx.peak(measured)[0] == mx.peak(predicted)[0]
    assert mx.peak(measured, "reserved")[0] == mx.peak(predicted, "reserved")[0]
    assert torch.cuda.memory_allocated() == before
