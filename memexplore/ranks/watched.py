"""A rank of a folder that `watch(folder=...)` wrote: its description, the rows of its steps, tapes of some steps."""

from __future__ import annotations

import re
from pathlib import Path

from memexplore.ranks.descriptions import About, about
from memexplore.ranks.rows import StepRow, rows_of_lines, totals_of
from memexplore.tape import Tape

STEPS = "steps.jsonl"
_TAPE = re.compile(r"step-([0-9]{1,15})\.tape")


def tape_name(step: int) -> str:
    """Return the name of the file with the tape of a step."""
    return f"step-{step}.tape"


class WatchedRank:
    """The folder of one rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def about(self) -> About:
        """Return what the rank says about itself."""
        described = about(self.folder)
        return described if described.totals is not None else described._replace(totals=totals_of(self.rows()))

    def rows(self) -> list[StepRow]:
        """Return the rows of its steps. Raises ValueError if they are damaged."""
        path = self.folder / STEPS
        try:
            return rows_of_lines(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None

    def recorded(self) -> list[int]:
        """Return the steps whose tapes are in the folder."""
        names = (_TAPE.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def tape(self, step: int) -> Tape:
        """Return the tape of a step."""
        return Tape.load(self.folder / tape_name(step))
