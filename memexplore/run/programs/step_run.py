"""Execute a step with knobs, on a virtual GPU or on a real device, with reuse of what earlier runs have recorded."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memexplore.allocator import Settings
from memexplore.analysis.curves import peak
from memexplore.recorder import recording as recorder
from memexplore.run.knobs.applying.apply import apply_to_step, loop_of, of_model_in_loop
from memexplore.run.knobs.applying.model_state import preserve_model_state, preserve_random_states
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.gpus import several
from memexplore.run.knobs.inplace import InPlace
from memexplore.run.knobs.inplace_sites.legal import legal_sites, observed
from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.run.knobs.knob import Group
from memexplore.run.knobs.knobs import Knobs, refuse_conflicts
from memexplore.run.knobs.optimizer import Optimizer
from memexplore.run.knobs.update import Update
from memexplore.run.machine import Kind, Machine, available_system_memory
from memexplore.run.programs import optimizers, parallel, real_run, training_loop
from memexplore.run.programs.cost import Cost, Meter, measuring
from memexplore.run.programs.execution import Execution
from memexplore.run.programs.step_record import StepRecord, TracedSetting, built_model, record_of
from memexplore.run.programs.trace_reuse import FirstStep, FirstUpdate, Trace, first_step, requests_of, reusable_trace
from memexplore.run.programs.weights_on_cpu import virtual_tensors_on_cpu
from memexplore.tape import Meta, Tape
from memexplore.text.units import size_text
from memexplore.text.untrusted import encodable
from memexplore.virtual_gpu.device import VirtualGpu
from memexplore.virtual_gpu.values.notes import notes_of_run

if TYPE_CHECKING:
    from memexplore.run.programs.step import Step

_FROZEN_AT_START = 1000
"""Python 3.12 has frozen some 400 objects when a program begins; `gc.freeze()` freezes thousands."""
STEPS = 2
"""The first step creates the optimizer's state, so only the second is like all later ones."""


def execute(step: Step, knobs: Knobs, machine: Machine) -> Execution:
    """Execute two steps with some knobs on a machine, which has the GPU and the settings of the knobs already.

    The model is restored afterwards. On a virtual GPU earlier traces of the step are reused (see `trace_reuse`); the
    tape is equal to the tape of `traced`.

    >>> from memexplore.run.machine import machine_of
    >>> from memexplore.run.programs.step import Step
    >>> linear = torch.nn.Linear(1024, 1024, bias=False)
    >>> step = Step(linear, torch.zeros(4, 1024), loss=torch.mean, optimizer=torch.optim.SGD)
    >>> tape = execute(step, Knobs(), machine_of("T4")).tape
    >>> from memexplore.tape import Category
    >>> int(tape.size[tape.category == Category.PARAMETER].sum())  # 1024 * 1024 weights of 4 bytes
    4194304

    Raises what the step raises, except running out of memory on a GPU; ValueError for knobs that do not suit the step
    or the device; MemoryError for a setting that needs more memory than this machine's CPU has.
    """
    if not machine.is_virtual:
        return _execute_on_real_device(step, knobs, machine)
    return derived(step, knobs, machine) or _execute(step, knobs, machine, record_of(step))


def traced(step: Step, knobs: Knobs, machine: Machine) -> Execution:
    """Execute two steps on a virtual GPU op by op, without reuse of earlier traces."""
    return _execute(step, knobs, machine, None)


def is_traced(step: Step, knobs: Knobs, machine: Machine) -> bool:
    """Return whether a setting was run on a virtual GPU with the same kernels, so that its requests are recorded."""
    return record_of(step).setting(knobs, machine.virtual_gpu()) is not None


def trace_on_unlimited(step: Step, knobs: Knobs, machine: Machine) -> bool:
    """Trace a setting on a virtual GPU with unlimited memory, if runs with similar ones were traced.

    Return whether the setting is traced: then `derived` gives its executions. Raises as `execute` does.
    """
    gpu, record = machine.virtual_gpu(), record_of(step)
    if record.setting(knobs, gpu) is None and record.has_traces(knobs, gpu):
        _observed(step, knobs, machine.unlimited(), record)
    return record.setting(knobs, gpu) is not None


def failing(step: Step, knobs: Knobs, machine: Machine) -> Execution | None:
    """Return the execution of a traced setting up to the request that does not fit, without what Python frees after it.

    None if it was not traced, if it fits, and where only a run says which request ends it.
    """
    return _placed(step, knobs, machine, TracedSetting.tape_until_failure)


def derived(step: Step, knobs: Knobs, machine: Machine) -> Execution | None:
    """Return the execution of a setting without a run; None if it was not traced, or does not fit the virtual GPU."""
    return _placed(step, knobs, machine, TracedSetting.tape_on)


def _placed(
    step: Step, knobs: Knobs, machine: Machine, place: Callable[[TracedSetting, VirtualGpu], Tape | None]
) -> Execution | None:
    gpu = machine.virtual_gpu()
    setting = record_of(step).setting(knobs, gpu)
    tape = None if setting is None else place(setting, gpu)
    if setting is None or tape is None:
        return None
    return execution_of(step, knobs, tape, setting.applied, setting.cost)


def execution_of(
    step: Step, knobs: Knobs, tape: Tape, applied: ApplyReport, cost: Cost, seconds: float = math.nan
) -> Execution:
    """Return the execution of a step, with its samples."""
    return Execution(knobs, tape, applied, cost, seconds, knobs.batch or step.batch_size)


# --- on a real device -----------------------------------------------------------------------------------------------


def _execute_on_real_device(step: Step, knobs: Knobs, machine: Machine) -> Execution:
    """Run a step on a real device; FLOPs and in-place sites come from the virtual GPU with its numbers."""
    device = machine.device
    twin = machine.twin()
    cost, sites = Cost(), None
    notes: tuple[str, ...] = ()
    try:
        sites = _sites(step, knobs, twin)
        twin_run = execute(step, knobs, twin.unlimited())
    except Exception as error:
        # An error of the knobs or of the step is raised by the real run as well.
        notes = (f"FLOPs are unknown, since no virtual GPU can run this step: {type(error).__name__}: {error}",)
    else:
        cost = twin_run.cost
        if machine.kind is Kind.CPU:
            _check_memory(knobs, peak(twin_run.tape)[0])
    result = real_run.run(step, knobs, device, STEPS, sites)
    applied = result.applied._replace(notes=(*result.applied.notes, *notes))
    return execution_of(step, knobs, result.tape, applied, cost, result.seconds)


def _check_memory(knobs: Knobs, needed: int) -> None:
    # A GPU raises an error; the system kills a process that takes the last memory of the machine.
    left = available_system_memory()
    if needed > left:
        raise MemoryError(
            f"{knobs}: not run, as it would need {size_text(needed)} by prediction and this machine has "
            f"{size_text(left)} left; take a smaller batch, or a virtual GPU"
        )


# --- on a virtual GPU -----------------------------------------------------------------------------------------------


def _execute(step: Step, knobs: Knobs, machine: Machine, record: StepRecord | None) -> Execution:
    """Run a step on a virtual GPU; with a record, reuse its traces and add to them."""
    observed = _observed(step, knobs, machine, record)
    if isinstance(observed, Execution):
        return observed
    tape = observed.setting.trace.on_allocator(observed.meta, Settings.parse(machine.settings))
    if tape is None:
        return _execute(step, knobs, machine, None)
    return execution_of(step, knobs, tape, observed.setting.applied, observed.setting.cost)


class _Continued(NamedTuple):
    """A run that an earlier trace continues: its requests, and the metadata of its tape."""

    setting: TracedSetting
    meta: Meta


def _observed(step: Step, knobs: Knobs, machine: Machine, record: StepRecord | None) -> Execution | _Continued:
    """Run a step on a virtual GPU until its end, or until a trace of the record has all that follows."""
    refuse_conflicts(knobs)  # before the model is distributed
    model, sites = built_model(step), _sites(step, knobs, machine)
    applied = ApplyReport()
    kept: list[Any] = []

    with (
        _undisturbed(),
        preserve_model_state(model),
        machine.turned_on() as device,
        virtual_tensors_on_cpu(model),
        parallel.own_tensors(knobs, model) as originals,
        contextlib.ExitStack() as stack,
    ):
        with recorder.record() as recording, recording.ending_out_of_memory():
            recording.end_stacks_at(sys._getframe())
            reuse = _Reuse(step, record, knobs, recording, device)
            apply = functools.partial(_apply, stack, knobs, model, sites)
            across, dtype = None, loop_of(knobs, step.batch_size).dtype
            if several(knobs):
                across = parallel.wrapped(step.optimizer, knobs, model, originals, dtype, apply)
                applied = across.applied
            else:
                # As a training script does: all-bf16 weights are cast on the way, so fp32 weights are never on the GPU.
                model.to("cuda", dtype)
                applied = apply()
            applied += training_loop.train(step, knobs, model, reuse.steps(), kept, reuse.is_known_from, across)
            applied = applied.completed()
        kept.clear()
        across = None
        applied = applied.without_pending()  # a run that ended out of memory has not called every module
        depends_on_memory = device.properties_read
    if depends_on_memory:
        return execution_of(step, knobs, recording.tape, applied, reuse.cost)
    return reuse.execution(recording.tape, applied)


class _Reuse:
    """Of a run: its steps, until an earlier trace has all that follows, and what is kept of it for later runs."""

    def __init__(
        self, step: Step, record: StepRecord | None, knobs: Knobs, recording: recorder.Recording, gpu: VirtualGpu
    ) -> None:
        self._step, self._record, self._knobs = step, record, knobs
        self._recording, self._gpu = recording, gpu
        self.cost = Cost()
        """Of the first step, after it."""
        self._meter: Meter | None = None
        self._begun: FirstStep | None = None
        self._trace: Trace | None = None
        """The trace of the whole run, where it continues an earlier one."""
        self._before_update: tuple[int, Cost, tuple[str, ...]] | None = None
        """Rows, cost and notes."""

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps to run: the second one only where no trace has it."""
        with measuring(self._gpu) as self._meter:
            yield 0
        self.cost = self._meter.total()
        if self._record is not None:
            self._begun = self._first_step()
            self._trace = self._record.similar(self._knobs, self._gpu, self._begun)
        if self._trace is None:
            yield 1

    def _first_step(self) -> FirstStep:
        """Return the first step so far."""
        recording = self._recording
        return first_step(recording.events(), recording.tensors(), recording.workspaces())

    def is_known_from(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an earlier trace has all that follows; called before the first and the second update."""
        record, meter = self._record, self._meter
        if record is None or self._begun is not None or meter is None:
            return False
        if not optimizers.depends_on_parameters_only(optimizer):
            return False
        first = self._first_step()
        trace = self._trace = record.continued(self._knobs, self._gpu, first)
        if trace is None or trace.update is None:
            notes = (*map(encodable, notes_of_run()), *self._recording.sharing_notes())
            self._before_update = len(first.size), meter.total(), notes
            return False
        self._begun = trace.first
        self.cost = Cost((*meter.works, *trace.update.works), tuple(meter.traffic))
        return True

    def execution(self, tape: Tape, applied: ApplyReport) -> Execution | _Continued:
        """Return the execution, and add its trace to the record; of a run that a trace continues, what it lacks."""
        execution = execution_of(self._step, self._knobs, tape, applied, self.cost)
        depends_on_timing = tape.meta.late_reserved is not None or tape.meta.early_allocated is not None
        if self._record is None or self._begun is None or depends_on_timing:
            return execution
        assumptions = tape.meta.notes[len(recorder.predicted(self._gpu).notes) :]
        if self._trace is not None:
            setting = TracedSetting(self._trace, applied, self.cost, assumptions, tape.meta)
            self._record.add_setting(self._knobs, self._gpu, setting)
            return _Continued(setting, tape.meta)
        requests = requests_of(tape)
        if requests is not None:
            trace = reusable_trace(self._begun, requests, self._update(assumptions))
            if trace is not None:
                self._record.add_trace(self._knobs, self._gpu, trace)
            setting = TracedSetting(trace or requests, applied, self.cost, assumptions, tape.meta)
            self._record.add_setting(self._knobs, self._gpu, setting)
        return execution

    def _update(self, assumptions: tuple[str, ...]) -> FirstUpdate | None:
        """Return the first update, None where it leaves a note or sends: a run that ends before it would lack these."""
        if self._before_update is None:
            return None
        rows, before, notes = self._before_update
        is_alone = notes == assumptions and self.cost.traffic == before.traffic
        return FirstUpdate(rows, self.cost.works[len(before.works) :]) if is_alone else None


def _apply(stack: contextlib.ExitStack, knobs: Knobs, model: torch.nn.Module, sites: Sites | None) -> ApplyReport:
    """Apply the knobs of a model on a virtual GPU until a stack is closed."""
    cuda = torch.device("cuda", 0)
    return stack.enter_context(apply_to_step(of_model_in_loop(knobs), model, sites, cuda))


def _sites(step: Step, knobs: Knobs, machine: Machine) -> Sites | None:
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
    ).without(Group.SEVERAL_GPUS)
    record, gpu = record_of(step), machine.virtual_gpu()
    sites = record.sites.get((plain, gpu.rules))
    if sites is None:
        model = built_model(step)
        with (
            _undisturbed(),
            preserve_model_state(model),
            machine.unlimited().replace(world=None, rank=0).turned_on(),
            virtual_tensors_on_cpu(model),
        ):
            model.to("cuda", loop_of(plain, step.batch_size).dtype)
            # Outermost, or a call in a checkpointed forward is not recognised when it is recomputed.
            with observed(model), apply_to_step(of_model_in_loop(plain), model):
                sites = legal_sites(lambda: training_loop.train(step, plain, model, range(1), []), model)
        record.add_sites(plain, gpu, sites)
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
