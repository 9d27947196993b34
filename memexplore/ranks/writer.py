"""Writes the folder of one rank while it runs: its description, the rows of its steps, tapes of some steps.

Rows are added to the end of their file every few seconds. Every other file is written under another name and then
renamed, so that a process that dies leaves complete files only.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memexplore.ranks import descriptions
from memexplore.ranks.rows import StepRow, Totals, line_of, median
from memexplore.ranks.watched import STEPS, tape_name
from memexplore.tape import Tape

SECONDS = 5.0
"""Time between two writes."""
_NEWEST = 1000
"""Steps whose median time the description has."""
_UNFINISHED = ".unfinished"
_WATCHING = "watching"


def rank_of_environment() -> tuple[int, int]:
    """Return rank and number of ranks that `torchrun` gives in the environment, by default 0 and 1.

    Raises ValueError where they are no numbers.
    """
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise ValueError("RANK and WORLD_SIZE in the environment are no whole numbers: unset them") from None


class Writer:
    """Writes the folder of one rank.

    Raises FileExistsError if the rank has a folder there already: another run's files are not replaced.
    """

    def __init__(self, folder: str | os.PathLike[str], rank: int, about: Mapping[str, Any]) -> None:
        self.folder = Path(folder) / f"rank={rank}"
        if self.folder.exists():
            raise FileExistsError(f"{self.folder} exists already: name another folder, or remove this one")
        self.folder.mkdir(parents=True)
        self._about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), **about}
        self._lines: list[str] = []
        self._totals = Totals()
        self._seconds: deque[float] = deque(maxlen=_NEWEST)
        self._state, self._error = _WATCHING, ""
        self._next = time.monotonic() + SECONDS
        self.status: Callable[[], Mapping[str, Any]] = dict
        """Returns further entries of the description, such as the growth of memory."""
        self._describe()

    def describe(self, state: str, error: str) -> None:
        """Write the state of the run, with the time."""
        self._state, self._error = state, error
        self._describe()

    def add(self, row: StepRow) -> None:
        """Add the row of a step; it is written within `SECONDS`, with the next step."""
        self._lines.append(line_of(row))
        self._totals = self._totals.plus(row)
        self._seconds.append(row.seconds)
        if time.monotonic() >= self._next:
            self.flush()

    def explain(self, step: int, because: str) -> None:
        """Add why the peak of a step rose, which was found after the step was added."""
        self._lines.append(json.dumps({"step": step, "rose_because": because}))

    def add_tape(self, step: int, tape: Tape) -> None:
        """Write the tape of a step."""
        self._write(tape_name(step), tape.save)

    def flush(self) -> None:
        """Write the rows that are not written yet."""
        self._next = time.monotonic() + SECONDS
        if self._lines:
            lines, self._lines = self._lines, []
            with (self.folder / STEPS).open("a", encoding="utf-8") as file:
                file.write("\n".join([*lines, ""]))
        self._describe()

    def _describe(self) -> None:
        totals = self._totals._replace(seconds=median(self._seconds))._asdict()
        state = {"state": self._state, "error": self._error, "time": time.time(), "totals": totals}
        text = json.dumps({**self._about, **state, **self.status()}, indent=1)
        self._write(descriptions.FILE, lambda path: path.write_text(text))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        unfinished = self.folder / (name + _UNFINISHED)
        write(unfinished)
        os.replace(unfinished, self.folder / name)
