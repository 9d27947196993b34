"""Recordings of a real GPU say of a program what a virtual GPU says; a virtual GPU stands for the real one."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest
import torch

import memexplore as mx
from memexplore.tape import COLUMNS, Category, Frame, Tape
from tests import real_gpu
from tests.gpu.scenarios import SCENARIOS

PROGRAMS = ["mlp_sgd", "cnn_sgd", "embedding_bag", "lstm_adam", "mlp_fp16_scaler_clipped"]


def is_of_the_program(frame: Frame) -> bool:
    """Whether a frame is no call of the program by this test."""
    return frame.filename not in (__file__, real_gpu.__file__)


def values(tape: Tape, name: str) -> list[Any]:
    """A column with the entries of the tables that it refers to."""
    column = getattr(tape, name)
    stacks = [tuple(itertools.takewhile(is_of_the_program, stack)) for stack in tape.stacks]
    table = {"op": tape.ops, "module": tape.modules, "stack": stacks, "tensor": tape.tensor_texts}.get(name)
    if name == "category":
        # What a kernel allocates beside its outputs: only a virtual GPU knows which of it is a workspace.
        return np.where(column == Category.WORKSPACE, Category.TEMPORARY, column).tolist()
    if table is None:
        return column.tolist()
    return [table[number] if number >= 0 else None for number in column.tolist()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recording_is_the_tape_of_the_virtual_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = SCENARIOS[name].function
    gc.collect()
    torch.manual_seed(0)
    expected = mx.simulate(function, gpu="H100")
    torch.manual_seed(0)
    tape = real_gpu.recorded(monkeypatch, function, "H100")
    # Only a virtual GPU knows what else a workspace may be.
    compared = [name for name in COLUMNS if name not in ("time", "workspace")]
    differs = [each for each in compared if values(tape, each) != values(expected, each)]
    assert differs == []
    assert (np.diff(tape.time) >= 0).all()
