"""Say whether a step or a function fits a GPU, for scripts and continuous integration: `fits`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from memexplore.allocator.smallest import Need
from memexplore.analysis.need import need
from memexplore.analysis.verdict import Verdict, stop_text, verdict
from memexplore.analysis.verdict_content import verdict_content
from memexplore.figures.values import tape_html
from memexplore.hardware.catalogue import Gpu
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import CPU, CUDA, Machine, bytes_on, free_now, machine_of
from memexplore.run.programs import batches
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.run.simulate import simulate_on
from memexplore.tape import Os, Tape
from memexplore.tape.allocator_settings import SMALL_SEGMENT

_NO_LIMIT = "on {} memory has no limit of its own: name a GPU such as T4, or a size"


@dataclasses.dataclass(frozen=True, repr=False)
class Fit:
    """Whether a program fits a GPU; true in a condition if it does. Sizes in bytes."""

    fits: bool
    needed: int
    """The smallest capacity with which the whole program runs (`memexplore.analysis.need`); more than this, if it is
    not known how the program goes on after the request that does not fit."""
    reserved: int
    """Memory that the allocator reserves for the whole program where there is room, never less than `needed`."""
    capacity: int
    """Memory of the GPU that the allocator can reserve."""
    stops: str
    """Step, phase and layer of the request that does not fit, its op and its size; empty if everything fits."""
    tape: Tape = dataclasses.field(compare=False)
    """The recorded program, up to where it stops; its `whole` is the program as if there were room."""

    @property
    def margin(self) -> int:
        """Bytes that are left; negative where bytes are missing."""
        return self.capacity - self.needed

    def __bool__(self) -> bool:
        return self.fits

    def __repr__(self) -> str:
        """Return the verdict in one line, with where the program stops."""
        stops = f" · stops {self.stops}" if self.stops else ""
        return f"<Fit: {verdict_content(self.tape).headline}{stops}>"

    def __str__(self) -> str:
        content = verdict_content(self.tape)
        lines = [f"  at {place.text}" + (f": {place.code}" if place.code else "") for place in content.where[:1]]
        return "\n".join([content.text, *lines])

    def _repr_html_(self) -> str:
        return tape_html(self.tape)


def fits(
    step: Step | Callable[[], Any],
    gpu: str | torch.device | Gpu | None = None,
    knobs: Knobs | None = None,
    *,
    release: str | None = None,
    settings: str = "",
    os: str = Os.LINUX,
) -> Fit:
    """Return whether two steps of training, or a function without arguments, fit a GPU, and how much is left.

    `gpu` is a name of the catalogue or a size, or a real GPU: ``cuda`` or its `torch.device`. Default: the real GPU if
    usable, else a virtual T4. Nothing runs on a real GPU: the answer is predicted, for the memory that is free there
    right now (`machine.free_now`); the memory of the step's own model and batch counts as free. A function runs as in
    `simulate`, a second time if it does not fit. `knobs` change a step. For `release`, `settings` and `os` see
    `virtual`.

    >>> step = Step(torch.nn.Linear(1024, 1024), torch.zeros(4, 1024), loss=torch.mean)
    >>> fit = fits(step, "8MiB")
    >>> bool(fit), fit.capacity, fit.margin < 0, fit.stops
    (False, 8388608, True, '(aten::_to_copy, 4.00 MiB)')
    >>> assert fits(step, "T4"), "out of memory"
    >>> fits(lambda: torch.zeros(1 << 20, device="cuda"), "1GiB")
    <Fit: Fits: needs 20.0 MiB · the GPU has 1.00 GiB · 0.98 GiB to spare>

    Raises what the step or the function raises, except running out of memory; ValueError for the CPU, for `knobs` of a
    function, and for a function whose memory is not known, as nothing of it ran on the GPU or as its child processes
    were not measured.
    """
    machine = _machine(gpu, step, release, settings, os)
    if isinstance(step, Step):
        return fit_of(run(step, knobs, machine).tape)
    if knobs is not None:
        raise ValueError("knobs= change a Step, and this is a function: make a Step of its model and batch")
    return fit_of(simulate_on(step, machine))


def fit_of(tape: Tape) -> Fit:
    """Return whether a recorded program fits its device.

    Raises ValueError for a program whose memory is not known, or that an error ended.
    """
    content, kind = verdict_content(tape), verdict(tape)
    if kind not in (Verdict.FITS, Verdict.OOM) or content.capacity is None:
        raise ValueError(f"it is not known whether this fits: {content.headline}. {content.detail}")
    required = need(tape)
    if required is None:
        # The rest of a run that stopped is not known: it needs at least a page more than there is.
        least = max(content.needed, content.capacity + SMALL_SEGMENT)
        required = Need(least, least, retries=0)
    numbers = required.smallest, required.without_pressure, content.capacity
    return Fit(kind is Verdict.FITS, *numbers, stop_text(tape), tape)


def _machine(gpu: str | torch.device | Gpu | None, step: Any, release: str | None, settings: str, os: str) -> Machine:
    """Return the virtual machine on which a program runs; one with a real GPU has what is free there now.

    Raises ValueError for the CPU and for an unknown GPU.
    """
    if isinstance(gpu, torch.device) and gpu.type not in (CPU, CUDA):
        raise ValueError(_NO_LIMIT.format(gpu.type))
    if gpu == CPU or gpu == torch.device(CPU):
        raise ValueError(_NO_LIMIT.format(CPU))
    machine = machine_of(gpu, release=release, settings=settings, os=os)
    if machine.is_virtual:
        return machine
    device = gpu if isinstance(gpu, torch.device) and gpu.index is not None else machine.device
    return machine.with_gpu(free_now(device, _own_bytes(step, device) if isinstance(step, Step) else 0))


def _own_bytes(step: Step, device: torch.device) -> int:
    """Return the bytes of the model, its gradients and the batch of a step on a real GPU."""
    tensors = batches.tensors(step.batch)
    if isinstance(step.model, torch.nn.Module):
        weights = list(step.model.parameters())
        tensors = [
            *tensors,
            *weights,
            *step.model.buffers(),
            *(weight.grad for weight in weights if weight.grad is not None),
        ]
    return bytes_on(device, tensors)
