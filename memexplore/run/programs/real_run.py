"""Run a step on a real device: record it, time it, and undo what it has changed."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memexplore.recorder import isolation
from memexplore.recorder.isolation import Unrelated
from memexplore.recorder.recording import record
from memexplore.run.knobs.applying.apply import apply_to_step, loop_of, of_model_in_loop
from memexplore.run.knobs.applying.model_state import (
    preserve_model_state,
    preserve_random_states,
    preserve_weight_storage,
)
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs import batches, training_loop
from memexplore.run.programs.out_of_memory import ending_out_of_memory, fits, without_locals
from memexplore.run.programs.step_record import built_real_model
from memexplore.tape import Tape
from memexplore.torch_internals.modules import apply_of
from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.tensors.tensor import is_virtual

if TYPE_CHECKING:
    from memexplore.run.programs.step import Step

_TIMED_STEPS, _TIMED_SECONDS = 10, 1.0
"""Timing ends after this number of steps or this number of seconds, whichever comes first."""


class RealRun(NamedTuple):
    """A run on a real device."""

    tape: Tape
    applied: ApplyReport
    seconds: float
    """Of one step; not a number where the run ended out of memory."""


def run(step: Step, knobs: Knobs, device: torch.device, steps: int, sites: Sites | None = None) -> RealRun:
    """Run some steps with knobs on a real device, then a few more to time them.

    The weights are copied to the device. Afterwards the model holds its own weights again, and everything else that it
    held before. `sites` are where activations may overwrite their input.

    >>> from memexplore.run.programs.step import Step
    >>> linear = torch.nn.Linear(256, 256, bias=False)
    >>> result = run(Step(linear, torch.zeros(4, 256), loss=torch.mean), Knobs(), torch.device("cpu"), steps=2)
    >>> from memexplore.tape import Category
    >>> int(result.tape.size[(result.tape.category == Category.PARAMETER)].sum())  # 256 * 256 weights of 4 bytes
    262144

    Raises what the step raises, except running out of memory on a GPU; ValueError for a model without values.
    """
    model = built_real_model(step)
    prepared = _prepared(step, model, knobs)
    with preserve_device(device):
        tape, applied = _recorded(prepared, model, knobs, device, steps, sites)
        seconds = _timed(prepared, model, knobs, device, sites) if fits(tape) else math.nan
    return RealRun(tape, applied, seconds)


def _prepared(step: Step, model: torch.nn.Module, knobs: Knobs) -> Step:
    """Return the step with a copy of the knobs' batch on the CPU; raise ValueError if it has no values."""
    for tensor in (*model.parameters(), *model.buffers(), *batches.tensors(step.batch)):
        if is_virtual(tensor) or tensor.is_meta:
            raise ValueError(
                "the model or the batch was made on a virtual GPU and has no values to run with: create it again with "
                "no virtual GPU on, or let model= be a function that builds it"
            )
    batch = step.batch_of(knobs.batch, knobs.input_size)
    batch = batches.mapped(lambda value: value.detach().to("cpu", copy=True), batch)
    return dataclasses.replace(step, batch=batch, samples=knobs.batch or step.samples)


def _recorded(
    step: Step, model: torch.nn.Module, knobs: Knobs, device: torch.device, steps: int, sites: Sites | None
) -> tuple[Tape, ApplyReport]:
    applied = ApplyReport()
    kept: list[Any] = []
    with _model_on_cpu(model), contextlib.ExitStack() as stack:
        with record(device, Unrelated.DROPPED) as recording, ending_out_of_memory(recording):
            recording.end_stacks_at(sys._getframe())
            applied = _train(step, model, knobs, device, range(steps), sites, stack, kept).completed()
        kept.clear()
    return recording.tape, applied.without_pending()


def _timed(step: Step, model: torch.nn.Module, knobs: Knobs, device: torch.device, sites: Sites | None) -> float:
    """Return the seconds of one step without recording: the fastest of several, after one to warm up.

    The fastest, because other processes may use the machine too.
    """
    seconds: list[float] = []
    clock = _clock(device)

    def steps() -> Iterator[int]:
        yield 0
        while not seconds or (len(seconds) < _TIMED_STEPS and sum(seconds) < _TIMED_SECONDS):
            start = clock()
            yield len(seconds) + 1
            seconds.append(clock() - start)

    with _model_on_cpu(model), contextlib.ExitStack() as stack, ending_out_of_memory():
        _train(step, model, knobs, device, steps(), sites, stack, [])
    return min(seconds, default=math.nan)


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def _train(
    step: Step,
    model: torch.nn.Module,
    knobs: Knobs,
    device: torch.device,
    steps: Iterable[int],
    sites: Sites | None,
    stack: contextlib.ExitStack,
    kept: list[Any],
) -> ApplyReport:
    """Copy model and batch to the device and train there; closing `stack` restores the model."""
    _copy(model, device, loop_of(knobs, step.batch_size).dtype)
    if device.type == "cpu":
        # On a GPU the training loop copies every micro-batch.
        step = dataclasses.replace(step, batch=batches.mapped(torch.clone, step.batch))
    applied = stack.enter_context(apply_to_step(of_model_in_loop(knobs), model, sites))
    return applied + training_loop.train(step, knobs, model, steps, kept)


def _copy(model: torch.nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Do what `model.to(device, dtype)` does, but copy tensors that are on the device already."""
    copies: set[int] = set()

    def copied(value: torch.Tensor) -> torch.Tensor:
        # A weight that several modules share comes several times.
        if storage_key(value.untyped_storage()) in copies:
            return value
        floating = value.is_floating_point() or value.is_complex()
        result = value.to(device, dtype if floating else None, copy=True)
        copies.add(storage_key(result.untyped_storage()))
        return result

    apply_of(model)(copied)


@contextlib.contextmanager
def preserve_device(device: torch.device) -> Iterator[None]:
    """Preserve the memory of a real device and all random states for the block, the run of one setting."""
    gpus = [device] if device.type == "cuda" else []
    with preserve_random_states(), torch.random.fork_rng(gpus, device_type="cuda"), isolation.isolated(device):
        try:
            yield
        except BaseException as error:
            without_locals(error)
            raise


@contextlib.contextmanager
def _model_on_cpu(model: torch.nn.Module) -> Iterator[None]:
    """Move a model to the CPU for the block, without gradients, and preserve its state and its memory."""
    with preserve_model_state(model), preserve_weight_storage(model):
        if any(not weight.is_cpu for weight in model.parameters()):
            # A recording of a GPU does not see the CPU: the copies that the run makes are then all on the tape.
            apply_of(model)(lambda value: value.to("cpu"))
        yield
