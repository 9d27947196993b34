"""Find the machine that a setting runs on: the GPU, allocator settings and number of GPUs of its knobs come first."""

from __future__ import annotations

from memexplore.run.knobs.knobs import Knobs, in_stages
from memexplore.run.machine import Machine


def on_machine(knobs: Knobs, machine: Machine) -> Machine:
    """Return the machine with the GPU, the allocator settings and the number of GPUs that the knobs name.

    Allocator settings are of a whole process, in which other tensors live: with other settings, and on several
    GPUs, a setting runs on the virtual GPU with the numbers of the real one.

    >>> from memexplore.run.machine import machine_of
    >>> on_machine(Knobs(gpu="A100"), machine_of("T4")).gpu.key, on_machine(Knobs(batch=4), machine_of("T4")).gpu.key
    ('A100 40GB', 'T4')

    Raises ValueError for allocator settings and several GPUs on the CPU.
    """
    for knob, value in in_stages(knobs):
        machine = knob.on_machine(value, machine)
    return machine
