"""Switch the settings of a watched run: any thread may ask, and the borders of steps obey."""

from __future__ import annotations

import collections
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from memexplore.live import changes, locks, setting
from memexplore.live.changes import Change, ChangeState
from memexplore.live.compiled import COMPILED
from memexplore.live.counters import PeakFrom
from memexplore.live.optimizers import Optimizers
from memexplore.live.shapes import Shapes, byte_size
from memexplore.live.store import Store
from memexplore.ranks.rows import StepRow
from memexplore.run.knobs.applying.layer_names import check_names
from memexplore.run.knobs.applying.loop import RunningLoop
from memexplore.run.knobs.knobs import KNOBS, Knobs
from memexplore.torch_internals.modules import is_compiled

_MOST_CHANGES = 1000
_MOST_CHARACTERS = 240
"""Length of the text of an error; the text of running out of memory is long."""
_SECONDS_WALKED = 1.0
_REPLACED = "a later request replaced it before it took effect"
_ENDED = "The run has ended: watch another one to switch knobs."
_NEEDS_STEP = (
    'Whether "{}" fits is not known: give mx.watch(..., step=mx.Step(...)), which runs it on the virtual GPU first, or '
    "choose a setting that this run has measured."
)


class Measured(NamedTuple):
    """What was measured in the steps of a setting; sizes in bytes."""

    state: int
    """Of the optimizers' states when a step began, the largest."""
    inputs: int
    """Of the model's inputs, the largest in a step with this state."""
    peak: int
    """The highest peak allocated; 0 where nothing has measured it."""


class Control:
    """The settings of one watched run. Changes of the models are made in the thread that trains."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Optimizers, store: Store, compiles: bool) -> None:
        self.setting = setting.Setting(self.fail)
        self.changes: collections.deque[Change] = collections.deque(maxlen=_MOST_CHANGES)
        self.waiting = False
        """Whether the next border of steps has work."""
        self.loop: frozenset[str] = frozenset()
        """What the training loop follows; see `Knob.asks_loop_for`."""
        self.can_predict = False
        """Whether the run has a step that predicts settings."""
        self.on_request: Callable[[Change], object] = lambda change: None
        """Called with a requested setting where `can_predict`: `judged` gets what its prediction says."""
        self.closing: Callable[[], object] = lambda: None
        """Ends the predictions of the run."""
        self.text = str(Knobs())
        """The setting in effect as text."""
        self.share = 1.0
        """Share of the samples of the batch in the micro-batch that runs."""
        self._models = [weakref.ref(model) for model in models]
        self._named = bool(models)
        self._optimizers, self._store, self._compiles = optimizers, store, compiles
        self._walked: tuple[float, list[int], str] = (0.0, [], "")
        """Until when it holds, ids of models, and why they cannot be changed: a walk over thousands of modules."""
        self._lock = threading.RLock()
        self._request: Change | None = None
        self._jobs: list[Callable[[], object]] = []
        self._first_step: Change | None = None
        self._before = Knobs()
        """The setting before the setting of `_first_step`."""
        self._measured: dict[Knobs, Measured] = {}
        self._state = 0
        """Bytes of the optimizers' states when the last step ended."""
        self._inputs = 0
        """Bytes of the inputs of the last step."""
        self.ended = False
        """Whether no border of steps will come."""

    # -- what the hooks see

    def called(self, model: nn.Module) -> None:
        """Note an outermost call of a model with gradients."""
        if self._named or next(model.parameters(), None) is None or any(model is ref() for ref in self._models):
            return
        self._models = [ref for ref in self._models if ref() is not None] + [weakref.ref(model)]

    def ended_step(self, row: StepRow, shapes: Shapes, state: int) -> None:
        """Note the row of a step, the shapes of its largest inputs, and the bytes of optimizer state after it."""
        knobs = self.setting.knobs
        now = Measured(self._state, byte_size(shapes) * (knobs.accumulation or 1), row.peak_allocated or 0)
        before = self._measured.get(knobs, now)
        self._measured[knobs] = Measured(*max(before[:2], now[:2]), max(before.peak, now.peak))
        self._state, self._inputs = state, now.inputs

    def models(self) -> list[nn.Module]:
        """Return the watched models; of a run without named models, the models called so far."""
        return [model for model in (ref() for ref in self._models) if model is not None]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the run that have stepped."""
        return self._optimizers.seen()

    def steps_of_others(self) -> tuple[int, str]:
        """Return how often optimizers that are not watched have stepped since a watched one, and the last's type."""
        return self._optimizers.others

    def newest(self) -> StepRow | None:
        """Return the row of the last watched step."""
        return self._store.history.newest

    # -- requests, from any thread

    @property
    def knobs(self) -> Knobs:
        """The setting of the next step."""
        request = self._request
        return self.setting.knobs if request is None else request.knobs

    def facts(self) -> RunningLoop:
        """Return what locks knobs in this run."""
        models, now = self.models(), time.monotonic()
        known = [id(model) for model in models]
        if self._walked[1] != known or now >= self._walked[0]:
            compiled = COMPILED in self._store.notes or (self._compiles and any(map(is_compiled, models)))
            self._walked = now + _SECONDS_WALKED, known, setting.no_model(models, compiled)
        kept = setting.layout_kept_by(models, self.optimizers())
        return RunningLoop(self._walked[2], self.loop, kept)

    def request(self, knobs: Knobs) -> None:
        """Request a setting from the next border of steps on.

        Raises TypeError for another value, ValueError with one sentence for a setting that cannot be switched on now.
        """
        if not isinstance(knobs, Knobs):
            raise TypeError(f"live.knobs is a memexplore.Knobs, not a {type(knobs).__name__}")
        newest = self.newest()
        is_safe = self._is_safe(knobs)
        state = ChangeState.REQUESTED if is_safe else ChangeState.PREDICTING
        change = Change(knobs, newest.step + 1 if newest is not None else 1, state)
        try:
            self._check(knobs)
            if not (is_safe or self.can_predict):
                raise ValueError(_NEEDS_STEP.format(knobs))
        except ValueError as error:
            change.end(ChangeState.REFUSED, str(error))
            with self._lock:
                self.changes.append(change)
            raise
        with self._lock:
            if self._request is not None:
                self._request.end(ChangeState.UNDONE, _REPLACED)
                self._request = None
            if knobs == self.setting.knobs:
                return
            self.changes.append(change)
            self._request = change
            self.waiting = self.waiting or is_safe
        if self.can_predict:
            self.on_request(change)

    def _is_safe(self, knobs: Knobs) -> bool:
        """Return whether a setting needs no more memory than the present one, or one measured with no smaller steps."""
        return _cannot_need_more(knobs, self.setting.knobs) or any(
            known.inputs >= self._inputs and known.state >= self._state and _cannot_need_more(knobs, measured)
            for measured, known in list(self._measured.items())
        )

    def peak(self, knobs: Knobs) -> int | None:
        """Return the highest measured peak of the steps with a setting."""
        known = self._measured.get(knobs)
        return None if known is None or not known.peak else known.peak

    def judged(self, knobs: Knobs, peak: int | None, refusal: str, asked: Change | None = None) -> None:
        """Note what the prediction of a setting says: its peak, and why it is refused, "" if it fits.

        `asked` is the only request that this counts for, None for any of the setting.
        """
        with self._lock:
            for change in self.changes:
                if change.knobs == knobs and change.predicted_peak is None:
                    change.predicted_peak = peak
            request = self._request
            if request is None or request.knobs != knobs or request.state is not ChangeState.PREDICTING:
                return
            if asked is not None and request is not asked:
                return
            if refusal:
                request.end(ChangeState.REFUSED, refusal)
                self._request = None
            else:
                request.state, self.waiting = ChangeState.REQUESTED, True

    def _check(self, knobs: Knobs) -> None:
        sentence = _ENDED if self.ended else locks.why_locked(knobs, self.facts())
        if sentence:
            raise ValueError(sentence)
        models = self.models()
        for name in knobs.checkpoint.layers:
            if not any(name in dict(setting.inner(model).named_modules(remove_duplicate=False)) for model in models):
                check_names(setting.inner(models[0]), (name,))

    def at_next_border(self, job: Callable[[], object]) -> None:
        """Call a function in the thread that trains, at the next border of steps and before any switch.

        Where no border comes it is called all the same, at the end of the block or at once.
        """
        with self._lock:
            comes = not self.ended
            if comes:
                self._jobs.append(job)
                self.waiting = True
        if not comes:
            job()

    # -- in the thread that trains

    def at_border(self, row: StepRow | None, next_step: int) -> None:
        """End the first step of a setting, then switch to the requested one. `row` is the step's, if watched."""
        self._end_first_step(row)
        with self._lock:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            job()
        with self._lock:
            change = self._request if self._is_admitted else None
            self._request = None if change is not None else self._request
        if change is not None:
            self._switch(change, next_step)
        with self._lock:
            self.waiting = bool(self._jobs) or self._is_admitted or self._first_step is not None

    @property
    def _is_admitted(self) -> bool:
        """Whether a request waits for the next border, and not for its prediction."""
        return self._request is not None and self._request.state is ChangeState.REQUESTED

    def _end_first_step(self, row: StepRow | None) -> None:
        change, self._first_step = self._first_step, None
        if change is None:
            return
        failed = self.setting.end_first_step()
        if failed:
            self._first_step = change
            self.fail(failed)
            return
        change.effect = self.setting.report.completed()
        if row is not None and row.step == change.step and row.peak_from != PeakFrom.SAMPLED:
            change.measured_peak = row.peak_allocated

    def _switch(self, change: Change, step: int) -> None:
        before = self.setting.knobs
        try:
            self.setting.switch(change.knobs, self.models())
        except Exception as error:
            change.end(ChangeState.UNDONE, _text(error))
            self._go_back(before)
            return
        except BaseException:
            self.setting.restore()
            change.end(ChangeState.UNDONE, "an interrupt came while it was applied")
            raise
        change.step, change.effect = step, self.setting.report
        change.state = ChangeState.APPLIED
        self._first_step, self._before = change, before
        self.text = str(change.knobs)
        self._store.switched()

    def fail(self, error: Exception | str) -> None:
        """Undo the setting that runs its first step, because of an error or a sentence about one."""
        change, self._first_step = self._first_step, None
        if change is not None:
            change.end(ChangeState.UNDONE, error if isinstance(error, str) else _text(error))
            self._go_back(self._before)
            self._store.switched()

    def _go_back(self, knobs: Knobs) -> None:
        try:
            self.setting.switch(knobs, self.models())
        except Exception:
            # It worked before. What is left is the model as written.
            self.setting.restore()
        except BaseException:
            self.setting.restore()
            raise
        # It has had its first step.
        self.setting.end_first_step()
        self.text = str(self.setting.knobs)

    # -- the end

    def stop(self, error: BaseException | None) -> None:
        """End the requests; an error in the first step of a setting is its error."""
        self.ended = True
        if isinstance(error, Exception) and self._first_step is not None:
            self._first_step.end(ChangeState.UNDONE, _text(error))
        with self._lock:
            if self._request is not None:
                self._request.end(ChangeState.UNDONE, "the run ended before it took effect")
                self._request = None
        self.restore()

    def restore(self) -> None:
        """Restore the models; it may be called twice."""
        self.ended = True
        self._first_step = None
        try:
            self.setting.restore()
        finally:
            self.closing()
            jobs, self._jobs = self._jobs, []
            for job in jobs:
                job()

    def table(self) -> Any:
        """Return the requested settings as a DataFrame."""
        with self._lock:
            rows = list(self.changes)
        for change in rows:
            if change.state is ChangeState.APPLIED and change.measured_peak is None:
                # The counter of a real GPU does not say a peak that is lower than earlier ones; the tape does.
                tape = self._store.recorded.tape(change.step)
                change.measured_peak = tape.peak()[0] if tape is not None else None
        return changes.table(rows)


def _cannot_need_more(knobs: Knobs, measured: Knobs) -> bool:
    """Return whether a setting is another one with more knobs, none of which can raise the peak."""
    changed, before = knobs.changed(), measured.changed()
    return before.items() <= changed.items() and all(
        KNOBS[name].cannot_raise_peak(value) for name, value in changed.items() if name not in before
    )


def _text(error: BaseException) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", _MOST_CHARACTERS, placeholder=" …")
