"""What a pickle of plain data holds, its events as columns."""

from __future__ import annotations

import array
from typing import Any

EVENT_COLUMNS = ("action", "addr", "size", "stream", "time_us", "frames")


class Plain:
    """What a pickle holds: `root` as Python wrote it, but an event became its row number in `columns`.

    `stacks` are lists of frame dictionaries, each once.
    """

    def __init__(self) -> None:
        self.root: Any = None
        self.columns = {name: array.array("q") for name in EVENT_COLUMNS}
        self.actions: list[str] = []
        """What the numbers in the column `action` mean."""
        self.stacks: list[list[Any]] = []
        self.device_free: dict[int, int] = {}
        """What an oom event says was free, by row."""
        self._numbers: dict[str, int] = {}
        self._stack_of_list: dict[int, int] = {}
        self.stack_of_text: dict[bytes, int] = {}
        """The numbers of lists of frames that the regular expression read, by their bytes in the pickle."""

    def action_number(self, name: object) -> int:
        """The number of an action's name."""
        if not isinstance(name, str):
            raise ValueError(f"an action is a text, not {type(name).__name__}")
        if name not in self._numbers:
            self._numbers[name] = len(self.actions)
            self.actions.append(name)
        return self._numbers[name]

    def stack_number(self, frames: object) -> int:
        """The number of a list of frames, -1 for none."""
        if type(frames) is bytes:
            return self.stack_of_text.get(frames, -1)
        if not isinstance(frames, list) or not frames:
            return -1
        if id(frames) not in self._stack_of_list:
            self._stack_of_list[id(frames)] = len(self.stacks)
            self.stacks.append(frames)
        return self._stack_of_list[id(frames)]

    def add_event(self, event: dict[str, Any]) -> int:
        """Put an event that was read as a dictionary into the columns; its row."""
        columns = self.columns
        number = self.action_number(event["action"])
        values = [_whole(event.get("addr", -1)), _whole(event["size"]), _whole(event.get("stream", 0))]
        values += [_whole(event.get("time_us", -1)), self.stack_number(event.get("frames"))]
        columns["action"].append(number)
        for name, value in zip(EVENT_COLUMNS[1:], values, strict=True):
            columns[name].append(value)
        row = len(columns["action"]) - 1
        if "device_free" in event:
            self.device_free[row] = _whole(event["device_free"])
        return row


def _whole(value: object) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"an address, a size, a stream or a time is a whole number of 64 bits, not {value!r:.40}")
    return value
