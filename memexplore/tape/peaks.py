"""The summary of a tape in the header of its file: its peak by category and layer, and the peaks of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from memexplore.tape.fields import object_of, text_of, whole_number_of


class StepPeaks(NamedTuple):
    """The peaks of one step, and what is left after it, in bytes."""

    step: int
    allocated: int
    reserved: int
    allocated_after: int
    reserved_after: int


class Peaks(NamedTuple):
    """The peaks of a tape, in bytes."""

    allocated: int
    reserved: int
    row: int
    """The first row that reaches the peak allocated, -1 for a tape without rows."""
    by_category: Mapping[str, int]
    """Bytes allocated in that row, by the text of a category."""
    by_layer: Mapping[str, int]
    """Bytes allocated in that row by the largest layers."""
    steps: tuple[StepPeaks, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of the summary; steps are a list for each of their fields."""
        steps = {name: [step[index] for step in self.steps] for index, name in enumerate(StepPeaks._fields)}
        return self._asdict() | {"steps": steps}


def peaks_of(value: Any) -> Peaks:
    """Return the summary that a JSON object of a file holds.

    >>> steps = (StepPeaks(1, allocated=512, reserved=2048, allocated_after=0, reserved_after=2048),)
    >>> peaks = Peaks(512, 2048, 3, {"activation": 512}, {"fc": 512}, steps)
    >>> peaks_of(peaks.as_json()) == peaks
    True

    Raises ValueError for anything else.
    """
    values = object_of(value, "the peaks in its header")
    return Peaks(
        whole_number_of(values.get("allocated"), "the peak allocated"),
        whole_number_of(values.get("reserved"), "the peak reserved"),
        whole_number_of(values.get("row"), "the row of the peak", -1),
        _shares(values.get("by_category")),
        _shares(values.get("by_layer")),
        _steps(object_of(values.get("steps"), "the steps in its header")),
    )


def _shares(value: Any) -> dict[str, int]:
    shares = object_of(value, "the shares of the peak")
    return {text_of(name): whole_number_of(size, "a share of the peak") for name, size in shares.items()}


def _steps(values: Mapping[str, Any]) -> tuple[StepPeaks, ...]:
    columns = [values.get(name) for name in StepPeaks._fields]
    lists = [column for column in columns if type(column) is list]
    if len(lists) < len(columns) or len(set(map(len, lists))) > 1:
        raise ValueError("the steps in its header are not lists of equal length")
    return tuple(
        StepPeaks(*(whole_number_of(number, "a peak of a step") for number in step))
        for step in zip(*lists, strict=True)
    )
