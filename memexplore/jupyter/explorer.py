"""The explorer: the settings of a step, the run after each change, and the view that draws it with its knobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from IPython.display import display

from memexplore.jupyter import cancelled_runs, explorer_message, explorer_state, tabs
from memexplore.jupyter.expected_picture import Expect, ExpectedPicture
from memexplore.jupyter.explorer_message import against_text, reason_text, turned
from memexplore.jupyter.explorer_search import Search, StartSearch
from memexplore.jupyter.explorer_state import State
from memexplore.jupyter.idle_work import IdleWork
from memexplore.jupyter.layers import Layers
from memexplore.jupyter.main_thread import MainThread
from memexplore.jupyter.results import forget_old
from memexplore.jupyter.static_output import StaticOutputs
from memexplore.jupyter.view import View
from memexplore.run import sentences
from memexplore.run.code.own_code import OwnCode
from memexplore.run.knobs.control import Control
from memexplore.run.knobs.knobs import Knobs, not_now
from memexplore.run.programs.step import Step
from memexplore.run.run import Run

_SECONDS_BEFORE_PREFETCH, _SECONDS_BETWEEN_RUNS = 0.3, 0.03


class Explorer:
    """A step whose knobs can be turned, in a page or in code; `explore` makes one.

    `knobs` is the present setting; assigning it runs the step. `run` is the run shown in `view`, and `history` lists
    every setting that was shown; of a slider that was dragged only the last. `undo()` and `redo()` go back and forth.
    Sentence, outline and per cent compare with the step as written, or with the setting on which `pin()` was called.
    While no knob is turned, the `neighbours` of the setting shown are run ahead: of the last knob, and of the batch.
    """

    name = "explorer"

    def __init__(
        self,
        run: Callable[[Knobs], Run],
        table: Sequence[Control],
        *,
        expect: Expect = lambda knobs: None,
        step: Step | None = None,
        own: OwnCode | None = None,
        search: StartSearch | None = None,
        no_search: str = "",
        reasons: Mapping[str, str],
        contradiction: Callable[[Knobs], str],
        hidden: Mapping[str, str],
        neighbours: Callable[[Control, Knobs], list[Knobs]] = Control.neighbours,
        as_written: Run | None = None,
    ) -> None:
        """`reasons` say why knobs cannot be set, by name; `hidden` why knobs do not apply, by label.

        `contradiction` returns why a setting cannot be run, where that is known before. `no_search` says why there is
        no search. `own` is the code that the person runs, if it is known. `as_written` is the result of the step as
        written, if it was run. `expect` returns what a setting will probably give, which is drawn until its run
        has ended.
        """
        self._run_step, self._step, self._own = run, step, own
        self._table, self._control_named = list(table), {control.name: control for control in table}
        self._static_reasons, self._hidden = dict(reasons), dict(hidden)
        self._neighbours, self._contradiction = neighbours, contradiction
        self._thread = MainThread()
        self._state = State()
        # Every setting that was run, also ahead of a request; the history holds the settings that were shown.
        self._results: dict[Knobs, Run] = {Knobs(): as_written or run(Knobs())}
        self._shown = self._results[Knobs()]
        self._is_requested = False
        self._is_working = False
        self._last_control: Control | None = None
        self._follow_up = IdleWork(self._thread, lambda: not self._is_requested)
        self.view, self._static_outputs = View(self._shown.tape), StaticOutputs()
        self._expected = ExpectedPicture(expect, self.view)
        self._layers = Layers.of(step, self.view.tape, self._static_reasons)
        self._search = Search(search, no_search, self._thread, self.view.lock, self._show_advice, self._show_progress)
        self.view.attach(self)
        self.view.observe(lambda _: self.view.send_controls(), "selection")
        self._follow_up.start(self._parts())

    # -- public state

    @property
    def knobs(self) -> Knobs:
        """The present setting; its run may not have finished."""
        return self._state.knobs

    @knobs.setter
    def knobs(self, knobs: Knobs) -> None:
        if not isinstance(knobs, Knobs):
            raise TypeError(f"knobs must be mx.Knobs(...), not {type(knobs).__name__}")
        self._run_now(explorer_state.requested(self._state, knobs))

    @property
    def run(self) -> Run:
        """The run shown: knobs, tape, report of applying the knobs, and cost."""
        return self._shown

    @property
    def history(self) -> tuple[Knobs, ...]:
        """Every setting that was shown, in order, each once."""
        return self._state.history

    def undo(self) -> None:
        """Return to the setting before the latest change. Raises what its run raises."""
        self._run_now(explorer_state.undone(self._state))

    def redo(self) -> None:
        """Take back the latest `undo`. Raises what the run raises."""
        self._run_now(explorer_state.redone(self._state))

    def pin(self) -> None:
        """Compare other settings with the one shown from now on, besides the step as written."""
        self._pin(self._state.drawn, lambda draw: draw())

    def unpin(self) -> None:
        """Compare with the step as written again."""
        self._pin(None, lambda draw: draw())

    # -- from a request to a run: requests come in any thread, and only change the state

    def message(self) -> dict[str, Any]:
        """Return the state of the knobs for the page (`Controls`)."""
        with self.view.lock:
            state, result = self._state, self._shown
            baselines = {"written": Knobs()} | ({} if state.pinned is None else {"pinned": state.pinned})
            against = {
                name: against_text(result.outcome, self._results[knobs].outcome) for name, knobs in baselines.items()
            }
            return explorer_message.message(
                state,
                self._table,
                reasons=self._reasons(state.knobs),
                contradiction=self._contradiction,
                hidden=self._hidden,
                against=against,
                search=self._search.state,
                layer=self._layers.state(self.view.selection),
                is_working=self._is_working,
                is_expected=self._expected.is_drawn,
                applied=result.outcome.applied,
            )

    def receive(self, request: dict[str, Any]) -> bool:
        """Take a request of the page (`Controls`)."""
        handlers: dict[str, Callable[[dict[str, Any]], object]] = {
            "knob": self._on_knob,
            "reset": self._on_reset,
            "reset all": lambda _: self._want(explorer_state.requested(self._state, Knobs())),
            "undo": lambda _: self._want(explorer_state.undone(self._state)),
            "redo": lambda _: self._want(explorer_state.redone(self._state)),
            "pin": lambda _: self._pin(self._state.drawn, self._thread.run),
            "unpin": lambda _: self._pin(None, self._thread.run),
            "search": lambda _: self._thread.run(self._start_search),
            "stop": lambda _: self._search.stop(),
            "layer action": self._on_layer_action,
            "tab click": self._on_tab_click,
        }
        if request["type"] not in handlers:
            return False
        with self.view.lock:
            before = self._state
            self._state = explorer_state.received(before, request["view"], request["number"], request.get("after", 0))
            # A page sends again what the kernel seems not to have received.
            if self._state is not before:
                handlers[request["type"]](request)
            self.view.send_controls()
        return True

    def _on_knob(self, request: dict[str, Any]) -> None:
        control = self._control_named[request["field"]]
        if control.kind == "text":
            value = request["value"]
        else:
            value = control.position(self._state.knobs, request["index"], request.get("label")).value
        self._turn(control, value, request.get("drag", ""))

    def _on_reset(self, request: dict[str, Any]) -> None:
        name, knobs = request["field"], self._state.knobs
        control = self._control_named.get(name)
        # A field without a control, which the code has set, is listed among the changes too.
        knobs = control.reset(knobs) if control is not None else knobs.replace(**{name: getattr(Knobs(), name)})
        self._want(explorer_state.requested(self._state, knobs, cause=name), control)

    def _on_layer_action(self, request: dict[str, Any]) -> None:
        selected = self._layers.state(request["layer"])
        control = explorer_message.of_layers(self._table, request["field"])
        if reason := selected.reasons.get(control.field):
            self._state = explorer_state.impossible(self._state, control.name, reason)
        else:
            self._turn(control, explorer_message.toggled(control, self._state.knobs, selected.layers))

    def _turn(self, control: Control, value: Any, drag: str = "") -> None:
        """Want another value of a knob; say beside it why that is impossible, where that is known."""
        wanted, reason = turned(control, self._state.knobs, value, self._reasons(self._state.knobs))
        if reason:
            self._state = explorer_state.impossible(self._state, control.name, reason)
        else:
            self._want(explorer_state.requested(self._state, wanted, drag=drag, cause=control.name), control)

    def _want(self, state: State, control: Control | None = None) -> None:
        """Take a state, and run its setting when the main thread is idle: of several settings only the last."""
        self._state, self._last_control = state, control
        if state.number == state.drawn_number or self._is_requested:
            return
        self._is_requested = True
        self._thread.run(self._run_requested)

    def _pin(self, knobs: Knobs | None, run: Callable[[Callable[[], None]], object]) -> None:
        with self.view.lock:
            self._state = explorer_state.pinned(self._state, knobs)
        run(self._draw)

    def _run_now(self, state: State) -> None:
        """Take a state that the code wants, and run its setting. If that fails, take the state drawn, and raise."""
        with self.view.lock:
            self._state, self._last_control, run = state, None, state
        try:
            result = self._result(run.knobs)
        except BaseException:
            with self.view.lock:
                self._state = explorer_state.abandoned(self._state, run)
            self.view.send_controls()
            raise
        self._show(run, result)

    def _run_requested(self) -> None:
        """Run and show the setting wanted. If that fails, take back the field that is the cause, and say why."""
        with self.view.lock:
            self._is_requested, run, control = False, self._state, self._last_control
        try:
            result = self._run_expected(run)
        except cancelled_runs.RunCancelled:
            self._want(self._state, self._last_control)
        except Exception as error:
            self._refuse(run, control, reason_text(error))
        else:
            self._show(run, result)

    def _run_expected(self, run: State) -> Run:
        """Return the result of a setting; while it is run, what it will probably give is drawn, where that is known."""
        if run.knobs in self._results:
            return self._results[run.knobs]
        before = self._results[self._state.baseline].tape
        with self._expected.drawn_during(run.knobs, before, lambda: self._state.number != run.number, self._draw):
            return self._result(run.knobs)

    def _result(self, knobs: Knobs) -> Run:
        if knobs not in self._results:
            self._is_working = True
            self.view.send_controls()
            try:
                self._results[knobs] = self._run_step(knobs)
            finally:
                self._is_working = False
        return self._results[knobs]

    def _refuse(self, run: State, control: Control | None, reason: str) -> None:
        may_wait = self._thread.is_kernel and not self._thread.has_pending_events()

        def is_urgent() -> bool:
            return self._state.number != run.number or (may_wait and self._thread.has_pending_events())

        try:
            cause = cancelled_runs.failing_knob(
                run.knobs, self._state.drawn, self._table, control, self._result, is_urgent
            )
        except cancelled_runs.RunCancelled:
            # Runs after the event that waits, with the setting that is wanted by then.
            self._want(self._state, self._last_control)
            return
        with self.view.lock:
            if cause is None:
                state = explorer_state.abandoned(self._state, run, reason)
            else:
                state = explorer_state.refused(self._state, run, cause.field, cause.name, reason)
            # The knob turned last stays the one whose neighbours are run ahead.
            self._want(state, self._last_control)
        self.view.send_controls()
        if not self._is_requested:
            self._follow_up.resume()

    # -- drawing

    def _show(self, run: State, result: Run) -> None:
        with self.view.lock:
            self._state, self._shown = explorer_state.drawn(self._state, run), result
            forget_old(self._results, {*self._state.history, self._state.baseline, run.knobs})
            self._draw()

    def _draw(self) -> None:
        """Draw the result shown, with the outline of what it is compared with."""
        baseline = self._baseline()

        def draw(on_drawn: Callable[[], None]) -> None:
            with self.view.lock:
                self._expected.show(self._shown.tape, baseline.tape if baseline else None, on_drawn)
                self.view.send_controls()

        self._follow_up.start_after_drawing(draw, self._parts)

    def _baseline(self) -> Run | None:
        """Return the result that the one shown is compared with, None if it is that one itself."""
        baseline = self._results[self._state.baseline]
        return None if baseline is self._shown else baseline

    def _sentence(self) -> str:
        before, after = self._baseline(), self._shown
        return sentences.first_sentence(after) if before is None else sentences.sentence(before, after)

    # -- follow-up: the work after the timeline is drawn, in parts, cancelled by the next request

    def _parts(self) -> Iterator[None]:
        result = self._shown
        self.view.send_details()
        yield
        self.view.put_tabs(self._tabs(result))
        yield
        self._static_outputs.update(lambda: self.view.static_output(self._sentence()))
        self._thread.run_after(_SECONDS_BEFORE_PREFETCH, lambda: self._prefetch(result))

    def _prefetch(self, result: Run) -> None:
        """Run neighbours of the setting shown, until an event arrives for the main thread."""
        if result.knobs != self._shown.knobs or self._is_requested:
            return
        knobs = filter(None, (self._last_control, self._control_named.get("batch")))
        settings = [setting for control in knobs for setting in self._neighbours(control, result.knobs)]
        if cancelled_runs.run_ahead(settings, self._results, self._run_step, self._thread):
            self._thread.run_after(_SECONDS_BETWEEN_RUNS, lambda: self._prefetch(result))

    def _reasons(self, knobs: Knobs) -> dict[str, str]:
        """Return why knobs cannot be set now, by name."""
        return not_now(knobs) | self._static_reasons

    # -- search, and tabs whose rows are settings

    def _start_search(self) -> None:
        if self._search.is_running:
            return
        self.view.put_tabs({tabs.ADVICE: tabs.NO_ADVICE})
        self.view.open_tab(tabs.ADVICE)
        self._search.start(self._state.knobs)

    def _show_advice(self) -> None:
        """Show the advice of the search so far. Called in any thread."""
        with self.view.lock:
            if (advice := self._search.advice) is not None:
                self.view.put_tabs({tabs.ADVICE: tabs.advice(advice, self._state.drawn, self._search.base)})

    def _show_progress(self) -> None:
        """Show the progress of the search. Called in any thread."""
        self.view.send_controls()
        if not self._search.is_running:
            self._thread.run(lambda: self._follow_up.start(self._parts()))

    def _tabs(self, result: Run) -> dict[str, tabs.Tab]:
        shown, search = [self._results[knobs].outcome for knobs in self.history], self._search
        unsearched = tabs.UNSEARCHED if search.advice is None and search.state.state == "idle" else None
        current = result.knobs
        advice, base = search.advice, search.base
        return tabs.explorer_tabs(self._step, shown, advice, current, base=base, unsearched=unsearched, own=self._own)

    def _on_tab_click(self, request: dict[str, Any]) -> None:
        """Want the setting of a row or point; nothing on a tab without settings."""
        settings = tabs.settings(request["tab"], self.history, self._search.advice, self._search.base)
        if (knobs := tabs.clicked(request, settings)) is not None:
            self._want(explorer_state.requested(self._state, knobs))

    # -- display

    def _repr_mimebundle_(self, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.view._repr_mimebundle_(**arguments)

    def _ipython_display_(self) -> None:
        data, metadata = self.view.live_bundle(f"Explorer of a tape of {len(self.view.tape):,} events")
        display(data, raw=True, metadata=metadata)
        self._static_outputs.display(self.view.static_output(self._sentence()))
