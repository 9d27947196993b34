"""Remember what runs of a `Step` can use again: the models built, the traces, the legal in-place sites.

Each step object has one `StepRecord`, in a table of this module that holds the step by a weak reference. So the record
is dropped with the step, and a step stays a plain value that can be copied and pickled.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memexplore.recorder.recording import predicted
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import virtual
from memexplore.run.programs.cost import Cost
from memexplore.run.programs.scratch_requests import with_scratch_of
from memexplore.run.programs.trace_reuse import FirstStep, Requests, Trace
from memexplore.tape import Ending, Meta, Tape
from memexplore.virtual_gpu.device import VirtualGpu

if TYPE_CHECKING:
    from memexplore.run.programs.step import Step

_KEPT_TRACES = 48
"""Entries of each table that are kept for one step; a trace of Llama 7B takes 2 MB."""
_KEPT_SIMILAR = 4
"""Traces kept for one setting that differ in the sequence of requests: some ops take another path from some size on."""


class TracedSetting(NamedTuple):
    """A setting that was traced or derived, with the data that its run on another GPU needs."""

    trace: Requests
    applied: ApplyReport
    cost: Cost
    assumptions: tuple[str, ...]
    """Notes of the tape about values that a virtual tensor does not have."""
    traced: Meta
    """Metadata of the tape, for its place among the ranks of several GPUs."""

    def tape_on(self, gpu: VirtualGpu) -> Tape | None:
        """Return the tape on a virtual GPU; None if a request does not fit."""
        return self.trace.on_allocator(self._meta(gpu), gpu.settings)

    def tape_until_failure(self, gpu: VirtualGpu) -> Tape | None:
        """Return the tape on a virtual GPU up to the request that ends it; None as `Trace.until_failure`."""
        return self.trace.until_failure(self._meta(gpu), gpu.settings)

    def _meta(self, gpu: VirtualGpu) -> Meta:
        meta = predicted(gpu)
        return meta._replace(
            notes=(*meta.notes, *self.assumptions),
            ending=Ending.COMPLETED,
            rank=self.traced.rank,
            world=self.traced.world,
            communicators=self.traced.communicators,
        )


@dataclasses.dataclass(eq=False)
class StepRecord:
    """Results of the runs of one step. Keys of the tables are settings together with the rules of the kernels."""

    virtual_model: torch.nn.Module | None = None
    """The model that `Step.model` built on a virtual GPU."""
    real_model: torch.nn.Module | None = None
    """The model that `Step.model` built on the CPU, for runs on a real device."""
    settings: dict[Any, TracedSetting] = dataclasses.field(default_factory=dict)
    """By knobs without GPU and allocator settings."""
    traces: dict[Any, tuple[Trace, ...]] = dataclasses.field(default_factory=dict)
    """By knobs without GPU, allocator settings, batch and input size; newest first."""
    sites: dict[tuple[Knobs, Any], Sites] = dataclasses.field(default_factory=dict)
    """Legal in-place sites, by the knobs of the run that found them."""

    def setting(self, knobs: Knobs, gpu: VirtualGpu) -> TracedSetting | None:
        """Return the traced setting with these knobs, from any GPU on which the same kernels run; else None."""
        return self.settings.get(_same_requests(knobs, gpu))

    def settings_by_batch(self, knobs: Knobs, gpu: VirtualGpu, written: int) -> dict[int, TracedSetting]:
        """Return the traced settings that differ from these knobs in the batch only; `written` is the step's own."""
        wanted = _same_requests(knobs.replace(batch=None), gpu)
        return {
            setting.batch or written: traced
            for (setting, rules), traced in self.settings.items()
            if (setting.replace(batch=None), rules) == wanted
        }

    def has_traces(self, knobs: Knobs, gpu: VirtualGpu) -> bool:
        """Return whether a run with these knobs, but for batch and input size, was traced."""
        return _same_code(knobs, gpu) in self.traces

    def similar(self, knobs: Knobs, gpu: VirtualGpu, first: FirstStep) -> Trace | None:
        """Return the trace of a run from its first step and a trace of another batch or input size; else None."""
        return self._derived(knobs, gpu, lambda trace: trace.resized(first), first, lambda trace: len(trace.first.size))

    def continued(self, knobs: Knobs, gpu: VirtualGpu, begun: FirstStep) -> Trace | None:
        """Return the trace of a run from its first step up to the update and an earlier trace; else None."""
        return self._derived(
            knobs,
            gpu,
            lambda trace: trace.continued(begun),
            begun,
            lambda trace: -1 if trace.update is None else trace.update.row,
        )

    def _derived(
        self,
        knobs: Knobs,
        gpu: VirtualGpu,
        derive: Callable[[Trace], Trace | None],
        begun: FirstStep,
        end: Callable[[Trace], int],
    ) -> Trace | None:
        """Return what can be derived from a kept trace, or from one with other scratch requests, which is kept too.

        `end` is the row of the first step of a trace up to which `begun` goes, -1 if it cannot be used.
        """
        traces = self.traces.get(_same_code(knobs, gpu), ())
        for trace in traces:
            if (trace_of_run := derive(trace)) is not None:
                return trace_of_run
        for trace in traces:
            variant = with_scratch_of(trace, begun, end(trace)) if end(trace) >= 0 else None
            if variant is not None and (trace_of_run := derive(variant)) is not None:
                self.add_trace(knobs, gpu, variant)
                return trace_of_run
        return None

    def add_trace(self, knobs: Knobs, gpu: VirtualGpu, trace: Trace) -> None:
        """Keep the trace of two steps for other batches and input sizes."""
        key = _same_code(knobs, gpu)
        _keep(self.traces, key, (trace, *self.traces.get(key, ()))[:_KEPT_SIMILAR])

    def add_setting(self, knobs: Knobs, gpu: VirtualGpu, setting: TracedSetting) -> None:
        """Keep a setting for other GPUs and allocator settings."""
        _keep(self.settings, _same_requests(knobs, gpu), setting)

    def add_sites(self, knobs: Knobs, gpu: VirtualGpu, sites: Sites) -> None:
        """Keep the in-place sites that a run with these knobs found."""
        _keep(self.sites, (knobs, gpu.rules), sites)


def _same_requests(knobs: Knobs, gpu: VirtualGpu) -> Any:
    return knobs.replace(gpu=None, settings=None), gpu.rules


def _same_code(knobs: Knobs, gpu: VirtualGpu) -> Any:
    return knobs.replace(gpu=None, settings=None, batch=None, input_size=None), gpu.rules


def _keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    table.pop(key, None)
    table[key] = value
    while len(table) > _KEPT_TRACES:
        del table[next(iter(table))]


_records: weakref.WeakKeyDictionary[Step, StepRecord] = weakref.WeakKeyDictionary()


def record_of(step: Step) -> StepRecord:
    """Return the record of a step, empty at first."""
    return _records.setdefault(step, StepRecord())


def built_model(step: Step) -> torch.nn.Module:
    """Return the step's model, built once on a virtual GPU where `Step.model` is a function that builds it."""
    if isinstance(step.model, torch.nn.Module):
        return step.model
    record = record_of(step)
    if record.virtual_model is None:
        with virtual("192GiB"):
            record.virtual_model = step.model()
    return record.virtual_model


def built_real_model(step: Step) -> torch.nn.Module:
    """Return the step's model, built once on the CPU where `Step.model` is a function that builds it."""
    if isinstance(step.model, torch.nn.Module):
        return step.model
    record = record_of(step)
    if record.real_model is None:
        record.real_model = step.model()
    return record.real_model
