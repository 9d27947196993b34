"""Hold the state of an explorer as one value, and compute the next state for what a person or the code wants.

Nothing here runs a step or knows a widget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from memexplore.run.knobs.knobs import Knobs

_AS_WRITTEN = Knobs()


@dataclasses.dataclass(frozen=True)
class State:
    """The settings of an explorer: wanted, drawn and pinned, with what can be undone."""

    knobs: Knobs = _AS_WRITTEN
    """The setting wanted; its run may not have ended."""
    number: int = 0
    """Rises with each setting wanted."""
    drawn: Knobs = _AS_WRITTEN
    drawn_number: int = 0
    """The `number` of the setting drawn; equal to `number` if the picture is of the setting wanted."""
    pinned: Knobs | None = None
    """The setting that others are compared with; None for the step as written."""
    undo: tuple[Knobs, ...] = ()
    """Settings to go back to, the next one last."""
    redo: tuple[Knobs, ...] = ()
    """Settings that were undone, the next one first."""
    history: tuple[Knobs, ...] = (_AS_WRITTEN,)
    """The settings that were drawn, each once, in order; of one drag only the last."""
    drag: str = ""
    """The drag that made the setting wanted; empty after any other request."""
    drag_start: Knobs = _AS_WRITTEN
    """The setting in which that drag began."""
    drag_of_history: str = ""
    """The drag that made the last entry of the history; empty if none did."""
    problems: tuple[tuple[str, str], ...] = ()
    """Names of knobs whose last request was not applied, with the reason."""
    problem: str = ""
    """Why a setting was not applied, where no single knob is the cause."""
    received: tuple[tuple[str, int], ...] = ()
    """Number of the latest request of each page."""

    @property
    def baseline(self) -> Knobs:
        """The setting with which the one drawn is compared."""
        return _AS_WRITTEN if self.pinned is None else self.pinned


def received(state: State, page: str, number: int, after: int = 0) -> State:
    """Note the number of a page's request; the same state if the request is not to be taken.

    That is one which was received before, and one before which the page has sent number `after`, if that was lost: the
    page sends both again, in order.

    >>> state = received(State(), "a", 3)
    >>> state.received, received(state, "a", 2) is state, received(state, "a", 5, after=4) is state
    ((('a', 3),), True, True)
    """
    latest = dict(state.received)
    if not after <= latest.get(page, 0) < number:
        return state
    return dataclasses.replace(state, received=tuple({**latest, page: number}.items()))


def requested(state: State, knobs: Knobs, *, drag: str = "", cause: str = "") -> State:
    """Want another setting. All requests of one drag are undone together; `cause` is the knob that was turned.

    >>> one = requested(requested(State(), Knobs(batch=4), drag="d"), Knobs(batch=2), drag="d")
    >>> [str(knobs) for knobs in (*one.undo, one.knobs)]
    ['as written', 'batch 2']
    """
    problems = tuple((knob, text) for knob, text in state.problems if knob != cause) if cause else ()
    state = dataclasses.replace(state, problems=problems, problem="")
    if knobs == state.knobs:
        return state
    start, undo = state.knobs, state.undo
    if drag and drag == state.drag:
        start = state.drag_start
        # While a drag is where it began, there is nothing to undo.
        undo = undo if state.knobs == start else undo[:-1]
    undo = undo if knobs == start else (*undo, start)
    return dataclasses.replace(
        state, knobs=knobs, number=state.number + 1, undo=undo, redo=(), drag=drag, drag_start=start
    )


def undone(state: State) -> State:
    """Want the setting before the latest change; no change if there is none.

    >>> undone(requested(State(), Knobs(batch=4))).redo
    (Knobs(batch=4),)
    """
    if not state.undo:
        return state
    *undo, knobs = state.undo
    return _moved(state, knobs, tuple(undo), (state.knobs, *state.redo))


def redone(state: State) -> State:
    """Want the setting that was undone last; no change if there is none.

    >>> one = requested(State(), Knobs(batch=4))
    >>> redone(undone(one)).knobs == one.knobs
    True
    """
    if not state.redo:
        return state
    knobs, *redo = state.redo
    return _moved(state, knobs, (*state.undo, state.knobs), tuple(redo))


def _moved(state: State, knobs: Knobs, undo: tuple[Knobs, ...], redo: tuple[Knobs, ...]) -> State:
    number = state.number + 1
    return dataclasses.replace(
        state, knobs=knobs, number=number, undo=undo, redo=redo, drag="", problems=(), problem=""
    )


def pinned(state: State, knobs: Knobs | None) -> State:
    """Compare with a setting that was drawn, or with the step as written if it is None."""
    return dataclasses.replace(state, pinned=knobs)


def drawn(state: State, run: State) -> State:
    """Note that the setting of an earlier state is drawn.

    >>> one = requested(State(), Knobs(batch=4), drag="d")
    >>> two = requested(one, Knobs(batch=2), drag="d")
    >>> [str(knobs) for knobs in drawn(drawn(two, one), two).history]
    ['as written', 'batch 2']
    """
    history, drag = state.history, state.drag_of_history
    if run.drag and run.drag == drag:
        history, drag = history[:-1], ""
    if run.knobs not in history:
        history, drag = (*history, run.knobs), run.drag
    number = max(run.number, state.drawn_number)
    return dataclasses.replace(state, drawn=run.knobs, drawn_number=number, history=history, drag_of_history=drag)


def shown_at_once(state: State, problem: str = "") -> State:
    """Note that the setting wanted needs no run of its own before it is shown, and why the last one failed.

    >>> state = shown_at_once(requested(State(), Knobs(batch=4)))
    >>> state.drawn_number == state.number
    True
    """
    return dataclasses.replace(state, drawn=state.knobs, drawn_number=state.number, problem=problem)


def refused(state: State, run: State, field: str, knob: str, reason: str) -> State:
    """Give one field of the setting wanted, and of those to undo, the value drawn; the other fields stay.

    `run` is the state whose setting could not be run, `field` the field of `Knobs` that is the cause, `knob` the name
    of the control that shows the reason.

    >>> good = requested(State(), Knobs(batch=4))
    >>> good = drawn(good, good)
    >>> bad = requested(good, Knobs(batch=4, lora="conv"))
    >>> then = requested(bad, Knobs(batch=2, lora="conv"))
    >>> str(refused(then, bad, "lora", "lora", "conv is not a linear layer").knobs)
    'batch 2'
    """
    wrong, right = getattr(run.knobs, field), getattr(state.drawn, field)

    def corrected(knobs: Knobs) -> Knobs:
        return knobs.replace(**{field: right}) if getattr(knobs, field) == wrong else knobs

    return _corrected(impossible(state, knob, reason), corrected)


def impossible(state: State, knob: str, reason: str) -> State:
    """Say beside a knob why its request changes nothing."""
    others = ((name, text) for name, text in state.problems if name != knob)
    return dataclasses.replace(state, problems=(*others, (knob, reason)))


def abandoned(state: State, run: State, reason: str = "") -> State:
    """Return to the setting drawn, from a setting that could not be run for no reason of a single knob."""
    state = dataclasses.replace(state, problem=reason)
    return _corrected(state, lambda knobs: state.drawn if knobs == run.knobs else knobs)


def _corrected(state: State, corrected: Callable[[Knobs], Knobs]) -> State:
    knobs = corrected(state.knobs)
    undo = _without_repeats(map(corrected, state.undo))
    redo = _without_repeats(map(corrected, state.redo))
    return dataclasses.replace(
        state,
        knobs=knobs,
        undo=undo[:-1] if undo and undo[-1] == knobs else undo,
        redo=redo[1:] if redo and redo[0] == knobs else redo,
        drag_start=corrected(state.drag_start),
        # The setting drawn may be the one wanted again.
        drawn_number=state.number if knobs == state.drawn else state.drawn_number,
    )


def _without_repeats(settings: Iterable[Knobs]) -> tuple[Knobs, ...]:
    kept: list[Knobs] = []
    for knobs in settings:
        if not kept or kept[-1] != knobs:
            kept.append(knobs)
    return tuple(kept)
