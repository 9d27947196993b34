"""Run a program on the GPU of this machine and on the virtual GPU of its name, and compare: `compare`."""

from __future__ import annotations

import dataclasses

import torch

from memexplore.analysis.comparison import Comparison, Peaks, compare_tapes, libraries
from memexplore.recorder.driver_memory import DriverMemory
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import CUDA, Machine, default_name, machine_of
from memexplore.run.run import Program, run
from memexplore.tape import Tape


class NoGpuError(ValueError):
    """This machine has no usable GPU to measure on."""


def compare(program: Program | Tape, predicted: Tape | None = None, *, knobs: Knobs | None = None) -> Comparison:
    """Compare what a program takes on the GPU of this machine with what memexplore predicts.

    The program, such as a `Step`, is run there and recorded, and then on the virtual GPU of the same name. Two tapes,
    measured and predicted, are compared as they are, on any machine.

    >>> from memexplore.run.simulate import simulate
    >>> import torch
    >>> tapes = [simulate(lambda: torch.ones(size, device="cuda")) for size in (1000, 1001)]
    >>> compare(*tapes).differing[0].sizes
    ((4000, 4004),)

    Raises what the program raises, except running out of memory; `NoGpuError` on a machine without a usable GPU;
    ValueError for a tape without a second one, and for a tape that is not placed.
    """
    if isinstance(program, Tape):
        if predicted is None:
            raise ValueError("compare needs two tapes, the measured and the predicted one, or a Step that it runs")
        return compare_tapes(program, predicted)
    if default_name() != CUDA:
        raise NoGpuError(
            "compare measures on the GPU of this machine, and torch finds none that is not virtual: record the program "
            "where one is (memexplore run train.py -o measured.tape), and compare that tape with a predicted one"
        )
    return _on_both(program, knobs or Knobs(), machine_of(CUDA))


def _on_both(program: Program, knobs: Knobs, machine: Machine) -> Comparison:
    measured = run(program, knobs, machine).tape
    outside = DriverMemory(torch.device(CUDA)).outside().size
    held = machine.gpu.held_outside(machine.release, libraries(measured))
    result = compare_tapes(measured, run(program, knobs, machine.twin()).tape)
    if held is None:
        return result
    return dataclasses.replace(result, outside=Peaks(outside, held.bytes), outside_range=(held.low, held.high))
