"""Keep a watched run in bounded memory: the rows of its steps, bytes of layers, tapes and leaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from memexplore.live.counters import PeakFrom, Reading
from memexplore.live.layer_history import LayerHistory
from memexplore.live.leaks import Leaks
from memexplore.live.reasons import UNEXPLAINED, Facts, reason, rises
from memexplore.live.recorded_steps import RecordedSteps
from memexplore.live.recording import Recording
from memexplore.live.schedule import Cause, Schedule
from memexplore.live.shapes import Shapes, byte_size, text
from memexplore.live.thinning import History
from memexplore.ranks.rows import StepRow, numbers
from memexplore.recorder.driver_memory import Outside
from memexplore.recorder.module_hooks import Names

_KNOWN_INPUTS = 512
Call = tuple[int, bool, Shapes]
"""A call of a model: number of the model, whether it is in training mode, shapes of its inputs."""
Calls = tuple[tuple[Call, ...], frozenset[Call]]
"""The calls of a step with gradients, in order, and the calls without."""


@dataclasses.dataclass
class Current:
    """The step that runs: what the hooks have noted so far."""

    number: int
    began: float
    """Seconds of `time.perf_counter`."""
    kept_before: int
    """Bytes allocated when the step began."""
    micro_batches: int = 0
    evaluations: int = 0
    validation_peak: int = 0
    evaluated: int | None = None
    """Number of the model that was called first without gradients."""
    inputs: tuple[Call, ...] = ()
    """The calls of models with gradients."""
    without_gradients: set[Call] = dataclasses.field(default_factory=set)
    """The different calls of models without gradients."""
    shapes: Shapes = ()
    """Of the call with the largest inputs."""
    layers: dict[int, int] = dataclasses.field(default_factory=dict)
    """Number of a layer -> bytes that it kept when its calls ended."""
    skipped: bool = False
    recorded: str = ""
    setting: str = ""
    """The knobs in effect, as text."""

    def called(self, call: Call) -> None:
        """Note a call of a model with gradients."""
        self.inputs += (call,)
        # Where the models are not known, loss functions are called too, and parts of a model one after the other.
        self.micro_batches += call[0] == self.inputs[0][0]
        shapes = call[2]
        if byte_size(shapes) >= byte_size(self.shapes):
            self.shapes = shapes

    def row(self, now: float, reading: Reading, outside: Outside | None, resident: int | None, error: str) -> StepRow:
        """Return the row of the step that ends now, with what was read and the error that ended it."""
        largest = max(self.shapes, key=lambda shape: byte_size((shape,)), default=None)
        return StepRow(
            step=self.number,
            seconds=now - self.began,
            peak_allocated=reading.peak_allocated,
            peak_reserved=reading.peak_reserved,
            allocated_after=reading.allocated,
            requested_after=reading.requested,
            reserved_after=reading.reserved,
            outside=outside.size if outside is not None else None,
            other_processes=outside.others if outside is not None else None,
            resident=resident,
            peak_from=reading.peak_from.value,
            recorded=self.recorded,
            micro_batches=self.micro_batches,
            evaluations=self.evaluations,
            skipped=self.skipped,
            inputs=text(largest) if largest is not None else "",
            error=error,
        )

    @property
    def calls(self) -> Calls:
        """The calls of the step so far; steps with the same ones need the same memory."""
        return self.inputs, frozenset(self.without_gradients)

    def evaluates(self, call: Call) -> None:
        """Note a call of a model without gradients."""
        if self.evaluated is None:
            self.evaluated = call[0]
        self.evaluations += call[0] == self.evaluated
        if len(self.without_gradients) < _KNOWN_INPUTS:
            self.without_gradients.add(call)


class Store:
    """Everything that `Live` shows, in bounded memory."""

    def __init__(self, capacity: Callable[[], int | None], schedule: Schedule, names: Names) -> None:
        self.history: History[StepRow] = History(numbers, lambda row: row.peak_allocated or 0, lambda row: row.step)
        self.layers = LayerHistory()
        self.recorded = RecordedSteps()
        self.leaks = Leaks(capacity)
        self.names = names
        self.on_row: list[Callable[[StepRow], None]] = []
        """Called in the thread that trains with the row of a finished step."""
        self.on_recorded: list[Callable[[Recording], None]] = []
        """Called after `on_row` with the recording of a finished step."""
        self.on_explained: list[Callable[[int, str], None]] = []
        """Called with an earlier step and why its peak rose, where a recording has shown it."""
        self.worst: StepRow | None = None
        """The step with the highest peak allocated."""
        self.notes: list[str] = []
        self._schedule = schedule
        self._known: dict[Calls, Reading] = {}
        """Calls of earlier steps -> what was measured in the last one, if it was recorded."""
        self._rises: dict[Calls, int] = {}
        """Calls of earlier steps -> bytes by which the last exact peak was above what was kept before the step."""
        self._layers_of: dict[Calls, dict[int, int]] = {}
        """Calls of recorded steps -> bytes of activations by number of layer."""
        self._state_size = 0
        self._seen: dict[Call, None] = {}
        self._highest: Facts | None = None
        self._highest_shown = 0
        self._unexplained: tuple[int, int] | None = None
        """The marked step without a reason, and the recorded step that a later one is compared with."""

    def add_note(self, sentence: str) -> None:
        """Keep a sentence about what is not measured."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def has_seen(self, call: Call) -> bool:
        """Return whether an earlier step had a call like this one."""
        return call in self._seen

    def like(self, calls: Calls) -> Reading:
        """Return what was measured in the last recorded step with these calls, a reading without numbers if none."""
        return self._known.get(calls, Reading())

    def with_exact_peak(self, row: StepRow, step: Current, state_size: int, recording: Recording | None) -> StepRow:
        """Return a row whose peak is exact where the counter of a real GPU, which only rises, is a lower bound.

        The history of a recorded step has its peak. A step with the calls of an earlier step rises as high above the
        memory kept before it, unless the earlier step made optimizer state.
        """
        peaks = recording.allocator_peaks if recording is not None and not recording.began_at_failure else None
        if row.peak_from == PeakFrom.SAMPLED and peaks is not None:
            row = row._replace(peak_allocated=peaks[0], peak_reserved=peaks[1], peak_from=PeakFrom.RECORDED.value)
        rise = self._rises.get(step.calls)
        if row.peak_allocated is not None and row.peak_from in (PeakFrom.COUNTER, PeakFrom.RECORDED):
            if state_size == self._state_size and not row.error:
                if len(self._rises) >= _KNOWN_INPUTS:
                    del self._rises[next(iter(self._rises))]
                self._rises[step.calls] = row.peak_allocated - step.kept_before
        elif row.peak_from == PeakFrom.SAMPLED and rise is not None and not row.error and step.inputs:
            same = step.kept_before + rise
            if same >= (row.peak_allocated or 0):
                row = row._replace(peak_allocated=same, peak_from=PeakFrom.SAME_SHAPES.value)
        self._state_size = state_size
        return row

    def switched(self) -> None:
        """Begin another setting: what was measured for inputs before says nothing about the next steps."""
        self._known.clear()
        self._rises.clear()
        self._layers_of.clear()
        self._seen.clear()
        self._schedule.ask(Cause.SWITCHED)

    def add(self, row: StepRow, step: Current, state_size: int, recording: Recording | None) -> None:
        """Add a finished step, and its recording where it has one."""
        row = self.with_exact_peak(row, step, state_size, recording)
        if recording is not None:
            row = self._with_peak_of(recording, row, step)
            self.recorded.add(recording, row.peak_allocated or 0)
        self._seen |= dict.fromkeys(step.inputs)
        if len(self._seen) > _KNOWN_INPUTS:
            self._seen = dict.fromkeys(list(self._seen)[_KNOWN_INPUTS // 2 :])
        if step.calls not in self._known:
            self._remember(step.calls, Reading())
        self._add_layers(step, recording)
        self.leaks.add(row, recording.survivors if recording is not None else ())
        row = self._marked(row, step, state_size, recording is not None)
        self.history.add(row)
        if row.peak_allocated is not None and row.peak_allocated > self._highest_shown:
            self.worst, self._highest_shown = row, row.peak_allocated
        for receive_row in self.on_row:
            receive_row(row)
        if recording is not None:
            self._explain(recording)
            for receive_recording in self.on_recorded:
                receive_recording(recording)
        if self.leaks.wants_a_tape(row.step):
            self._schedule.ask(Cause.LEAK)

    def _with_peak_of(self, recording: Recording, row: StepRow, step: Current) -> StepRow:
        """Return a row with the peak of its recording where no counter has measured one, and remember it."""
        # A step that ended before its first op allocated nothing and says nothing.
        if row.peak_allocated is not None or not recording.peak or recording.began_at_failure:
            return row
        peak, left = recording.peak, recording.left
        self._remember(step.calls, Reading(left, None, peak, None, PeakFrom.SAME_SHAPES))
        return row._replace(peak_allocated=peak, allocated_after=left, peak_from=PeakFrom.RECORDED.value)

    def _add_layers(self, step: Current, recording: Recording | None) -> None:
        """Add the activations by layer of a step, those of its recording where it has one."""
        if recording is not None:
            # Without the workspaces that the counters include.
            kept = {self.names.intern(name): size for name, size in recording.kept_by_layer.items()}
            self._layers_of[step.calls] = kept
            if len(self._layers_of) > _KNOWN_INPUTS:
                del self._layers_of[next(iter(self._layers_of))]
            self.layers.add(step.number, kept)
        elif step.layers:
            # Counters say what a layer has kept when its own call ends; it may be freed later in the forward pass.
            self.layers.add(step.number, self._layers_of.get(step.calls, step.layers))

    def extend_newest(self, part: StepRow) -> None:
        """Add the time and the memory of a further optimizer to the newest step."""
        newest = self.history.newest
        if newest is not None and part.peak_from != PeakFrom.SAME_SHAPES:
            changes: dict[str, Any] = {"seconds": newest.seconds + part.seconds}
            for name in ("peak_allocated", "peak_reserved"):
                values = [value for value in (getattr(newest, name), getattr(part, name)) if value is not None]
                changes[name] = max(values, default=None)
            if part.allocated_after is not None:
                names = ("allocated_after", "reserved_after", "requested_after")
                changes |= {name: getattr(part, name) for name in names}
            self.history.replace_newest(newest._replace(**changes))

    def _remember(self, calls: Calls, reading: Reading) -> None:
        if len(self._known) >= _KNOWN_INPUTS:
            del self._known[next(iter(self._known))]
        self._known[calls] = reading

    def _marked(self, row: StepRow, step: Current, state_size: int, is_recorded: bool) -> StepRow:
        """Return the row of a step with the reason why its peak rose, if it did."""
        peak = row.peak_allocated
        if peak is None or not rises(peak, self._highest.peak if self._highest is not None else 0):
            return row
        # The first step allocates workspaces and optimizer state that all later ones begin with.
        kept = step.kept_before if self._highest is not None else row.allocated_after or 0
        facts = Facts(
            row.step,
            peak,
            step.shapes,
            step.micro_batches,
            step.validation_peak >= peak,
            state_size,
            kept,
            setting=step.setting,
        )
        because = reason(facts, self._highest, self.leaks.rising)
        if because == UNEXPLAINED:
            self._unexplained = row.step, self.recorded.highest_before(row.step)
        if not is_recorded:
            self._schedule.ask(Cause.ROSE)
        self._highest = facts
        return row._replace(rose_because=because)

    def _explain(self, recording: Recording) -> None:
        """Name the layer of a rise that the facts about its step do not explain, from the tapes around it."""
        if self._unexplained is None:
            return
        (step, earlier), self._unexplained = self._unexplained, None
        because = self.recorded.difference(earlier, recording.step) if earlier else ""
        if because:
            self.history.replace(step, lambda row: row._replace(rose_because=because))
            for receive in self.on_explained:
                receive(step, because)
