"""One run of a step with given knobs, on a virtual GPU or on a real device."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from memexplore import capture, targets
from memexplore.analysis.curves import peak
from memexplore.gpu_catalogue import Gpu
from memexplore.knobs import inplace
from memexplore.knobs.apply import Applied, apply
from memexplore.knobs.knobs import InPlace, Knobs, Optimizer, Precision, Update
from memexplore.knobs.model_state import attributes_kept, random_states_kept
from memexplore.steps import real_run, training_loop
from memexplore.steps.cost import Cost, measuring
from memexplore.steps.step import Step
from memexplore.steps.trace_reuse import First, Program, first, program
from memexplore.tape import Tape
from memexplore.units import size_text
from memexplore.virtual_gpu.device import VirtualGpu
from memexplore.virtual_gpu.patches.module_moves import swap
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor, fake_cpu_tensor

STEPS = 2
"""The optimizer's state is there from the second step on, so the second is the one that all others are like."""
_ENDLESS = 1 << 50
"""Bytes of a GPU on which every step fits: a PiB."""


class Trial(NamedTuple):
    """What came of one setting; the tape ends with an `oom` row where it does not fit."""

    knobs: Knobs
    tape: Tape
    applied: Applied
    cost: Cost
    """Of the first step."""
    seconds: float = math.nan
    """Of one step on a real device, measured; not a number where the tape is predicted or ends out of memory."""


def run(step: Step, knobs: Knobs | None = None, *, gpu: str | Gpu | None = None, release: str | None = None) -> Trial:
    """Run two steps with some knobs, on a virtual GPU or on a real device.

    `gpu` is a name of the catalogue or a size, which mean a virtual GPU, ``cuda`` for the real GPU of this machine, or
    ``cpu`` for its CPU. Default device: the real GPU if usable, else a virtual T4. A GPU that the knobs name comes
    first; it is virtual, and so is a GPU under other allocator settings. `release` is the torch release whose rules
    apply on a virtual GPU. The model comes back as it was. On a virtual GPU what was traced before is not traced again
    (see `trace_reuse`); the tape is the one of `traced`.

    >>> linear = torch.nn.Linear(1024, 1024, bias=False)
    >>> trial = run(Step(linear, torch.zeros(4, 1024), loss=torch.mean, optimizer=torch.optim.SGD))
    >>> from memexplore.tape import Category
    >>> int(trial.tape.size[trial.tape.category == Category.PARAMETER].sum())  # 1024 * 1024 weights of 4 bytes
    4194304

    Raises what the step raises, but for running out of memory on a GPU; ValueError for knobs that do not suit the step
    or the device; MemoryError for a setting that needs more memory than this machine's CPU has.
    """
    knobs = knobs or Knobs()
    target = place_of(knobs, gpu)
    if isinstance(target, str) and targets.is_real(target):
        return _really(step, knobs, target, release)
    return placed(step, knobs, gpu, release) or _run(step, knobs, _place(knobs, gpu, release), _past(step))


def was_seen(step: Step, knobs: Knobs, gpu: str | Gpu | None, release: str | None) -> bool:
    """Whether the requests of a setting on a virtual GPU are known from one where the same kernels run."""
    return _same(knobs, _place(knobs, gpu, release)) in _past(step).same


def placed(step: Step, knobs: Knobs, gpu: str | Gpu | None, release: str | None) -> Trial | None:
    """The trial of a setting whose requests are known; None where they are not, or do not fit the virtual GPU."""
    place = _place(knobs, gpu, release)
    seen = _past(step).same.get(_same(knobs, place))
    tape = None if seen is None else seen.on(place)
    return None if seen is None or tape is None else Trial(knobs, tape, seen.applied, seen.cost)


def place_of(knobs: Knobs, gpu: str | Gpu | None) -> str | Gpu:
    """Where a run with some knobs takes place: what they name, or else the place that was asked for.

    Allocator settings are those of the whole process, and other tensors live under them: with others a run takes place
    on the virtual GPU that is like the real one.

    >>> place_of(Knobs(gpu="T4"), "cpu"), place_of(Knobs(batch=4), "cpu")
    ('T4', 'cpu')

    Raises ValueError for settings of an allocator that the CPU does not have.
    """
    if knobs.gpu is not None:
        return knobs.gpu
    gpu = gpu or targets.here()
    if knobs.settings is None or not targets.is_real(gpu):
        return gpu
    if gpu == targets.CPU:
        raise ValueError("settings= are those of the allocator of a GPU, which a CPU does not have: name a GPU as well")
    return targets.find(gpu)


def _really(step: Step, knobs: Knobs, gpu: str, release: str | None) -> Trial:
    """Run a step on a real device; what a run there cannot tell is told by the virtual GPU that is like it."""
    device = targets.device_of(gpu, release)
    twin = targets.twin(gpu)
    cost, sites = Cost(), None
    notes: tuple[str, ...] = ()
    try:
        sites = _sites(step, knobs, _place(knobs, twin, None), _past(step))
        foreseen = run(step, knobs, gpu=dataclasses.replace(twin, total=_ENDLESS))
    except Exception as error:
        # What is wrong with the knobs or the step is raised by the real run as well.
        notes = (f"FLOPs are not known, since no virtual GPU can run this step: {type(error).__name__}: {error}",)
    else:
        cost = foreseen.cost
        if gpu == targets.CPU:
            _check_memory(knobs, peak(foreseen.tape)[0])
    ran = real_run.run(step, knobs, device, STEPS, sites)
    applied = ran.applied._replace(notes=(*ran.applied.notes, *notes))
    return Trial(knobs, ran.tape, applied, cost, ran.seconds)


def _check_memory(knobs: Knobs, needed: int) -> None:
    # A GPU says no; a machine that has no memory left kills the whole process.
    left = targets.available_memory()
    if needed > left:
        raise MemoryError(
            f"{knobs}: not run, as it would need {size_text(needed)} by prediction and this machine has "
            f"{size_text(left)} left; take a smaller batch, or a virtual GPU"
        )


def traced(
    step: Step, knobs: Knobs | None = None, *, gpu: str | Gpu | None = None, release: str | None = None
) -> Trial:
    """Run two steps op by op, whatever was seen before; see `run`."""
    knobs = knobs or Knobs()
    return _run(step, knobs, _place(knobs, gpu, release), None)


def _place(knobs: Knobs, gpu: str | Gpu | None, release: str | None) -> VirtualGpu:
    """The virtual GPU that a trial is for, off."""
    settings = capture.settings_of(knobs.settings or "")
    return VirtualGpu(targets.find(place_of(knobs, gpu)), capture.release_or_installed(release), settings)


class _Seen(NamedTuple):
    """All that is needed to tell the tape of a setting on another GPU."""

    program: Program
    applied: Applied
    cost: Cost
    assumptions: tuple[str, ...]

    def on(self, place: VirtualGpu) -> Tape | None:
        meta = capture.predicted(place)
        return self.program.placed(meta._replace(notes=(*meta.notes, *self.assumptions)), place.settings)


class _Past(NamedTuple):
    """What was seen of a step: by setting without the machine, and by setting without the machine and the batch."""

    same: dict[Any, _Seen]
    like: dict[Any, tuple[Program, ...]]
    """Some ops go another way from some size on, so a setting may have several."""
    sites: dict[Any, Any]
    """Where activations may overwrite their input, by setting without machine and optimizer."""


_MANY = 48
"""Programs that are kept of a step; one of Llama 7B takes 2 MB."""


def _past(step: Step) -> _Past:
    if not hasattr(step, "_seen"):
        object.__setattr__(step, "_seen", _Past({}, {}, {}))
    return step._seen  # type: ignore[attr-defined]


def _same(knobs: Knobs, place: VirtualGpu) -> Any:
    return knobs.replace(gpu=None, settings=None), place.rules


def _like(knobs: Knobs, place: VirtualGpu) -> Any:
    return knobs.replace(gpu=None, settings=None, batch=None, input_size=None), place.rules


def _keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    table.pop(key, None)
    table[key] = value
    while len(table) > _MANY:
        del table[next(iter(table))]


def _run(step: Step, knobs: Knobs, place: VirtualGpu, past: _Past | None) -> Trial:
    model = built(step)
    sites = _sites(step, knobs, place, _past(step))
    applied = Applied()
    kept: list[Any] = []
    like = past.like.get(_like(knobs, place), ()) if past is not None else ()
    begun: First | None = None
    again: Program | None = None
    cost = Cost()

    def steps() -> Iterator[int]:
        nonlocal begun, again, cost
        with measuring(device.mode) as meter:
            yield 0
        cost = meter.total()
        if past is not None:
            begun = first(recording.events())
            again = next(filter(None, (other.again(begun) for other in like)), None)
        if again is None:
            yield 1

    with (
        _undisturbed(),
        _as_it_was(model),
        capture.virtual(place.gpu, release=place.release, settings=str(place.settings)) as device,
        _on_host(model),
        contextlib.ExitStack() as stack,
    ):
        with capture.record() as recording, contextlib.suppress(torch.OutOfMemoryError):
            recording.end_stacks_at(sys._getframe())
            # As a person would write it: fp32 weights that do not fit are never on the GPU.
            model.to("cuda", torch.bfloat16 if knobs.precision is Precision.ALL_BF16 else None)
            applied = stack.enter_context(apply(training_loop.of_apply(knobs), model, sites))
            applied = (applied + training_loop.train(step, knobs, model, steps(), kept)).settled()
        kept.clear()
        applied = applied._replace(later=())  # a run that ended out of memory tells nothing of what it did not reach
        looked_at = device.looked_at
    tape = recording.tape
    if past is None or looked_at:
        return Trial(knobs, tape, applied, cost)
    assumptions = tape.meta.notes[len(capture.predicted(place).notes) :]
    if again is None and begun is not None:
        again = program(begun, tape)
        if again is not None:
            _keep(past.like, _like(knobs, place), (again, *like)[:4])
    elif again is not None:
        placed = again.placed(tape.meta, place.settings)
        if placed is None:
            return _run(step, knobs, place, None)
        tape = placed
    if again is not None:
        _keep(past.same, _same(knobs, place), _Seen(again, applied, cost, assumptions))
    return Trial(knobs, tape, applied, cost)


def _sites(step: Step, knobs: Knobs, place: VirtualGpu, past: _Past) -> Any:
    """Where activations may overwrite their input in a step with these knobs: found by one run more."""
    if knobs.inplace is InPlace.AS_WRITTEN:
        return None
    looked = knobs.replace(
        inplace=InPlace.AS_WRITTEN,
        optimizer=Optimizer.SGD,
        update=Update.AS_WRITTEN,
        batch=(knobs.batch or step.batch_size) // (knobs.accumulation or 1),
        accumulation=None,
        gpu=None,
        settings=None,
    )
    key = looked, place.rules
    if key not in past.sites:
        model = built(step)
        endless = dataclasses.replace(place.gpu, total=_ENDLESS)
        with (
            _undisturbed(),
            _as_it_was(model),
            capture.virtual(endless, release=place.release),
            _on_host(model),
        ):
            model.to("cuda", torch.bfloat16 if knobs.precision is Precision.ALL_BF16 else None)
            # Outermost, or a call in a checkpointed forward is not known again when it is recomputed.
            with inplace.watched(model), apply(training_loop.of_apply(looked), model):
                found = inplace.legal_sites(lambda: training_loop.train(step, looked, model, range(1), []), model)
        _keep(past.sites, key, found)
    return past.sites[key]


def built(step: Step) -> torch.nn.Module:
    """The step's model, built on a virtual GPU where the step has a function that builds it."""
    if isinstance(step.model, torch.nn.Module):
        return step.model
    if not hasattr(step, "_built"):
        with capture.virtual("192GiB"):
            object.__setattr__(step, "_built", step.model())
    return step._built  # type: ignore[attr-defined]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep random states, and the garbage collector from going over all that was there before (150 ms of 200)."""
    with random_states_kept():
        if gc.get_freeze_count():  # somebody else's doing
            yield
            return
        gc.freeze()
        try:
            yield
        finally:
            gc.unfreeze()


@contextlib.contextmanager
def _as_it_was(model: torch.nn.Module) -> Iterator[None]:
    """Take the gradients away for the block; gradients and attributes are the model's own again afterwards."""
    weights = [(weight, weight.grad, weight.requires_grad) for weight in model.parameters()]
    with attributes_kept(model):
        try:
            for weight, _, _ in weights:
                weight.grad = None
            yield
        finally:
            for weight, gradient, needed in weights:
                weight.requires_grad_(needed)
                weight.grad = gradient


@contextlib.contextmanager
def _on_host(model: torch.nn.Module) -> Iterator[None]:
    """Have the virtual tensors of a model wait on the CPU for the block, whatever virtual GPU they were on.

    What an earlier virtual GPU holds of them costs nothing: it is placed only where it is used.
    """
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for weight in model.parameters():
            if isinstance(weight, VirtualTensor):
                other: torch.Tensor = torch.nn.Parameter(
                    fake_cpu_tensor(weight.shape, weight.dtype, weight.stride()), requires_grad=weight.requires_grad
                )
                swap(weight, other)
                swapped.append((weight, other))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if isinstance(buffer, VirtualTensor):
                    module._buffers[name] = fake_cpu_tensor(buffer.shape, buffer.dtype, buffer.stride())
        yield
    finally:
        for moved, waiting in swapped:
            moved.grad = None
            swap(moved, waiting)
