"""The knobs of a watched run on its page: requests become settings of `Live.knobs`, and the page gets their state."""

from __future__ import annotations

from typing import Any

from memexplore.jupyter import explorer_message, explorer_state
from memexplore.jupyter.explorer_message import LayerState, SearchState, reason_text
from memexplore.jupyter.explorer_state import State
from memexplore.jupyter.layers import Layers
from memexplore.live import locks
from memexplore.live.changes import Change, ChangeState
from memexplore.live.live import Live
from memexplore.run.knobs.applying.report import ApplyReport
from memexplore.run.knobs.control import Control, Explored
from memexplore.run.knobs.knobs import KNOBS, Knobs, controls_of
from memexplore.tape import Tape
from memexplore.text.units import size_text

_NO_SEARCH = SearchState("unavailable")
_MOST_ROWS = 100
_REMARKED = 3


class LiveKnobs:
    """The knobs of one watched run."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._table = [control for control in controls_of(Explored()) if control.field in locks.switchable()]
        self._named = {control.name: control for control in self._table}
        self._state = State()
        self._refused: Change | None = None
        """The last request that was refused at once, with the reason beside its knob."""

    def message(self, tape: Tape, selection: str | None) -> dict[str, Any]:
        """Return the state of the knobs (`ExplorerState` in ``frontend/types.d.ts``).

        `tape` is the one shown, and `selection` its selected layer.
        """
        self._follow()
        locked = self._live.locked()
        reasons = {control.name: locked[control.field] for control in self._table if control.field in locked}
        shown = {control.field for control in self._table}
        hidden = {KNOBS[name].label: locked[name] for name in KNOBS if name in locked and name not in shown}
        newest = self._newest()
        return explorer_message.message(
            self._state,
            self._table,
            reasons=reasons,
            contradiction=self._live.why_locked,
            hidden=hidden,
            against={},
            search=_NO_SEARCH,
            layer=self._layer(tape, selection, locked),
            is_working=False,
            applied=newest.effect if newest is not None and newest.state is ChangeState.APPLIED else ApplyReport(),
        )

    def _newest(self) -> Change | None:
        changes = self._live.requested
        return changes[-1] if changes else None

    def _follow(self) -> None:
        """Take the setting of the run: code may have assigned it, and a setting that failed was undone."""
        state, newest = self._state, self._newest()
        if state.knobs != self._live.knobs:
            state = explorer_state.requested(state, self._live.knobs)
        ended = newest is not None and newest.state in (ChangeState.UNDONE, ChangeState.REFUSED)
        problem = newest.reason if newest is not None and ended and newest is not self._refused else ""
        self._state = explorer_state.shown_at_once(state, problem)

    def _layer(self, tape: Tape, selection: str | None, locked: dict[str, str]) -> LayerState:
        return Layers.of(None, tape, locked).state(selection)

    @property
    def pending(self) -> str:
        """The setting that a later step gets, as text; empty if it is in effect."""
        knobs, newest = self._live.knobs, self._newest()
        if knobs == self._live.applied:
            return ""
        is_predicting = newest is not None and newest.state is ChangeState.PREDICTING
        return f"{'at the next step if it fits' if is_predicting else 'at the next step'}: {knobs}"

    @property
    def version(self) -> tuple[Any, ...]:
        """A value that changes with the message."""
        newest = self._newest()
        return self._state, self._live.knobs, None if newest is None else (newest.state, newest.reason)

    # -- requests

    def receive(self, request: dict[str, Any], layers: Tape) -> bool:
        """Take a request of the controls; return False for another one. Called in any thread."""
        kind = request["type"]
        if kind not in ("knob", "reset", "reset all", "undo", "redo", "layer action"):
            return False
        self._follow()
        state = explorer_state.received(self._state, request["view"], request["number"], request.get("after", 0))
        if state is self._state:
            return True
        self._state = state
        if kind == "knob":
            control = self._named[request["field"]]
            if control.kind == "text":
                value = request["value"]
            else:
                value = control.position(state.knobs, request["index"], request.get("label")).value
            self._turn(control, value, request.get("drag", ""))
        elif kind == "reset":
            self._want(explorer_state.requested(state, self._named[request["field"]].reset(state.knobs)))
        elif kind == "reset all":
            self._want(explorer_state.requested(state, Knobs()))
        elif kind == "undo":
            self._want(explorer_state.undone(state))
        elif kind == "redo":
            self._want(explorer_state.redone(state))
        else:
            names = self._layer(layers, request["layer"], self._live.locked()).layers
            control = explorer_message.of_layers(self._table, request["field"])
            self._turn(control, explorer_message.toggled(control, state.knobs, names))
        return True

    def _turn(self, control: Control, value: Any, drag: str = "") -> None:
        try:
            knobs = control.updated(self._state.knobs, value)
        except ValueError as error:
            self._state = explorer_state.impossible(self._state, control.name, reason_text(error))
            return
        self._want(explorer_state.requested(self._state, knobs, drag=drag, cause=control.name), control)

    def _want(self, state: State, control: Control | None = None) -> None:
        """Request the setting of a state; where the run refuses it, keep the present one and say why."""
        try:
            self._live.knobs = state.knobs
        except ValueError as error:
            self._refused = self._newest()
            if control is not None:
                self._state = explorer_state.impossible(self._state, control.name, reason_text(error))
            else:
                self._state = explorer_state.abandoned(self._state, state, reason_text(error))
        else:
            self._state = state

    # -- what was switched

    def marks(self) -> list[dict[str, Any]]:
        """Return the steps in which a setting took effect, for the history."""
        applied = [change for change in self._live.requested if change.state is ChangeState.APPLIED]
        return [
            {"step": change.step, "kind": "knobs", "text": _change_text(change)} for change in applied[-_MOST_ROWS:]
        ]

    def table(self) -> dict[str, Any] | None:
        """Return the tab of the requested settings, None before there is one."""
        changes = list(self._live.requested)[-_MOST_ROWS:]
        if not changes:
            return None
        rows = [
            {
                "cells": [
                    f"{change.step:,}",
                    str(change.knobs),
                    *map(_size, (change.predicted_peak, change.measured_peak)),
                    _state(change),
                ]
            }
            for change in changes
        ]
        titles = ["Step", "Setting", "Predicted peak", "Measured peak", "State"]
        return {"kind": "table", "titles": titles, "align": ["right", "left", "right", "right", "left"], "rows": rows}


def _change_text(change: Change) -> str:
    sizes = {"predicted": change.predicted_peak, "measured": change.measured_peak}
    texts = [f"{name} {size_text(size)}" for name, size in sizes.items() if size is not None]
    return f"{change.knobs}" + (f": peak {', '.join(texts)}" if texts else "")


def _size(size: int | None) -> str:
    return "" if size is None else size_text(size)


def _state(change: Change) -> str:
    return f"{change.state}: {change.reason}" if change.reason else str(change.state)
