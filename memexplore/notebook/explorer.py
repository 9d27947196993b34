"""The explorer widget: controls for the knobs of a step, the view of its tape, and the run after each change."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ipywidgets as widgets
from IPython.display import display

from memexplore.knobs.knobs import Checkpoint, CheckpointKind, Knobs
from memexplore.notebook import explorer_html, tabs
from memexplore.notebook.controls import Control
from memexplore.notebook.explorer_layout import column, html_widget, layer_buttons
from memexplore.notebook.main_thread import MainThread, receive_while_busy
from memexplore.notebook.view import View
from memexplore.search.advise import Advice
from memexplore.search.progress import Progress
from memexplore.steps import sentences
from memexplore.steps.cost import interruptible
from memexplore.steps.outcome import Outcome
from memexplore.steps.step import Step
from memexplore.steps.step_record import built_model
from memexplore.steps.trial import Trial

_SECONDS_BEFORE_PREFETCH = 0.3
_SECONDS_AFTER_DRAWN = 0.1
"""Idle time of the kernel after a drawing, in which the next change of a control is answered without delay."""
_SECONDS_WITHOUT_BROWSER = 1.0
"""Time after which the explorer stops waiting for a browser to report that it has drawn."""
_ADVISE = "What would fit?"


class Result(NamedTuple):
    """Trial and numbers of one setting."""

    trial: Trial
    outcome: Outcome

    @property
    def needed(self) -> int | None:
        """Bytes that a setting which does not fit needs."""
        return None if self.outcome.fits else self.outcome.peak_reserved


Run = Callable[[Knobs], tuple[Trial, Outcome]]
Search = Callable[[Knobs, Callable[[Progress], object]], Advice]
"""Searches for settings that fit the GPU of some knobs, and reports its progress to a callback."""


class _Cancelled(BaseException):
    """Cancels background work. A BaseException, so that `except Exception` cannot catch it."""


class Explorer(widgets.VBox):
    """The widget of `explore`: controls on the left, the view on the right, the result as a sentence above.

    `knobs` is the present setting; assigning it moves the controls and runs the step. `trial` is the run shown in
    `view`, and `history` lists every setting that was shown. While no control moves, the `neighbours` of the setting
    shown are run ahead. `disabled` gives the reason for each field of `Knobs` that cannot be set.
    """

    def __init__(
        self,
        run: Run,
        panels: dict[str, list[Control]],
        *,
        step: Step | None = None,
        search: Search | None = None,
        disabled: Mapping[str, str],
        neighbours: Callable[[Control, Knobs], list[Knobs]] = Control.neighbours,
    ) -> None:
        self._run_step, self._step, self._disabled, self._search = run, step, disabled, search
        self._neighbours = neighbours
        self._thread = MainThread()
        self._lock = threading.Lock()
        self._knobs = Knobs()
        # Every setting that was run, also ahead of a request; the history holds those that were shown.
        self._results: dict[Knobs, Result] = {self._knobs: Result(*run(self._knobs))}
        self._history = [self._knobs]
        self._shown = self._results[self._knobs]
        self._before: Result | None = None
        self._advice: Advice | None = None
        self._error = ""
        self._is_requested = False
        self._syncing_thread: int | None = None
        self._last_control: Control | None = None
        self._follow_up: Iterator[None] = iter(())
        self._static_display: Any = None
        self._controls = [control for panel in panels.values() for control in panel]
        self.view = View(self._shown.trial.tape, self._shown.needed)
        self.view.on_tab_click(self._on_tab_click)
        self.view.observe(self._update_layer_buttons, "selection")
        self._headline, self._hints = html_widget("headline"), html_widget("hints")
        self._selected = html_widget("selected")
        self._advise_button = widgets.Button(
            description=_ADVISE,
            tooltip=disabled.get("advise", "Search for settings that fit this GPU"),
            disabled=search is None,
        )
        self._advise_button.on_click(lambda _: self._thread.run(self._advise))
        self._layer_buttons = layer_buttons(self._toggle_selected_layer)
        for control in self._controls:
            control.widget.observe(self._listener(control), "value")
        selection = [self._selected, widgets.HBox(list(self._layer_buttons.values()))]
        knobs = column(panels, disabled, selection, [self._advise_button, self._hints])
        body = widgets.Box([knobs, self.view])
        body.add_class("memexplore-body")
        super().__init__([self._headline, body])
        self.add_class("memexplore-explorer")
        buttons = [self._advise_button, *self._layer_buttons.values()]
        receive_while_busy(*(control.widget for control in self._controls), *buttons)
        self._update_layer_buttons(None)
        self._headline.value = explorer_html.headline(self._sentence())
        self._start_follow_up()

    # -- public state

    @property
    def knobs(self) -> Knobs:
        """The present setting; its run may not have finished."""
        return self._knobs

    @knobs.setter
    def knobs(self, knobs: Knobs) -> None:
        if not isinstance(knobs, Knobs):
            raise TypeError(f"knobs must be mx.Knobs(...), not {type(knobs).__name__}")
        with self._lock:
            self._knobs, self._last_control = knobs, None
        self._sync_controls()
        error = self._run_requested()
        if error is not None:
            raise error

    @property
    def trial(self) -> Trial:
        """The run shown: knobs, tape, report of applying the knobs, and cost."""
        return self._shown.trial

    @property
    def history(self) -> tuple[Knobs, ...]:
        """Every setting that was shown, in order."""
        return tuple(self._history)

    # -- from a control to a run: callbacks of the browser only store the requested setting

    def _listener(self, control: Control) -> Callable[[Any], None]:
        def on_change(change: Any) -> None:
            # Ignore the changes that `_sync_controls` makes; the browser's come in another thread, or later.
            if self._syncing_thread != threading.get_ident():
                self._request(lambda knobs: control.updated(knobs, change["new"]), control)

        return on_change

    def _request(self, update: Callable[[Knobs], Knobs], control: Control | None = None) -> None:
        """Change the present setting, and run it when the main thread is idle: of several changes only the last."""
        with self._lock:
            try:
                self._knobs, self._last_control = update(self._knobs), control
            except ValueError as error:
                self._error = str(error)
            was_requested, self._is_requested = self._is_requested, True
        if not was_requested:
            self._thread.run(self._run_requested)

    def _run_requested(self) -> Exception | None:
        """Run and show the present setting. Return the exception if the run fails."""
        with self._lock:
            self._is_requested, knobs, problem, self._error = False, self._knobs, self._error, ""
        if problem:
            self._show_error(problem)
            return None
        try:
            if knobs not in self._results:
                self.view.set_working(True)
                self._results[knobs] = Result(*self._run_step(knobs))
        except Exception as error:
            self.view.set_working(False)
            self._show_error(
                f"{knobs}: {error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            return error
        self._show(self._results[knobs])
        return None

    def _show_error(self, text: str) -> None:
        self._headline.value = explorer_html.error(text, self._sentence())
        self._sync_controls()

    def _show(self, result: Result) -> None:
        if result is not self._shown:
            self._before, self._shown = self._shown, result
            if result.trial.knobs not in self._history:
                self._history.append(result.trial.knobs)
        self._follow_up = pending = iter(())

        def start() -> None:
            if self._follow_up is pending:
                self._start_follow_up()

        before = self._before.trial.tape if self._before else None
        # While the browser draws, it has the processor to itself; without a browser the follow-up starts anyway.
        on_drawn = functools.partial(self._thread.run_after, _SECONDS_AFTER_DRAWN, start)
        self.view.show(result.trial.tape, before, on_drawn, needed=result.needed)
        self._headline.value = explorer_html.headline(self._sentence())
        if self._thread.is_kernel:
            self._thread.run_after(_SECONDS_WITHOUT_BROWSER, start)
        else:
            start()

    # -- follow-up: the work after the timeline is drawn, in parts, cancelled by the next request

    def _start_follow_up(self) -> None:
        self._follow_up = parts = self._follow_up_parts(self._shown)
        if self._thread.is_kernel:
            self._thread.run(lambda: self._continue_follow_up(parts))
        else:
            for _ in parts:
                pass

    def _continue_follow_up(self, parts: Iterator[None]) -> None:
        """Do one part, and let messages through before the next; stop if another setting is requested."""
        if parts is self._follow_up and not self._is_requested and next(parts, self) is None:
            self._thread.run(lambda: self._continue_follow_up(parts))

    def _follow_up_parts(self, result: Result) -> Iterator[None]:
        self._sync_controls()
        self._hints.value = explorer_html.hints(result.outcome.applied)
        self.view.send_details()
        yield
        shown = [self._results[knobs].outcome for knobs in self._history]
        self.view.put_tabs(tabs.explorer_tabs(self._step, shown, self._advised(), result.trial.knobs))
        yield
        if self._static_display is not None:
            self._static_display.update(self.view.static_output(self._sentence()), raw=True)
            yield
        self._thread.run_after(_SECONDS_BEFORE_PREFETCH, lambda: self._prefetch(result))

    def _prefetch(self, result: Result) -> None:
        """Run a neighbour of the setting shown, until an event arrives for the main thread."""
        control = self._last_control
        is_current = result is self._shown and not self._is_requested
        if control is None or not is_current or self._thread.has_pending_events():
            return
        for knobs in self._neighbours(control, result.trial.knobs):
            if knobs not in self._results:
                # A run that fails here fails again, with a message, when it is requested.
                with contextlib.suppress(_Cancelled, Exception), interruptible(self._cancel_if_events_wait):
                    self._results[knobs] = Result(*self._run_step(knobs))
                    self._thread.run_after(_SECONDS_BEFORE_PREFETCH / 10, lambda: self._prefetch(result))
                return

    def _cancel_if_events_wait(self) -> None:
        if self._thread.has_pending_events():
            raise _Cancelled

    def _sentence(self) -> str:
        before, after = self._before, self._shown
        if before is None:
            return sentences.first_sentence(after.trial)
        return sentences.sentence(before.trial, after.trial, whole=(before.outcome, after.outcome))

    def _sync_controls(self) -> None:
        """Set every control to the present setting."""
        self._syncing_thread = threading.get_ident()
        try:
            for control in self._controls:
                control.show(self._knobs)
        finally:
            self._syncing_thread = None

    # -- the selected layer

    def _update_layer_buttons(self, _: Any) -> None:
        layer = self.view.selection
        is_usable = layer is not None and layer in self._layers()
        self._selected.value = explorer_html.selected(layer if is_usable else None)
        for field, button in self._layer_buttons.items():
            button.disabled = not is_usable or field in self._disabled

    def _layers(self) -> frozenset[str]:
        model = built_model(self._step) if self._step is not None else None
        if model is None:
            return frozenset(self.view.tape.modules)
        return frozenset(name for name, _ in model.named_modules() if name)

    def _toggle_selected_layer(self, field: str) -> None:
        """Add the selected layer to a field of the knobs, or remove it."""
        layer = self.view.selection
        if layer is None:
            return

        def update(knobs: Knobs) -> Knobs:
            names = knobs.checkpoint.layers if field == "checkpoint" else getattr(knobs, field)
            names = tuple(name for name in names if name != layer) if layer in names else (*names, layer)
            if field != "checkpoint":
                return knobs.replace(**{field: names})
            return knobs.replace(checkpoint=Checkpoint(CheckpointKind.LAYERS, layers=names) if names else Checkpoint())

        self._request(update)

    # -- added tabs

    def _on_tab_click(self, tab: str, row: int) -> None:
        """Request the setting of a row or point on a tab that lists settings."""
        if tab == tabs.ADVICE and self._advice is not None:
            settings = [option.knobs for option in self._advice.options]
        elif tab in (tabs.TRADE_OFFS, tabs.HISTORY):
            settings = [*self._history, *(outcome.knobs for outcome in self._advised())]
        else:
            return
        self._request(lambda _: settings[row])

    def _advised(self) -> list[Outcome]:
        """Return the runs of the search that train the same and were not shown."""
        advice = self._advice
        if advice is None:
            return []
        return [outcome for outcome in advice.tried if outcome.knobs in advice.same_training - set(self._history)]

    def _advise(self) -> None:
        """Search for settings that fit, until one is found, a control moves, or the kernel is interrupted."""
        if self._search is None:
            return

        def report(progress: Progress) -> None:
            if self._is_requested:
                raise _Cancelled
            remaining = f", at most {progress.left:.0f} s more" if progress.left else ""
            self._advise_button.description = f"{progress.done} tried{remaining}"

        self.view.set_working(True)
        # A kernel ignores interrupts outside of cells.
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self._advice = self._search(self._knobs, report)
            self.view.put_tabs({tabs.ADVICE: tabs.advice(self._advice)})
            self.view.open_tab(tabs.ADVICE)
            self._start_follow_up()
        except (_Cancelled, KeyboardInterrupt):
            pass
        except Exception as error:
            self._show_error(f"{type(error).__name__}: {error}")
        finally:
            signal.signal(signal.SIGINT, handler)
            self._advise_button.description = _ADVISE
            self.view.set_working(False)

    # -- display

    def _ipython_display_(self) -> None:
        data = self._repr_mimebundle_() or {}
        text = f"Explorer of a tape of {len(self.view.tape):,} events"
        display({**data, "text/plain": text}, raw=True)
        self._static_display = display(self.view.static_output(self._sentence()), raw=True, display_id=True)
