"""Find memory that grows from period to period, such as training steps, and the leak in it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memexplore.analysis.curves import Rows, cached_by_tape, lifetimes, live_rows, peak
from memexplore.analysis.groups import category_names, layer_names, line_names
from memexplore.analysis.periods import periods
from memexplore.tape import Action, Category, Tape
from memexplore.text.units import difference_text, size_text

if TYPE_CHECKING:
    import pandas

_COMPARED = 100
LONGEST_TRAINING = 1_000_000
"""Steps after which a leak no longer matters: slower growth is not called a leak."""
_MANY_TIMES = 1_000
"""Times the recorded iterations after which growth no longer matters: how long a loop will run is not known."""
_LEAST_RISES = 3
_USUAL = 0.9
"""Share of the steps whose deviations count as usual; larger ones are rare."""


class Leak(NamedTuple):
    """Growth that continues to the last step."""

    bytes_per_period: int
    full_at: int | None
    """The period in which the device would be full; None without a capacity, and for a run that is out of memory."""
    row: int
    """An alloc row of the group that grows most: its line, layer and category."""
    unit: str
    """What a period is: "step" or "iteration"."""
    kept: tuple[int, ...]
    """The alloc rows of the blocks of earlier periods, at all places that grow, that live at the last row."""

    @property
    def rate(self) -> str:
        """The growth as a text, such as `16.0 MiB a step`."""
        return f"{size_text(self.bytes_per_period)} {'an' if self.unit == 'iteration' else 'a'} {self.unit}"


class _Held(NamedTuple):
    """Bytes at the ends of periods, by layer, line and category, as they were requested.

    The blocks may be larger, by remainders that differ from period to period in a program that does not grow.
    """

    periods: list[int]
    row: Rows
    """An alloc row of each group."""
    sizes: Rows
    """Shape (groups, periods)."""
    place: Rows
    """The number of the layer and line of each group."""
    born: Rows
    """The alloc rows of the blocks."""
    group: Rows
    """The group of each block."""


def growth(tape: Tape) -> pandas.DataFrame:
    """Return the groups whose memory grows from period to period, most growth first.

    A period is a step or, without steps, an iteration of a loop (`periods`). Columns `layer`, `line`, `category`, one
    column per period (its number) with the requested bytes at its end, and `grew`, last minus first. Only groups that
    never shrink and that grow at least twice are included (of two compared periods: that hold memory at the end of the
    first, too): what a program allocates once and keeps, such as the state of a second optimizer or the gradients that
    no further step sets to None, is no leak. The first period is warm-up, because it allocates gradients and optimizer
    state, and an unfinished last one is ignored, so the table is empty for fewer than three. Of more than 100 periods
    100 are compared, evenly spread.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"address": [0, 512, 1024], "size": [10, 10, 10], "step": [1, 2, 3]}
    >>> growth(Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cpu")))["grew"].tolist()
    [10]

    Raises ValueError for a tape that is not placed.
    """
    import pandas

    held = _held(tape)
    values = held.sizes
    grew = values[:, -1] - values[:, 0] if len(held.periods) else np.zeros(0, dtype=np.int64)
    changes = np.diff(values, axis=1)
    rises = np.count_nonzero(changes > 0, axis=1)
    if len(held.periods) == 2:
        rises += values[:, 0] > 0
    kept = np.flatnonzero(np.all(changes >= 0, axis=1) & (rises >= 2)) if len(grew) else grew
    rows = held.row[kept]
    columns: dict[str | int, NDArray[Any]] = {"layer": layer_names(tape)[tape.module[rows]]}
    columns |= {"line": line_names(tape, tape.stack[rows]), "category": category_names(tape, rows)}
    columns |= {step: values[kept, number] for number, step in enumerate(held.periods)}
    table = pandas.DataFrame({**columns, "grew": grew[kept]})
    return table.sort_values("grew", ascending=False, kind="stable", ignore_index=True)


@cached_by_tape
def leak(tape: Tape) -> Leak | None:
    """Return the growth that continues to the last finished period, None without one; cached per tape.

    The groups are layers and lines. A group leaks if what it never gives back again rises in at least three periods
    after the first one (in both of two), if it rises to the end: since its last rise no more periods have passed than
    between two rises, and if it rises by more than it usually varies, as with batches of varying length. Growth that
    happens once (the state of an optimizer, a second model) and growth that ends (a cache that is full) is no leak. The
    bytes per period are the median of the growth between any two periods (Theil and Sen), summed over the groups.
    Growth that would take more than a million steps, or a thousand times the recorded iterations, to fill the device,
    or without a capacity to double the peak, is ignored.

    >>> from memexplore.tape import Meta, Source
    >>> rows = {"address": [0, 512, 1024, 1536], "size": [10, 10, 10, 10], "step": [1, 2, 3, 4]}
    >>> leak(Tape.from_columns(rows, meta=Meta(Source.MEASURED, "cpu"))).rate
    '10 B a step'

    Raises ValueError for a tape that is not placed.
    """
    held = _held(tape)
    if len(held.periods) < 3:
        return None
    # A tensor that replaces another can be of another category, such as the last of the results of `torch.cat`.
    groups, held = held, _by_place(held)
    steps = np.array(held.periods, dtype=np.float64)
    # What a group holds after a step and never gives back: the least of all later values.
    kept = np.minimum.accumulate(held.sizes[:, ::-1], axis=1)[:, ::-1]
    slopes = np.zeros(len(kept))
    for group in np.flatnonzero(kept[:, -1] - kept[:, 0] > usual_deviations(held.sizes, kept)).tolist():
        if rises_to_the_end(kept[group]):
            slopes[group] = median_slope(steps, kept[group])
    rate = float(slopes.sum())
    found = periods(tape)
    used, capacity = peak(tape, "reserved")[0], tape.meta.capacity
    room = used if capacity is None else max(capacity - used, 0)
    longest = LONGEST_TRAINING if found.unit == "step" else _MANY_TIMES * len(found.ends)
    if rate <= 0 or room / rate > longest:
        return None
    is_open = capacity is not None and not np.any(tape.action == Action.OOM)
    full_at = held.periods[-1] + math.ceil(room / rate) if is_open else None
    # What a place has allocated once, such as a workspace, is no growth.
    grows = np.isin(groups.place, held.place[slopes > 0]) & (groups.sizes[:, -1] > groups.sizes[:, 0])
    blocks = held.born[grows[held.group] & (held.born <= found.ends[-1])]
    kept = np.intersect1d(blocks, live_rows(tape, len(tape) - 1))
    return Leak(round(rate), full_at, int(held.row[int(np.argmax(slopes))]), found.unit, tuple(kept.tolist()))


def usual_deviations(sizes: Rows, kept: Rows) -> NDArray[np.float64]:
    """Return for each row twice the deviation of its sizes from the lowest later ones, without the rarest tenth.

    The lowest of later sizes, `kept`, rises by chance too where sizes vary and do not grow, but by less.

    >>> usual_deviations(np.array([[4, 2, 3]]), np.array([[2, 2, 3]])).round(1)
    array([3.2])
    """
    return 2 * np.quantile(sizes - kept, _USUAL, axis=-1)


def rises_to_the_end(values: Rows) -> bool:
    """Return whether values that never fall rise at least three times (in each interval if fewer), and to the end.

    >>> rises_to_the_end(np.array([1, 2, 3, 4])), rises_to_the_end(np.array([1, 2, 3, 4, 4, 4]))
    (True, False)
    """
    rises = np.flatnonzero(np.diff(values) > 0)
    intervals = len(values) - 1
    if len(rises) < min(_LEAST_RISES, intervals):
        return False
    return bool(intervals - 1 - rises[-1] < np.diff(rises).max())


def median_slope(steps: NDArray[np.float64], values: Rows) -> float:
    """Return the median of the slopes between any two points (Theil and Sen), in units of `values` a step."""
    first, second = np.triu_indices(len(values), k=1)
    return float(np.median((values[second] - values[first]) / (steps[second] - steps[first])))


def _held(tape: Tape) -> _Held:
    """Return the bytes at the ends of at most 100 finished periods after the first."""
    found = periods(tape)
    ends, numbers = np.array(found.ends[1:], dtype=np.int64), np.array(found.numbers[1:], dtype=np.int64)
    if len(ends) > _COMPARED:
        compared = np.linspace(0, len(ends) - 1, _COMPARED).round().astype(np.int64)
        ends, numbers = ends[compared], numbers[compared]
    life = lifetimes(tape)
    # The ends of periods that a block lives to see.
    first, after = np.searchsorted(ends, life.born), np.searchsorted(ends, life.requested)
    seen = (first < after) & (tape.size[life.born] > 0)
    born, first, after = life.born[seen], first[seen], after[seen]
    _, layer = np.unique(layer_names(tape).astype(str), return_inverse=True)
    stacks, stack = np.unique(tape.stack[born], return_inverse=True)
    _, line = np.unique(line_names(tape, stacks).astype(str), return_inverse=True)
    keys = (layer[tape.module[born]] * (len(stacks) + 1) + line[stack]) * len(Category) + tape.category[born]
    groups, group = np.unique(keys, return_inverse=True)
    row = np.zeros(len(groups), dtype=np.int64)
    row[group] = born  # the last block of each group
    changes = np.zeros((len(groups), len(ends) + 1), dtype=np.int64)
    sizes = tape.size[born]
    np.add.at(changes, (group, first), sizes)
    np.add.at(changes, (group, after), -sizes)
    bytes_at_ends = np.cumsum(changes, axis=1)[:, :-1]
    return _Held(numbers.tolist(), row, bytes_at_ends, groups // len(Category), born, group)


def _by_place(held: _Held) -> _Held:
    """Return the bytes by layer and line, of all categories together."""
    places, group = np.unique(held.place, return_inverse=True)
    sizes = np.zeros((len(places), len(held.periods)), dtype=np.int64)
    np.add.at(sizes, group, held.sizes)
    row = np.zeros(len(places), dtype=np.int64)
    np.maximum.at(row, group, held.row)
    return held._replace(row=row, sizes=sizes, place=places)


def shown_steps(table: pandas.DataFrame) -> list[int]:
    """Return the periods that a narrow table of `growth` shows: the first, the second last and the last.

    >>> import pandas
    >>> shown_steps(pandas.DataFrame(columns=["layer", "line", "category", 2, 3, 4, 5, "grew"]))
    [2, 4, 5]
    """
    steps = [column for column in table.columns if isinstance(column, int)]
    return sorted({*steps[:1], *steps[-2:]})


def growth_text(tape: Tape) -> str:
    """Return the growth of the groups of `growth` together as one sentence, empty if nothing grew."""
    table = growth(tape)
    if not len(table):
        return ""
    steps = [column for column in table.columns if isinstance(column, int)]
    first, last = (int(table[step].sum()) for step in (steps[0], steps[-1]))
    unit = periods(tape).unit
    return (
        f"{size_text(first)} at the end of {unit} {steps[0]} grew to {size_text(last)} at the end of {unit} "
        f"{steps[-1]}, {difference_text(first, last)}."
    )
