"""`%memgpu` under interrupts: torch and the magics agree, and `%memgpu off` always brings plain torch back."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import memexplore as mx
from memexplore.jupyter.magics import MemoryMagics
from memexplore.virtual_gpu import device
from tests.interrupts import LAST, interrupted, lines_of
from tests.virtual_gpu.torch_state import functions, global_state

STEP = 17
"""Every line of a virtual GPU that goes on or off is interrupted in tests/virtual_gpu; here one of 17."""


@pytest.fixture
def magics() -> Iterator[MemoryMagics]:
    InteractiveShell.clear_instance()
    config = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "nocolor"}})
    made = MemoryMagics(InteractiveShell.instance(config=config))
    made.memgpu("T4")
    made.memgpu("off")
    gc.collect()
    gc.disable()
    yield made
    LAST.clear()
    made.close()
    gc.enable()
    InteractiveShell.clear_instance()


def _numbers(function: Callable[[], object]) -> range:
    return range(0, len(lines_of(function)), STEP)


def test_an_interrupt_of_turning_on_leaves_all_on_or_all_off(magics):
    before, every_function = global_state(), functions()
    numbers = _numbers(lambda: magics.memgpu("T4"))
    magics.memgpu("off")
    for number in numbers:
        line = interrupted(lambda: magics.memgpu("T4"), number)
        assert (magics._notebook.gpu is not None) == torch.cuda.is_available() == (device.active() is not None), line
        if magics._notebook.gpu is not None:
            magics.memgpu("off")
        assert global_state() == before, line
    assert functions() == every_function


def test_turning_off_again_after_an_interrupt_restores_torch(magics):
    before, every_function = global_state(), functions()
    magics.memgpu("T4")
    for number in _numbers(lambda: magics.memgpu("off")):
        magics.memgpu("T4")
        line = interrupted(lambda: magics.memgpu("off"), number)
        assert (magics._notebook.gpu is not None) == torch.cuda.is_available(), line
        magics.memgpu("off")
        assert global_state() == before, line
    assert functions() == every_function


def test_memgpu_off_ends_a_gpu_that_it_did_not_turn_on(magics, capsys):
    before = global_state()
    block = mx.virtual("T4")
    block.__enter__()
    magics.memgpu("off")
    assert global_state() == before
    assert "The virtual Tesla T4 is off." in capsys.readouterr().out


def test_memgpu_knows_that_another_ended_its_gpu(magics, capsys):
    magics.memgpu("T4")
    device.turn_off()
    capsys.readouterr()
    magics.memgpu("")
    assert capsys.readouterr().out.startswith("No virtual GPU is on.")
