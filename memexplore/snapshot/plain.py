"""Hold the content of a pickled snapshot: its events as columns, everything else as Python objects."""

from __future__ import annotations

import array
from typing import Any

from memexplore.text.untrusted import shown

EVENT_COLUMNS = ("action", "addr", "size", "stream", "time_us", "frames")


class PlainData:
    """The unpickled `root`, in which the row number of each event in `columns` stands for the event.

    `stacks` are the distinct lists of frame dictionaries.
    """

    def __init__(self) -> None:
        self.root: Any = None
        self.columns = {name: array.array("q") for name in EVENT_COLUMNS}
        self.actions: list[str] = []
        """Names of the actions, by their number in the column `action`."""
        self.stacks: list[list[Any]] = []
        self.device_free: dict[int, int] = {}
        """Free bytes that an oom event reports, by row."""
        self._numbers: dict[str, int] = {}
        self._stack_of_list: dict[int, int] = {}
        self.stack_of_text: dict[bytes, int] = {}
        """Numbers of the lists of frames that a regular expression read, by their bytes in the pickle."""

    def action_number(self, name: object) -> int:
        """Return the number of an action's name."""
        if type(name) is not str:
            raise ValueError(f"an action is a text, not {shown(name)}")
        if name not in self._numbers:
            self._numbers[name] = len(self.actions)
            self.actions.append(name)
        return self._numbers[name]

    def stack_number(self, frames: object) -> int:
        """Return the number of a list of frames, -1 for none."""
        if type(frames) is bytes:
            return self.stack_of_text.get(frames, -1)
        if type(frames) is not list or not frames:
            return -1
        if id(frames) not in self._stack_of_list:
            self._stack_of_list[id(frames)] = len(self.stacks)
            self.stacks.append(frames)
        return self._stack_of_list[id(frames)]

    def add_event(self, event: dict[str, Any]) -> int:
        """Append an event that was read as a dictionary to the columns and return its row."""
        columns = self.columns
        if "action" not in event or "size" not in event:
            raise ValueError("an event has an action and a size")
        number = self.action_number(event["action"])
        values = [_int64(event.get("addr", -1)), _int64(event["size"]), _int64(event.get("stream", 0))]
        values += [_int64(event.get("time_us", -1)), self.stack_number(event.get("frames"))]
        columns["action"].append(number)
        for name, value in zip(EVENT_COLUMNS[1:], values, strict=True):
            columns[name].append(value)
        row = len(columns["action"]) - 1
        if "device_free" in event:
            self.device_free[row] = _int64(event["device_free"])
        return row


def _int64(value: object) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"an address, a size, a stream or a time is a whole number of 64 bits, not {shown(value)}")
    return value
