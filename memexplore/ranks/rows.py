"""The row of one watched step: in a table of pandas, as a line of a file, and what many rows come to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore.text.untrusted import clean_text, shown

if TYPE_CHECKING:
    import pandas


class StepRow(NamedTuple):
    """One step; sizes in bytes, None where the device does not count it."""

    step: int
    seconds: float
    """From the end of the step before to the end of this one, without the time it was paused."""
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    allocated_after: int | None = None
    """Allocated when the optimizer had stepped."""
    rose_because: str = ""
    """Why the peak is higher than every earlier one, "" where it is not."""
    reserved_after: int | None = None
    outside: int | None = None
    """Used on the device outside the allocator: by this process if `other_processes` is known, else by any process."""
    resident: int | None = None
    """Resident memory of the process on the host."""
    peak_from: str = ""
    """Origin of the peaks (`counters.PeakFrom`)."""
    recorded: str = ""
    """Why the step was recorded completely (`schedule.Cause`), "" for a light step."""
    micro_batches: int = 0
    """Calls of the model with gradients; of several models, those of the one that is called first."""
    evaluations: int = 0
    """Calls of the model without gradients, such as those of a validation, counted likewise."""
    skipped: bool = False
    """Whether a gradient scaler skipped the optimizer's step."""
    inputs: str = ""
    """Shapes of the inputs of the call with the largest inputs."""
    error: str = ""
    """The error that ended the step before its end."""
    other_processes: int | None = None
    """Used on the device by other processes, None where the driver does not say."""
    requested_after: int | None = None
    """What was requested of `allocated_after`: blocks may be larger."""

    @property
    def free_in_cache(self) -> int | None:
        """Bytes reserved and not allocated at the end of the step."""
        if self.reserved_after is None or self.allocated_after is None:
            return None
        return self.reserved_after - self.allocated_after


NUMBERS = (
    "seconds",
    "peak_allocated",
    "peak_reserved",
    "allocated_after",
    "reserved_after",
    "outside",
    "resident",
)
"""Fields that are binned in the history of all steps."""
_POSITIONS = tuple(StepRow._fields.index(name) for name in NUMBERS)
_TEXTS = ("rose_because", "peak_from", "recorded", "inputs", "error")
_DEFAULTS = StepRow._field_defaults
_LARGEST = 1 << 62
_SIZES = (*(name for name in NUMBERS if name != "seconds"), "other_processes", "requested_after")


def numbers(row: StepRow) -> tuple[float | int | None, ...]:
    """Return the fields named in `NUMBERS`."""
    return tuple([row[position] for position in _POSITIONS])  # type: ignore[misc]


def table(rows: Sequence[StepRow]) -> pandas.DataFrame:
    """Return rows as a DataFrame; sizes are nullable integers.

    >>> table([StepRow(1, 0.5, peak_allocated=8)])[["step", "peak_allocated", "rose_because"]].to_numpy().tolist()
    [[1, 8, '']]
    """
    import pandas

    columns: dict[str, Any] = {name: [row[index] for row in rows] for index, name in enumerate(StepRow._fields)}
    columns |= {name: pandas.array(columns[name], dtype="Int64") for name in _SIZES}
    free = pandas.array([row.free_in_cache for row in rows], dtype="Int64")
    frame = pandas.DataFrame(columns)
    frame.insert(StepRow._fields.index("reserved_after") + 1, "free_in_cache", free)
    return frame


def line_of(row: StepRow) -> str:
    """Return a row as a line of a file: a JSON object of the fields that differ from their default.

    >>> line_of(StepRow(3, float("nan"), peak_allocated=8))
    '{"step": 3, "peak_allocated": 8}'
    """
    values = {name: value for name, value in row._asdict().items() if value != _DEFAULTS.get(name)}
    if math.isnan(row.seconds):  # of a step without a clock; JSON has no such number
        del values["seconds"]
    return json.dumps(values)


def rows_of_lines(text: str) -> list[StepRow]:
    """Return the rows in the lines of a file, which may come from anybody, in the order of their steps.

    A later line adds to an earlier one of its step. A last line without an end is one that a process that died began.

    >>> lines = '{"step": 2, "seconds": 0.5}\\n{"step": 2, "rose_because": "larger batch"}\\n{"step": 3, "sec'
    >>> [(row.step, row.seconds, row.rose_because) for row in rows_of_lines(lines)]
    [(2, 0.5, 'larger batch')]

    Raises ValueError for lines that hold anything else.
    """
    steps: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            values = _checked(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is no row of a step ({error})") from None
        steps.setdefault(values["step"], {"seconds": float("nan")}).update(values)
    return [StepRow(**steps[step]) for step in sorted(steps)]


def _checked(values: Any) -> dict[str, Any]:
    if type(values) is not dict or type(values.get("step")) is not int:
        raise ValueError("it names no step")
    return {name: _value(name, value) for name, value in values.items() if name in StepRow._fields}


def _value(name: str, value: Any) -> Any:
    """Return a value of a field, which has its type."""
    if name in _TEXTS and type(value) is str:
        return clean_text(value)
    if name == "skipped" and type(value) is bool:
        return value
    if name == "seconds" and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if name not in (*_TEXTS, "skipped", "seconds") and type(value) is int and abs(value) < _LARGEST:
        return value
    raise ValueError(f"{name} is {shown(value)}")


class Totals(NamedTuple):
    """What the rows of a rank come to; sizes in bytes, None where no step has them."""

    steps: int = 0
    peak_allocated: int | None = None
    peak_step: int | None = None
    """The first step with the highest peak allocated."""
    peak_reserved: int | None = None
    allocated_after: int | None = None
    """Of the last step."""
    outside: int | None = None
    seconds: float | None = None
    """The median."""

    def plus(self, row: StepRow) -> Totals:
        """Return the totals with one more row, but for the median."""
        highest = -1 if self.peak_allocated is None else self.peak_allocated
        rises = row.peak_allocated is not None and row.peak_allocated > highest
        return Totals(
            self.steps + 1,
            row.peak_allocated if rises else self.peak_allocated,
            row.step if rises else self.peak_step,
            _larger(row.peak_reserved, self.peak_reserved),
            self.allocated_after if row.allocated_after is None else row.allocated_after,
            _larger(row.outside, self.outside),
            self.seconds,
        )


def totals_of(rows: Iterable[StepRow]) -> Totals:
    """Return what rows come to.

    >>> totals_of([StepRow(1, 0.5, peak_allocated=8), StepRow(2, 0.25, peak_allocated=8)])[:3]
    (2, 8, 1)
    """
    totals, seconds = Totals(), []
    for row in rows:
        totals = totals.plus(row)
        seconds.append(row.seconds)
    return totals._replace(seconds=median(seconds))


def totals_of_json(values: Any) -> Totals | None:
    """Return the totals in a JSON object that may come from anybody, None for anything else."""
    if not isinstance(values, Mapping) or not values.keys() <= set(Totals._fields):
        return None
    kinds = {name: (float, int) if name == "seconds" else (int,) for name in Totals._fields}
    numbers = {name: value for name, value in values.items() if value is not None}
    if any(type(value) not in kinds[name] or not abs(value) < _LARGEST for name, value in numbers.items()):
        return None
    return Totals(**numbers)


def median(seconds: Iterable[float]) -> float | None:
    """Return the median of the seconds that are known, None where none is."""
    known = sorted(value for value in seconds if not math.isnan(value))
    return statistics.median(known) if known else None


def _larger(value: int | None, other: int | None) -> int | None:
    return other if value is None else value if other is None else max(value, other)
