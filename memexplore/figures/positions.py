"""Place the rows of a Tape on the horizontal axis of a timeline: an axis of events, time or layers.

Set-up takes at most a twentieth of the axis, and equal steps one after the other share the place of the first of them.
"""

from __future__ import annotations

import enum
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import cached_by_tape, curve
from memexplore.figures.palette import escaped, event_ticks
from memexplore.tape import Action, Source, Tape

Floats = NDArray[np.float64]

_SET_UP_SHARE = 1 / 20
_LEAST_ALIKE = 3
"""Equal steps from which they share one place."""


class XAxis(enum.StrEnum):
    """What the horizontal axis counts."""

    EVENT = "event"
    """Rows, with equal distances."""
    TIME = "time"
    """Time of the recording; a prediction has no clock."""
    LAYER = "layer"
    """Visits of layers, with equal widths: rows of the same layer and phase, one after the other."""


class EqualSteps(enum.StrEnum):
    """Where equal steps are drawn."""

    FOLDED = "folded"
    """All in one place, that of the first."""
    APART = "apart"


class XChoice(NamedTuple):
    """Choice of a horizontal axis."""

    axis: XAxis = XAxis.EVENT
    equal: EqualSteps = EqualSteps.FOLDED


DEFAULT_X = XChoice()


class Fold(NamedTuple):
    """Steps ``first`` to ``last`` that are alike; the rows of all but the first are hidden."""

    first: int
    last: int
    row: int
    """First row of the first step."""
    hidden: tuple[int, int]
    """First hidden row, and the row after the last one."""

    @property
    def text(self) -> str:
        """Label of the place, such as ``steps 2–40 alike ×39``."""
        return f"steps {self.first}–{self.last} alike ×{self.last - self.first + 1}"

    def last_step(self, rows: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return rows of the tape, and which of them to show: of the folded steps only the last one that has rows.

        Its rows are moved to those of the first folded step, which has the place. Both arrays have the shape of `rows`.

        >>> rows, shown = Fold(1, 3, 0, (4, 12)).last_step(np.array([1, 3, 5, 7, 20]))  # steps of 4 rows
        >>> rows[shown].tolist()
        [1, 3, 20]
        """
        inside = (rows >= self.row) & (rows < self.hidden[1])
        length = self.hidden[0] - self.row
        step = np.floor_divide(rows - self.row, length)
        last = step[inside].max(initial=0)
        is_last = inside & (step == last)
        return np.where(is_last, rows - last * length, rows), is_last | ~inside


class Positions(NamedTuple):
    """Places of rows: linear between the knots."""

    rows: Floats
    xs: Floats
    choice: XChoice
    folds: tuple[Fold, ...]

    def x(self, rows: Any) -> Floats:
        """Return the places of some rows."""
        return np.asarray(np.interp(np.asarray(rows, dtype=np.float64), self.rows, self.xs))

    def is_shown(self, rows: NDArray[Any]) -> NDArray[np.bool_]:
        """Return for each of some rows whether it has a place of its own."""
        shown = np.ones(len(rows), dtype=bool)
        for fold in self.folds:
            shown &= (rows < fold.hidden[0]) | (rows >= fold.hidden[1])
        return shown


def has_clock(tape: Tape) -> bool:
    """Return whether the times of a tape are those of the run: a prediction has none, nor has a count of rows."""
    return tape.meta.source is not Source.PREDICTED and not np.array_equal(tape.time, np.arange(len(tape)))


def equal_steps(tape: Tape) -> tuple[Fold, ...]:
    """Return the runs of steps with equal requests and equal allocated bytes after each of them.

    >>> from memexplore.tape import Meta
    >>> columns = {"action": [Action.ALLOC, Action.FREE_REQUESTED] * 4, "address": [0] * 8, "size": [8] * 8,
    ...            "step": [1, 1, 2, 2, 3, 3, 4, 4]}
    >>> [fold.text for fold in equal_steps(Tape.from_columns(columns, meta=Meta(Source.MEASURED, "cpu")))]
    ['steps 1–4 alike ×4']

    Raises ValueError for a tape that is not placed.
    """
    return _equal_steps(tape)


@cached_by_tape
def _equal_steps(tape: Tape) -> tuple[Fold, ...]:
    starts = np.flatnonzero(np.diff(tape.step, prepend=0))
    if not len(starts):
        return ()
    bounds = [(int(first), int(last)) for first, last in itertools.pairwise([*starts.tolist(), len(tape)])]
    # Before the first row of a step may be events of the optimizer's end: a step is the rows with its number.
    columns: list[NDArray[Any]] = [tape.action, tape.size, tape.category, tape.op, tape.module, curve(tape)]

    def is_like_next(number: int) -> bool:
        (first, end), (second, stop) = bounds[number], bounds[number + 1]
        return end - first == stop - second and all(
            np.array_equal(column[first:end], column[second:stop]) for column in columns
        )

    folds: list[Fold] = []
    number = 0
    while number < len(bounds):
        last = number
        while last + 1 < len(bounds) and is_like_next(last):
            last += 1
        if last - number + 1 >= _LEAST_ALIKE:
            steps = [int(tape.step[bounds[band][0]]) for band in (number, last)]
            folds.append(Fold(steps[0], steps[1], bounds[number][0], (bounds[number][1], bounds[last][1])))
        number = last + 1
    return tuple(folds)


def positions(tape: Tape, choice: XChoice = DEFAULT_X) -> Positions:
    """Return the places of the rows of a tape; an axis of time falls back to events without a clock.

    >>> from memexplore.tape import Meta
    >>> tape = Tape.from_columns({"size": [1] * 40, "address": range(0, 20480, 512), "step": [0] * 20 + [1] * 20},
    ...                          meta=Meta(Source.MEASURED, "cpu"))
    >>> positions(tape).x([0, 20, 39]).round(2).tolist()  # set-up has a twentieth of 20
    [0.0, 1.0, 20.0]

    Raises ValueError for a tape that is not placed.
    """
    return _positions(choice)(tape)


@functools.cache
def _positions(choice: XChoice) -> Any:
    return cached_by_tape(lambda tape: _computed(tape, choice))


def _computed(tape: Tape, choice: XChoice) -> Positions:
    count = len(tape)
    if choice.axis is XAxis.TIME and not has_clock(tape):
        choice = choice._replace(axis=XAxis.EVENT)
    can_fold = choice.equal is EqualSteps.FOLDED and choice.axis is not XAxis.TIME
    folds = equal_steps(tape) if can_fold else ()
    if count < 2:
        ends = np.array([0.0, max(count - 1.0, 1.0)])
        return Positions(ends, ends, choice, ())
    width = _widths(tape, choice.axis)
    for fold in folds:
        # The last hidden row leads on to the next step, or to the end.
        width[max(fold.hidden[0] - 1, 0) : min(fold.hidden[1] - 1, count - 1)] = 0
    steps = np.flatnonzero(tape.step > 0)
    first = int(steps[0]) if len(steps) else 0
    set_up, rest = float(width[:first].sum()), float(width[first:].sum())
    if set_up > _SET_UP_SHARE * (set_up + rest) and rest > 0:
        width[:first] *= rest * _SET_UP_SHARE / (1 - _SET_UP_SHARE) / set_up
    xs = np.concatenate([[0.0], np.cumsum(width)])
    # A knot is needed only where the width of a row changes.
    knots = np.concatenate([[True], np.abs(np.diff(width)) > 1e-12 * max(float(width.max()), 1.0), [True]])
    return Positions(np.flatnonzero(knots).astype(np.float64), xs[knots], choice, folds)


def _widths(tape: Tape, axis: XAxis) -> Floats:
    """Return the distance of each row to the next one."""
    count = len(tape)
    if axis is XAxis.TIME:
        return np.maximum(np.diff(tape.time.astype(np.float64)) / 1e6, 0.0)
    if axis is XAxis.LAYER:
        starts = layer_visits(tape)
        lengths = np.diff(np.append(starts, count))
        return np.repeat(1.0 / lengths, lengths)[: count - 1]
    return np.ones(count - 1)


def layer_visits(tape: Tape) -> NDArray[np.int64]:
    """Return the first row of each visit of a layer; frees belong to the visit in which they happen."""
    is_request = np.isin(tape.action, (Action.ALLOC, Action.PREEXISTING, Action.OOM))
    rows = np.flatnonzero(is_request)
    if not len(rows):
        return np.zeros(1, dtype=np.int64)
    keys = np.stack([tape.module[rows], tape.phase[rows], tape.step[rows]])
    changes = np.append(True, np.any(keys[:, 1:] != keys[:, :-1], axis=0))
    starts = rows[changes]
    starts[0] = 0
    return starts


def axis_ticks(tape: Tape, places: Positions, first: int, last: int, pixels: float) -> dict[str, Any] | None:
    """Return plotly's ticks of the rows shown, None for an axis on which plotly places them itself."""
    if places.choice.axis is XAxis.TIME:
        return None
    if places.choice.axis is XAxis.LAYER:
        rows, texts = _layer_ticks(tape, first, last)
    elif len(places.rows) == 2:
        return None
    else:
        rows = np.array(
            [row for row in event_ticks(first, last, max(int(pixels / 100), 2)) if places.is_shown(np.array([row]))[0]],
            dtype=int,
        )
        texts = [f"{row:,}" for row in rows.tolist()]
    xs = places.x(rows)
    low, high = places.x([first, last])
    scale = pixels / max(float(high - low), 1e-9)
    kept: list[int] = []
    end = -np.inf
    for number, (x, text) in enumerate(zip(xs.tolist(), texts, strict=True)):
        half = (len(text) + 2) * 6.5 / 2
        if (x - low) * scale - half >= end and (places.choice.axis is not XAxis.LAYER or (x - low) * scale >= half):
            kept.append(number)
            end = (x - low) * scale + half
    return {"tickvals": xs[kept].tolist(), "ticktext": [escaped(texts[number]) for number in kept]}


def _short(name: str) -> str:
    """Return the last two parts of a layer's name, and the part before a number.

    >>> _short("transformer.h.3.mlp"), _short("transformer.wte")
    ('h.3.mlp', 'transformer.wte')
    """
    parts = name.split(".")
    return ".".join(parts[-3:] if len(parts) > 2 and parts[-2].isdecimal() else parts[-2:])


def _layer_ticks(tape: Tape, first: int, last: int) -> tuple[NDArray[np.int64], list[str]]:
    """Return the middle rows of the visits of layers, and their shortened names."""
    starts = layer_visits(tape)
    ends = np.append(starts[1:], len(tape))
    shown = (ends > first) & (starts <= last)
    starts, ends = starts[shown], ends[shown]
    names = [tape.modules[number] if (number := int(tape.module[row])) >= 0 else "" for row in starts.tolist()]
    pairs = [(start, end, _short(name)) for start, end, name in zip(starts, ends, names, strict=True)]
    named = [((start + end) // 2, text) for start, end, text in pairs if text]
    return np.array([row for row, _ in named], dtype=np.int64), [text for _, text in named]
