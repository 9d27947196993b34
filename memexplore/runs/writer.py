"""The folder of one rank, written while it runs: rows of steps and tapes go in, Parquet files come out.

A file is written under another name and then renamed, so a process that dies leaves complete files only. Rows are
written every few seconds; small files are merged, so a long run has few.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memexplore.runs.rows import StepRow, arrow_table
from memexplore.tape import Tape

SECONDS = 5.0
"""Time between two files of rows."""
MOST_FILES = 8
"""Files of one size that are merged into one."""
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
        (self.folder / "steps").mkdir(parents=True)
        (self.folder / "tapes").mkdir()
        self._about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), **about}
        self._rows: list[StepRow] = []
        self._next = time.monotonic() + SECONDS
        self.status: Callable[[], Mapping[str, Any]] = dict
        """Returns further entries of the description, such as the growth of memory."""
        self._levels: list[list[Path]] = [[]]
        """Files by size: a file of level n has the rows of `MOST_FILES` files of level n - 1."""
        self.describe(_WATCHING, "")

    def describe(self, state: str, error: str) -> None:
        """Write the state of the run, with the time."""
        values = {**self._about, "state": state, "error": error, "time": time.time(), **self.status()}
        text = json.dumps(values, indent=1)
        self._write(self.folder / "run.json", lambda path: path.write_text(text))

    def add(self, row: StepRow) -> None:
        """Add the row of a step; it is written within `SECONDS`, with the next step."""
        self._rows.append(row)
        if time.monotonic() >= self._next:
            self.flush()
            self.describe(_WATCHING, "")

    def explain(self, step: int, because: str) -> None:
        """Add why the peak of a step rose, which was found after the step was added."""
        for index in range(len(self._rows) - 1, -1, -1):
            if self._rows[index].step == step:
                self._rows[index] = self._rows[index]._replace(rose_because=because)
                return
        for path in (each for level in self._levels for each in reversed(level)):
            first, last = map(int, path.stem.split("-")[1:])
            if first <= step <= last:
                self._explain_in_file(path, step, because)
                return

    def _explain_in_file(self, path: Path, step: int, because: str) -> None:
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path)
        position = table.column_names.index("rose_because")
        texts = zip(table["step"].to_pylist(), table["rose_because"].to_pylist(), strict=True)
        changed = pyarrow.array([because if number == step else text for number, text in texts], pyarrow.string())
        self._write_rows(path, table.set_column(position, "rose_because", changed))

    def add_tape(self, step: int, tape: Tape) -> None:
        """Write the tape of a step."""
        self._write(self.folder / "tapes" / f"step-{step}.parquet", tape.save)

    def flush(self) -> None:
        """Write the rows that are not written yet."""
        self._next = time.monotonic() + SECONDS
        if self._rows:
            rows, self._rows = self._rows, []
            path = self._steps_file(rows[0].step, rows[-1].step)
            self._write_rows(path, arrow_table(rows))
            self._levels[0].append(path)
            self._merge(0)

    def _steps_file(self, first: int, last: int) -> Path:
        return self.folder / "steps" / f"steps-{first}-{last}.parquet"

    def _merge(self, level: int) -> None:
        """Merge the files of a level when there are many. Until the old ones are gone, the new one covers them."""
        import pyarrow
        import pyarrow.parquet

        files = self._levels[level]
        if len(files) < MOST_FILES:
            return
        first = files[0].stem.split("-")[1]
        last = files[-1].stem.split("-")[2]
        merged = self._steps_file(int(first), int(last))
        self._write_rows(merged, pyarrow.concat_tables([pyarrow.parquet.read_table(each) for each in files]))
        for each in files:
            if each != merged:
                each.unlink()
        self._levels[level] = []
        if level + 1 == len(self._levels):
            self._levels.append([])
        self._levels[level + 1].append(merged)
        self._merge(level + 1)

    def _write_rows(self, path: Path, table: Any) -> None:
        import pyarrow.parquet

        self._write(path, lambda unfinished: pyarrow.parquet.write_table(table, unfinished, compression="zstd"))

    def _write(self, path: Path, write: Any) -> None:
        unfinished = path.with_name(path.name + _UNFINISHED)
        write(unfinished)
        os.replace(unfinished, path)
