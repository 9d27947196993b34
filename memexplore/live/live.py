"""The value of a watched run: its steps, layers, tapes, leaks and costs, while it runs and afterwards."""

from __future__ import annotations

import enum
import os
from typing import TYPE_CHECKING, NamedTuple

from memexplore.analysis.places import name_cells
from memexplore.live import locks, notes
from memexplore.live.changes import Change
from memexplore.live.leaks import Leak
from memexplore.live.loop import InLoop
from memexplore.live.schedule import Cause
from memexplore.live.store import Store
from memexplore.ranks.rows import StepRow, table
from memexplore.run.knobs.knobs import Knobs
from memexplore.tape import Tape

if TYPE_CHECKING:
    from concurrent.futures import Future

    import pandas

    from memexplore.live.prediction import Prediction
    from memexplore.live.watch import Session


class State(enum.StrEnum):
    """What a watched run does."""

    WATCHING = "watching"
    PAUSED = "paused"
    ENDED = "ended"
    FAILED = "failed"
    """An exception or an interrupt ended the block, or memexplore had an error of its own."""


class Overhead(NamedTuple):
    """What watching costs, as shares of the time of all watched steps."""

    share: float
    """Both of the following together."""
    light: float
    """Hooks and counters."""
    recorded: float
    """Recorded steps, beyond the time of light ones."""


class Live(InLoop):
    """A watched run. All sizes are bytes; everything is readable while the run goes on, from any thread."""

    def __init__(self, session: Session, store: Store) -> None:
        self._control = session.watcher.control
        super().__init__(self._control)
        self._session, self._store = session, store

    @property
    def state(self) -> State:
        """Whether the run is watched, paused, ended or failed."""
        return self._session.state

    @property
    def error(self) -> str:
        """The error that ended the run, with its line, "" without one."""
        return self._session.watcher.error

    @property
    def device(self) -> str:
        """Name of the watched device."""
        return self._session.watcher.counters.device

    @property
    def capacity(self) -> int | None:
        """Bytes that the allocator of the device can reserve, None on the CPU."""
        return self._session.watcher.counters.capacity

    def steps(self) -> pandas.DataFrame:
        """Return one row per step, with the fields of `rows.StepRow`.

        Of old steps of a long run, the steps with the highest peaks stay.
        """
        return table(self.rows())

    def rows(self) -> list[StepRow]:
        """Return the rows of `steps`."""
        return self._store.history.rows()

    def layers(self) -> pandas.DataFrame:
        """Return the bytes of activations of each layer when the model's call has ended, layers × steps.

        They are those of recorded steps, and on a GPU also of as many light ones as fit into 1 % of the time: as in the
        recorded step with the same calls and setting, else what counters say when each layer's own call ends.
        """
        return self._store.layers.table(self._store.names.table)

    @property
    def recorded(self) -> list[int]:
        """The steps that `tape` returns."""
        return self._store.recorded.steps()

    def tape(self, step: int | None = None) -> Tape:
        """Return the tape of a recorded step, by default of the newest.

        Raises LookupError for a step whose tape is not kept.
        """
        tape = self._store.recorded.newest() if step is None else self._store.recorded.tape(step)
        if tape is None:
            kept = ", ".join(map(str, self.recorded)) or "none yet"
            raise LookupError(
                f"no tape of step {step} is kept; those kept are: {kept}"
                if step is not None
                else "no step was recorded completely yet: wait for the end of the first step"
            )
        return tape

    def leak(self) -> Leak | None:
        """Return the growth of memory at the border of steps, None if it does not keep rising."""
        return self._store.leaks.find()

    def held_by(self, seconds: float = 5.0) -> list[str]:
        """Return who holds the tensors of the leak, as far as Python can say within `seconds`.

        The training waits meanwhile. If the time was not enough, the last text says so.
        """
        return [name_cells(text) for text in self._store.leaks.held_by(seconds)]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not measured, and what limits the process, one sentence each."""
        watcher = self._session.watcher
        return tuple(notes.of_now(self._store, self._control, watcher.counters, watcher.step.micro_batches))

    @property
    def overhead(self) -> Overhead:
        """What watching costs."""
        return self._session.overhead()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the rows of the steps and the kept tapes to a folder, which `memexplore.load` reads.

        Raises FileExistsError if the rank of this process has a folder there already.
        """
        writer = self._session.writer_for(folder)
        for row in self._store.history.rows():
            writer.add(row)
        writer.flush()
        for step in self.recorded:
            writer.add_tape(step, self.tape(step))
        writer.describe(self.state, self.error)

    # -- knobs

    @property
    def knobs(self) -> Knobs:
        """The setting of the next step. Any thread may assign another one, which the end of this step switches on.

        The model gets it after the optimizer's step and keeps its weights, and the optimizer keeps working on them.
        The first step with it is recorded completely. A setting that fails is undone, and `changes` says why.

        A setting whose memory is not known is predicted first (`predict`), takes effect some steps later, and is
        refused where it does not fit. Without a step to run (``mx.watch(..., step=mx.Step(...))``), only settings that
        cannot raise the peak or were measured before in this run are taken.

        After the block the model is as it was. While a setting is in effect, save `model.state_dict()` rather than the
        model, whose calls pass through functions of this process.

        Raises ValueError with one sentence for a locked knob (`locked`), for layers that the model does not have, and
        for a setting that needs a step.
        """
        return self._control.knobs

    @knobs.setter
    def knobs(self, knobs: Knobs) -> None:
        self._control.request(knobs)

    @property
    def applied(self) -> Knobs:
        """The setting in effect."""
        return self._control.setting.knobs

    def locked(self) -> dict[str, str]:
        """Return why knobs cannot be switched while this loop runs, one sentence for each field of `Knobs`.

        A precision that is locked has a key of its own, such as ``precision all bf16``.
        """
        return locks.locked(self._control.facts())

    def why_locked(self, knobs: Knobs) -> str:
        """Return why a setting cannot be switched on while this loop runs, as one sentence, "" if it can."""
        return locks.why_locked(knobs, self._control.facts())

    @property
    def requested(self) -> list[Change]:
        """The requested settings, the newest last; `changes` is their table."""
        return list(self._control.changes)

    def changes(self) -> pandas.DataFrame:
        """Return a row per requested setting: step, setting, predicted_peak, measured_peak, state, reason, effect.

        `step` is the first step with the setting, and `measured_peak` the peak allocated of that step. The state is
        ``predicting``, ``requested``, ``applied``, ``undone`` or ``refused``; `effect` says what was changed in the
        model.
        """
        return self._control.table()

    def prediction(self, knobs: Knobs) -> Future[Prediction]:
        """Return at once a future of `predict`. Any thread may call it; a newer request may replace this one.

        The step is packed by the thread that trains, at the end of its step; the prediction runs in another process.
        """
        return self._session.forecasts().request(knobs)

    def predict(self, knobs: Knobs, timeout: float | None = None) -> Prediction:
        """Return what the virtual GPU predicts for a setting, also for locked knobs.

        It runs the step that `watch` was given, in a notebook else the cell. `failed` says why that cannot be done. The
        time of waiting is no part of the step that runs.

        Raises TimeoutError after `timeout` seconds.
        """
        with self._session.watcher.outside_of_step():
            return self.prediction(knobs).result(timeout)

    # -- pause and record

    def pause(self) -> None:
        """Watch no more from the end of this step on; steps are still counted. Any thread may call it."""
        self._session.wants_pause = True

    def resume(self) -> None:
        """Watch again from the end of this step on."""
        self._session.wants_pause = False

    def ended_by(self, error: BaseException) -> None:
        """End watching with the exception that ends the block, where Python closes the block only later."""
        self._session.stop(error)

    def record_next(self) -> None:
        """Record the next step completely."""
        self._session.watcher.schedule.ask(Cause.ASKED)

    def __repr__(self) -> str:
        newest = self._store.history.newest
        step = f"step {newest.step}" if newest is not None else "no step yet"
        return f"<Live: {self.state}, {step} on {self.device}>"
