"""One run of a step with given knobs, on a virtual GPU or on a real device.

In: a `Step`, `Knobs` and the name of a GPU. Out: a `Trial`, the tape of two steps with the applied knobs and the cost.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from memexplore import capture, targets
from memexplore.allocator.placement import system_of
from memexplore.analysis.curves import peak
from memexplore.gpu_catalogue import Gpu
from memexplore.knobs.apply import apply_to_step
from memexplore.knobs.choices import InPlace, Optimizer, Precision, Update
from memexplore.knobs.conflicts import refuse_conflicts
from memexplore.knobs.facts import Note, NoteKind
from memexplore.knobs.inplace.legal import legal_sites, observed
from memexplore.knobs.inplace.sites import Sites
from memexplore.knobs.knobs import Knobs
from memexplore.knobs.layouts import ON_ONE_GPU, several
from memexplore.knobs.model_state import preserve_model_state, preserve_random_states
from memexplore.knobs.report import ApplyReport
from memexplore.steps import optimizers, parallel, real_run, training_loop
from memexplore.steps.cost import Cost, Meter, measuring
from memexplore.steps.step import Step
from memexplore.steps.step_record import StepRecord, TracedSetting, built_model, record_of
from memexplore.steps.trace_reuse import FirstStep, FirstUpdate, Trace, first_step, requests_of, reusable_trace
from memexplore.steps.weights_on_cpu import virtual_tensors_on_cpu
from memexplore.tape import Meta, Os, Tape
from memexplore.texts import encodable
from memexplore.units import size_text
from memexplore.virtual_gpu.device import VirtualGpu
from memexplore.virtual_gpu.tensors import values

_FROZEN_AT_START = 1000
"""Python 3.12 has frozen some 400 objects when a program begins; `gc.freeze()` freezes thousands."""
STEPS = 2
"""The first step creates the optimizer's state, so only the second is like all later ones."""


class Trial(NamedTuple):
    """One setting that was run; the tape ends with an `oom` row if it does not fit."""

    knobs: Knobs
    tape: Tape
    applied: ApplyReport
    cost: Cost
    """Of the first step."""
    seconds: float = math.nan
    """Of one step, measured on a real device; not a number where the tape is predicted or ends out of memory."""


def run(
    step: Step,
    knobs: Knobs | None = None,
    *,
    gpu: str | Gpu | None = None,
    release: str | None = None,
    os: str = Os.LINUX,
) -> Trial:
    """Run two steps with some knobs, on a virtual GPU or on a real device.

    `gpu` is a name of the catalogue or a size, which mean a virtual GPU, ``cuda`` for the real GPU of this machine, or
    ``cpu`` for its CPU. Default: the real GPU if usable, else a virtual T4. A GPU that the knobs name comes
    first; it is virtual, and so is a GPU under other allocator settings. On a virtual GPU, `release` is the torch
    release whose rules apply and `os` the operating system whose driver places segments (`capture.virtual`). The model
    is restored afterwards. On a virtual GPU earlier traces of the step are reused (see `trace_reuse`); the tape is
    equal to that of `traced`.

    >>> linear = torch.nn.Linear(1024, 1024, bias=False)
    >>> trial = run(Step(linear, torch.zeros(4, 1024), loss=torch.mean, optimizer=torch.optim.SGD))
    >>> from memexplore.tape import Category
    >>> int(trial.tape.size[trial.tape.category == Category.PARAMETER].sum())  # 1024 * 1024 weights of 4 bytes
    4194304

    Raises what the step raises, except running out of memory on a GPU; ValueError for knobs that do not suit the step
    or the device; MemoryError for a setting that needs more memory than this machine's CPU has.
    """
    knobs = knobs or Knobs()
    target = target_of(knobs, gpu)
    if isinstance(target, str) and targets.is_real(target):
        return _run_on_real_device(step, knobs, target, release)
    derived = derived_trial(step, knobs, gpu, release, os)
    return derived or _run(step, knobs, virtual_gpu(knobs, gpu, release, os), record_of(step))


def traced(
    step: Step,
    knobs: Knobs | None = None,
    *,
    gpu: str | Gpu | None = None,
    release: str | None = None,
    os: str = Os.LINUX,
) -> Trial:
    """Run two steps on a virtual GPU op by op, without reuse of earlier traces; for the arguments see `run`."""
    knobs = knobs or Knobs()
    return _run(step, knobs, virtual_gpu(knobs, gpu, release, os), None)


def is_traced(step: Step, knobs: Knobs, gpu: str | Gpu | None, release: str | None) -> bool:
    """Return whether a setting was run on a virtual GPU with the same kernels, so that its requests are recorded."""
    return record_of(step).setting(knobs, virtual_gpu(knobs, gpu, release)) is not None


def traced_on_unlimited(
    step: Step, knobs: Knobs, gpu: str | Gpu | None, release: str | None, os: str = Os.LINUX
) -> bool:
    """Trace a setting on a virtual GPU with unlimited memory, if runs with similar ones were traced.

    Return whether the setting is traced: then `derived_trial` gives its trials. Raises as `run` does.
    """
    target, record = virtual_gpu(knobs, gpu, release, os), record_of(step)
    if record.setting(knobs, target) is None and record.has_traces(knobs, target):
        unlimited = capture.unlimited(target.gpu)
        _observed(step, knobs, virtual_gpu(knobs.replace(gpu=None), unlimited, release, os), record)
    return record.setting(knobs, target) is not None


def failing_trial(
    step: Step, knobs: Knobs, gpu: str | Gpu | None, release: str | None, os: str = Os.LINUX
) -> Trial | None:
    """Return the trial of a traced setting up to the request that does not fit, without what Python frees after it.

    None if it was not traced, if it fits, and where only a run says which request ends it.
    """
    target = virtual_gpu(knobs, gpu, release, os)
    setting = record_of(step).setting(knobs, target)
    tape = None if setting is None else setting.tape_until_failure(target)
    return None if setting is None or tape is None else Trial(knobs, tape, setting.applied, setting.cost)


def derived_trial(
    step: Step, knobs: Knobs, gpu: str | Gpu | None, release: str | None, os: str = Os.LINUX
) -> Trial | None:
    """Return the trial of a setting without a run; None if it was not traced, or does not fit the virtual GPU."""
    target = virtual_gpu(knobs, gpu, release, os)
    setting = record_of(step).setting(knobs, target)
    tape = None if setting is None else setting.tape_on(target)
    return None if setting is None or tape is None else Trial(knobs, tape, setting.applied, setting.cost)


def target_of(knobs: Knobs, gpu: str | Gpu | None) -> str | Gpu:
    """Return where a run takes place: the GPU that the knobs name, else `gpu`, else the default target.

    Allocator settings are those of the whole process, and other tensors live under them: with other settings, and on
    several GPUs, a run takes place on the virtual GPU that has the numbers of the real one.

    >>> target_of(Knobs(gpu="T4"), "cpu"), target_of(Knobs(batch=4), "cpu")
    ('T4', 'cpu')

    Raises ValueError for allocator settings and several GPUs on the CPU.
    """
    if knobs.gpu is not None:
        return knobs.gpu
    gpu = gpu or targets.default_target()
    if not targets.is_real(gpu) or (knobs.settings is None and not several(knobs)):
        return gpu
    if gpu == targets.CPU and several(knobs):
        raise ValueError("gpus= are several GPUs, and this target is a CPU: name a GPU as well, such as gpu='T4'")
    if gpu == targets.CPU:
        raise ValueError("settings= are those of the allocator of a GPU, which a CPU does not have: name a GPU as well")
    return targets.gpu_of(gpu)


def virtual_gpu(knobs: Knobs, gpu: str | Gpu | None, release: str | None, os: str = Os.LINUX) -> VirtualGpu:
    """Return the virtual GPU of a trial, switched off."""
    settings = capture.settings_of(knobs.settings or "")
    device = targets.gpu_of(target_of(knobs, gpu))
    return VirtualGpu(device, capture.release_or_installed(release), settings, system_of(os))


# --- on a real device -----------------------------------------------------------------------------------------------


def _run_on_real_device(step: Step, knobs: Knobs, target: str, release: str | None) -> Trial:
    """Run a step on a real device; FLOPs and in-place sites come from the virtual GPU with its numbers."""
    device = targets.real_device(target, release)
    twin = targets.predicted_as(target)
    cost, sites = Cost(), None
    notes: tuple[Note, ...] = ()
    try:
        sites = _sites(step, knobs, virtual_gpu(knobs, twin, None))
        predicted = run(step, knobs, gpu=capture.unlimited(twin))
    except Exception as error:
        # An error of the knobs or of the step is raised by the real run as well.
        notes = (Note(NoteKind.NO_FLOPS, (type(error).__name__, str(error))),)
    else:
        cost = predicted.cost
        if target == targets.CPU:
            _check_memory(knobs, peak(predicted.tape)[0])
    result = real_run.run(step, knobs, device, STEPS, sites)
    applied = result.applied._replace(notes=(*result.applied.notes, *notes))
    return Trial(knobs, result.tape, applied, cost, result.seconds)


def _check_memory(knobs: Knobs, needed: int) -> None:
    # A GPU raises an error; the system kills a process that takes the last memory of the machine.
    left = targets.available_system_memory()
    if needed > left:
        raise MemoryError(
            f"{knobs}: not run, as it would need {size_text(needed)} by prediction and this machine has "
            f"{size_text(left)} left; take a smaller batch, or a virtual GPU"
        )


# --- on a virtual GPU -----------------------------------------------------------------------------------------------


def _run(step: Step, knobs: Knobs, target: VirtualGpu, record: StepRecord | None) -> Trial:
    """Run a step on a virtual GPU; with a record, reuse its traces and add to them."""
    observed = _observed(step, knobs, target, record)
    if isinstance(observed, Trial):
        return observed
    tape = observed.setting.trace.on_allocator(observed.meta, target.settings)
    if tape is None:
        return _run(step, knobs, target, None)
    return Trial(knobs, tape, observed.setting.applied, observed.setting.cost)


class _Continued(NamedTuple):
    """A run that an earlier trace continues: its requests, and the metadata of its tape."""

    setting: TracedSetting
    meta: Meta


def _observed(step: Step, knobs: Knobs, target: VirtualGpu, record: StepRecord | None) -> Trial | _Continued:
    """Run a step on a virtual GPU until its end, or until a trace of the record has all that follows."""
    refuse_conflicts(knobs)  # before the model is distributed
    model = built_model(step)
    sites = _sites(step, knobs, target)
    applied = ApplyReport()
    kept: list[Any] = []
    begun: FirstStep | None = None
    trace: Trace | None = None
    cost = Cost()
    meter: Meter | None = None
    before_update: tuple[int, Cost, tuple[str, ...]] | None = None  # rows, cost and notes

    def steps() -> Iterator[int]:
        nonlocal begun, trace, cost, meter
        with measuring(device.mode) as meter:
            yield 0
        cost = meter.total()
        if record is not None:
            begun = first_step(recording.events(), recording.tensors())
            trace = record.similar(knobs, target, begun)
        if trace is None:
            yield 1

    def is_known_from(optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an earlier trace has all that follows; called before the first and the second update."""
        nonlocal begun, trace, cost, before_update
        if record is None or begun is not None or meter is None or not optimizers.depends_on_parameters_only(optimizer):
            return False
        first = first_step(recording.events(), recording.tensors())
        trace = record.continued(knobs, target, first)
        if trace is None or trace.update is None:
            notes = (*map(encodable, values.assumptions), *recording.sharing_notes())
            before_update = len(first.size), meter.total(), notes
            return False
        begun, cost = trace.first, Cost((*meter.works, *trace.update.works), tuple(meter.traffic))
        return True

    with (
        _undisturbed(),
        preserve_model_state(model),
        capture.virtual(
            target.gpu, release=target.release, settings=str(target.settings), os=target.os, world=knobs.gpus
        ) as device,
        virtual_tensors_on_cpu(model),
        parallel.own_tensors(knobs, model) as originals,
        contextlib.ExitStack() as stack,
    ):
        with capture.record() as recording, recording.ending_out_of_memory():
            recording.end_stacks_at(sys._getframe())
            apply = functools.partial(_apply, stack, knobs, model, sites)
            across = None
            if several(knobs):
                across = parallel.wrapped(step.optimizer, knobs, model, originals, apply)
                applied = across.applied
            else:
                # As a training script does: all-bf16 weights are cast on the way, so fp32 weights are never on the GPU.
                model.to("cuda", torch.bfloat16 if knobs.precision is Precision.ALL_BF16 else None)
                applied = apply()
            applied += training_loop.train(step, knobs, model, steps(), kept, is_known_from, across)
            applied = applied.completed()
        kept.clear()
        across = None
        applied = applied.without_pending()  # a run that ended out of memory has not called every module
        depends_on_memory = device.properties_read
    tape = recording.tape
    depends_on_timing = tape.meta.late_reserved is not None or tape.meta.early_allocated is not None
    if record is None or depends_on_memory or begun is None or depends_on_timing:
        return Trial(knobs, tape, applied, cost)
    assumptions = tape.meta.notes[len(capture.predicted(target).notes) :]
    if trace is None:
        update = None
        if before_update is not None:
            rows, before, notes = before_update
            # A note of the update, and what it sends, would be missing in a run that ends before it.
            is_alone = notes == assumptions and cost.traffic == before.traffic
            update = FirstUpdate(rows, cost.works[len(before.works) :]) if is_alone else None
        requests = requests_of(tape)
        if requests is not None:
            trace = reusable_trace(begun, requests, update)
            if trace is not None:
                record.add_trace(knobs, target, trace)
            record.add_setting(knobs, target, TracedSetting(trace or requests, applied, cost, assumptions, tape.meta))
        return Trial(knobs, tape, applied, cost)
    setting = TracedSetting(trace, applied, cost, assumptions, tape.meta)
    record.add_setting(knobs, target, setting)
    return _Continued(setting, tape.meta)


def _apply(stack: contextlib.ExitStack, knobs: Knobs, model: torch.nn.Module, sites: Sites | None) -> ApplyReport:
    """Apply the knobs of a model on a virtual GPU until a stack is closed."""
    cuda = torch.device("cuda", 0)
    return stack.enter_context(apply_to_step(training_loop.knobs_to_apply(knobs), model, sites, cuda))


def _sites(step: Step, knobs: Knobs, target: VirtualGpu) -> Sites | None:
    """Return where activations may overwrite their input in a step with these knobs; one more run finds them."""
    if knobs.inplace is InPlace.AS_WRITTEN:
        return None
    plain = knobs.replace(
        inplace=InPlace.AS_WRITTEN,
        optimizer=Optimizer.SGD,
        update=Update.AS_WRITTEN,
        batch=(knobs.batch or step.batch_size) // (knobs.accumulation or 1),
        accumulation=None,
        gpu=None,
        settings=None,
        **ON_ONE_GPU,
    )
    record = record_of(step)
    sites = record.sites.get((plain, target.rules))
    if sites is None:
        model = built_model(step)
        with (
            _undisturbed(),
            preserve_model_state(model),
            capture.virtual(capture.unlimited(target.gpu), release=target.release),
            virtual_tensors_on_cpu(model),
        ):
            model.to("cuda", torch.bfloat16 if knobs.precision is Precision.ALL_BF16 else None)
            # Outermost, or a call in a checkpointed forward is not recognised when it is recomputed.
            with observed(model), apply_to_step(training_loop.knobs_to_apply(plain), model):
                sites = legal_sites(lambda: training_loop.train(step, plain, model, range(1), []), model)
        record.add_sites(plain, target, sites)
    return sites


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the random states, and keep the garbage collector from scanning older objects (150 ms of a 200 ms run)."""
    with preserve_random_states():
        if gc.get_freeze_count() > _FROZEN_AT_START:  # by the caller: unfreeze() would give them back
            yield
            return
        try:
            gc.freeze()
            yield
        finally:
            gc.unfreeze()
