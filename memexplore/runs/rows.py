"""The row of one watched step, and tables of rows for pandas and for files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
_SIZES = (*(name for name in NUMBERS if name != "seconds"), "other_processes")


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


def arrow_table(rows: Sequence[StepRow]) -> Any:
    """Return rows as a table of pyarrow, with the columns of the files."""
    import pyarrow

    kinds = {"seconds": pyarrow.float64(), "skipped": pyarrow.bool_()}
    kinds |= dict.fromkeys(_TEXTS, pyarrow.string())
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.int64())) for name in StepRow._fields])
    columns = [[row[index] for row in rows] for index in range(len(StepRow._fields))]
    arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pyarrow.Table.from_arrays(arrays, schema=schema)
