"""`fits`: whether a step or a function fits a GPU, with the margin, and against what a real GPU has free right now."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.hardware.catalogue import find
from memexplore.run import machine
from memexplore.run.machine import machine_of
from memexplore.run.programs import fitting
from memexplore.run.run import run
from tests.real_gpu import stand_in

MIB = 1 << 20


def _blocks(count: int) -> None:
    """Requests of 1 MiB, two in a segment."""
    kept = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(count)]
    del kept


def test_a_function_that_fits_is_true_and_has_what_is_left() -> None:
    fit = mx.fits(lambda: _blocks(30), "40MiB")
    assert fit
    assert (fit.needed, fit.capacity, fit.margin, fit.stops) == (30 * MIB, 40 * MIB, 10 * MIB, "")
    assert repr(fit) == "<Fit: Fits: needs 30.0 MiB · the GPU has 40.0 MiB · 10.0 MiB to spare>"


def test_a_function_that_does_not_fit_is_false_and_has_what_is_missing() -> None:
    fit = mx.fits(lambda: _blocks(30), "20MiB")
    assert not fit
    assert (fit.needed, fit.capacity, fit.margin, fit.stops) == (
        30 * MIB,
        20 * MIB,
        -10 * MIB,
        "(aten::empty, 1.00 MiB)",
    )
    assert repr(fit) == ("<Fit: Needs 30.0 MiB · the GPU has 20.0 MiB · 10.0 MiB over · stops (aten::empty, 1.00 MiB)>")
    assert "test_fitting.py" in str(fit)
    assert "Needs 30.0 MiB" in fit._repr_html_()


def test_the_numbers_of_a_step_are_those_of_its_outcome() -> None:
    of = mx.Step(nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    for gpu in ("T4", "8MiB"):
        fit, outcome = mx.fits(of, gpu), run(of, machine=machine_of(gpu)).outcome
        assert (fit.fits, fit.needed, fit.margin) == (outcome.fits, outcome.needed, outcome.margin)


def test_knobs_change_the_step() -> None:
    of = mx.Step(nn.Linear(1024, 1024), torch.zeros(16384, 1024), loss=torch.mean)
    assert mx.fits(of, "T4", mx.Knobs(batch=64)).needed < mx.fits(of, "T4").needed


def test_settings_of_the_allocator_are_followed() -> None:
    # A segment of 20 MiB for 5 blocks, of which one stays, and one of 24 MiB; an expandable one returns what is free.
    def run() -> None:
        kept = [torch.empty(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
        del kept[1:]
        torch.empty(24 * MIB, dtype=torch.uint8, device="cuda")

    assert mx.fits(run, "40MiB").needed == 44 * MIB
    assert mx.fits(run, "40MiB", settings="expandable_segments:True")


def test_what_is_missing_is_the_segment_if_only_pieces_are_free() -> None:
    # 20 segments of 2 MiB with a gap of 1 MiB each, and no room for another of 16 MiB in 50 MiB.
    def run() -> None:
        kept = [torch.empty(MIB, dtype=torch.uint8, device="cuda") for _ in range(40)][::2]
        torch.empty(15 * MIB, dtype=torch.uint8, device="cuda")
        del kept

    fit = mx.fits(run, "50MiB")
    assert (bool(fit), fit.margin) == (False, 50 * MIB - (20 * 2 + 16) * MIB)


def test_a_function_without_a_gpu_is_neither_true_nor_false() -> None:
    with pytest.warns(UserWarning, match="Nothing ran"), pytest.raises(ValueError, match="not known whether this fits"):
        mx.fits(lambda: torch.zeros(8), "T4")


def test_an_error_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        mx.fits(lambda: 1 // 0, "T4")


def test_knobs_of_a_function_and_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="make a Step"):
        mx.fits(lambda: None, "T4", mx.Knobs(batch=4))
    with pytest.raises(ValueError, match="name a GPU"):
        mx.fits(lambda: None, "cpu")


# --- a real GPU ----------------------------------------------------------------------------------------------------


@pytest.fixture
def real_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 with 1 000 MiB of which other processes have 600; of 100 MiB reserved by this process 30 are allocated."""
    stand_in(monkeypatch)


@pytest.mark.usefixtures("real_gpu")
@pytest.mark.parametrize("gpu", [None, "cuda", torch.device("cuda"), torch.device("cuda", 0)])
def test_a_real_gpu_has_what_is_free_and_what_the_process_has_cached(gpu: str | torch.device | None) -> None:
    fit = mx.fits(lambda: _blocks(30), gpu)
    # 300 MiB free, and 100 - 30 in the cache
    assert (fit.capacity, fit.margin) == (370 * MIB, 340 * MIB)
    assert repr(fit) == "<Fit: Fits: needs 30.0 MiB · this GPU has 370 MiB · 340 MiB to spare>"
    assert fit.tape.meta.notes[0].startswith("630 MiB of 0.98 GiB are taken right now")


@pytest.mark.usefixtures("real_gpu")
def test_memory_of_the_program_itself_is_not_taken() -> None:
    assert machine.free_now(torch.device("cuda", 0), own=20 * MIB).capacity == 390 * MIB
    # The allocator counts blocks after rounding, so `own` may be more or less.
    assert machine.free_now(torch.device("cuda", 0), own=31 * MIB).capacity == 400 * MIB


@pytest.mark.usefixtures("real_gpu")
def test_a_process_with_a_limit_may_use_what_its_other_tensors_leave_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = dataclasses.replace(find("1000MiB"), outside=0, limit=200 * MIB)
    monkeypatch.setattr(machine.cuda, "catalogue_gpu", lambda device: gpu)
    fit = mx.fits(lambda: _blocks(30), "cuda")
    # 370 MiB are free, and the limit has room for 200 - 30
    assert repr(fit) == "<Fit: Fits: needs 30.0 MiB · this process may use 170 MiB · 140 MiB to spare>"
    # A limit that the program sets itself replaces it.
    assert mx.fits(_without_limit, "cuda").capacity == 370 * MIB


def _without_limit() -> None:
    torch.cuda.set_per_process_memory_fraction(1.0)
    _blocks(30)


@pytest.mark.usefixtures("real_gpu")
def test_memory_outside_the_allocator_counts_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = dataclasses.replace(find("1000MiB"), outside=400 * MIB)
    monkeypatch.setattr(machine.cuda, "catalogue_gpu", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700 * MIB, 1000 * MIB))
    # 200 MiB are taken outside the allocator so far, 400 will be; 30 are allocated.
    assert machine.free_now(torch.device("cuda", 0)).capacity == (1000 - 400 - 30) * MIB


def test_the_own_bytes_of_a_step_are_weights_gradients_buffers_and_batch() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.BatchNorm1d(10, affine=False, track_running_stats=False))
    model.register_buffer("view", model[0].weight.data[:2])
    model[0].weight.grad = torch.zeros(10, 10)
    of = mx.Step(model, torch.zeros(8, 10), loss=torch.mean)
    # 10 x 10 weights, their gradient, 8 x 10 inputs; the buffer is a view of the weights
    assert fitting._own_bytes(of, torch.device("cpu")) == (100 + 100 + 80) * 4
    assert fitting._own_bytes(of, torch.device("cuda", 0)) == 0
