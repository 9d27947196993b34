"""The ranks of a run side by side: tables, tapes and what differs, from the files of a folder.

The overview reads what stands in front: the header of a tape, or the description of a watched rank. The files may come
from anybody: only names and numbers of the expected kinds are taken over.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from memexplore.ranks.descriptions import DIED, About
from memexplore.ranks.recorded import RecordedRank
from memexplore.ranks.rows import StepRow, Totals, table
from memexplore.ranks.watched import WatchedRank
from memexplore.tape import Tape
from memexplore.text.units import difference_text, size_text

if TYPE_CHECKING:
    import pandas

    from memexplore.analysis.difference import Difference

_FOLDER = re.compile(r"rank=([0-9]{1,7})")
_FILE = re.compile(r"rank-([0-9]{1,7})\.tape")
_NAMED = 5


class Ranks:
    """The ranks of a folder: sub-folders of a watched run, or tapes `rank-0.tape`, `rank-1.tape` and so on.

    Nothing is read before it is asked for.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        ranks: dict[int, WatchedRank | RecordedRank] = {}
        for path in self.folder.iterdir():
            if match := _FOLDER.fullmatch(path.name):
                ranks[int(match[1])] = WatchedRank(path)
            elif match := _FILE.fullmatch(path.name):
                ranks[int(match[1])] = RecordedRank(path)
        if not ranks:
            raise ValueError(
                f"{self.folder} has no ranks: give a folder that `watch(folder=...)` wrote, or one of tapes with names "
                "such as rank-0.tape"
            )
        self._ranks = dict(sorted(ranks.items()))
        self._summary: pandas.DataFrame | None = None
        self._abouts: dict[int, About] | None = None

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    # -- tables

    def abouts(self) -> dict[int, About]:
        """Return the descriptions of the ranks by rank."""
        if self._abouts is None:
            self._abouts = {rank: files.about() for rank, files in self._ranks.items()}
        return self._abouts

    @property
    def has_steps(self) -> bool:
        """Whether rows of steps are written yet."""
        return any(about.totals is not None and about.totals.steps for about in self.abouts().values())

    def table(self) -> pandas.DataFrame:
        """Return one row per rank: those that an error ended, the first one first, those that died, then by peak.

        Columns `rank`, `steps`, `peak_allocated`, `peak_step`, `peak_reserved`, `allocated_after` (of the last step),
        `outside`, `seconds` (the median), `state`, `error`, `device`, `capacity` and `host`.
        """
        import pandas

        if self._summary is None:
            if not self.has_steps:
                raise ValueError(f"{self.folder} has no rows of steps yet: wait for the end of the first steps")
            abouts = self.abouts()
            table = pandas.DataFrame(
                [(rank, *about, *(about.totals or Totals())) for rank, about in abouts.items()],
                columns=["rank", *About._fields, *Totals._fields],
            )
            sizes = ["steps", "peak_allocated", "peak_step", "peak_reserved", "allocated_after", "outside", "capacity"]
            table = table.astype(dict.fromkeys(sizes, "Int64") | {"seconds": float})
            failed = table["error"] != ""
            table["order"] = np.select([failed, table["state"] == DIED], [0, 1], 2)
            # Other ranks fail because the first one did.
            table["since"] = table["time"].where(table["order"] < 2).astype(float)
            order = ["order", "since", "peak_allocated", "rank"]
            table = table.sort_values(order, ascending=[True, True, False, True])
            order = ["rank", "steps", "peak_allocated", "peak_step", "peak_reserved", "allocated_after", "outside"]
            order += ["seconds", "state", "error", "device", "capacity", "host"]
            self._summary = table[order].reset_index(drop=True)
        return self._summary.copy()

    def rows(self, rank: int) -> list[StepRow]:
        """Return the rows of the steps of a rank. Raises LookupError for a rank that the folder does not have."""
        return self._of(rank).rows()

    def steps(self, rank: int | None = None) -> pandas.DataFrame:
        """Return the rows of the steps of a rank, or of all ranks with the column `rank` in front.

        The other columns are those of `Live.steps`. Raises LookupError for a rank that the folder does not have.
        """
        import pandas

        if rank is not None:
            return table(self.rows(rank))
        rows = {rank: files.rows() for rank, files in self._ranks.items()}
        steps = table([row for rows_of_rank in rows.values() for row in rows_of_rank])
        numbers = np.repeat(list(rows), [len(rows_of_rank) for rows_of_rank in rows.values()])
        return pandas.concat([pandas.Series(numbers, name="rank"), steps], axis="columns")

    def recorded(self, rank: int) -> list[int]:
        """Return the steps of a rank whose tapes are in the folder."""
        return self._of(rank).recorded()

    def tape(self, rank: int | None = None, step: int | None = None) -> Tape:
        """Return the tape of a step; by default of the worst rank, and of its recorded step with the highest peak.

        Raises LookupError for a rank or a step without a tape.
        """
        rank = self.worst if rank is None else rank
        recorded = self.recorded(rank)
        if step is None and recorded:
            peaks = {row.step: row.peak_allocated for row in self.rows(rank) if row.peak_allocated is not None}
            known = [number for number in recorded if number in peaks]
            step = max(known, key=lambda number: peaks[number]) if known else recorded[-1]
        if step not in recorded:
            kept = ", ".join(map(str, recorded)) or "none"
            raise LookupError(f"rank {rank} has no tape of step {step}; it has: {kept}")
        return self._of(rank).tape(step)

    def _of(self, rank: int) -> WatchedRank | RecordedRank:
        if rank not in self._ranks:
            raise LookupError(f"the folder has no rank {rank}; it has {len(self)} ranks, from {min(self._ranks)} on")
        return self._ranks[rank]

    # -- what differs

    @property
    def worst(self) -> int:
        """The first rank of `table`."""
        return int(self.table()["rank"].iloc[0])

    @property
    def typical(self) -> int:
        """The rank in the middle of the peaks allocated."""
        by_peak = self.table().sort_values("peak_allocated", kind="stable")
        return int(by_peak["rank"].iloc[(len(by_peak) - 1) // 2])

    def difference(self) -> Difference:
        """Return what differs between the peaks of the worst and of the typical rank (`memexplore.diff`)."""
        # With pandas, which only few commands need.
        from memexplore.analysis.difference import diff

        return diff(self.tape(self.typical), self.tape(self.worst))

    @property
    def text(self) -> str:
        """The ranks in sentences."""
        table = self.table()
        first, typical = table.iloc[0], self.typical
        failed = int((table["error"] != "").sum())
        parts = [f"{len(table)} ranks" if len(table) > 1 else "1 rank"]
        if failed:
            parts.append(f"{failed} ended with an error, first rank {first['rank']}: {first['error']}")
        died = table[table["state"] == DIED]
        if len(died):
            ranks = ", ".join(map(str, died["rank"].head(_NAMED))) + (" and others" if len(died) > _NAMED else "")
            parts.append(f"{len(died)} ended without a message, as if killed: rank {ranks}")
        if table["peak_allocated"].notna().any():
            worst = table.loc[table["peak_allocated"].idxmax()]
            size = size_text(int(worst["peak_allocated"]))
            beside = ""
            if worst["rank"] != typical:
                middle = table.set_index("rank").loc[typical, "peak_allocated"]
                beside = f", {difference_text(int(middle), int(worst['peak_allocated']))} beside rank {typical}"
            parts.append(f"rank {worst['rank']} has the highest peak: {size} in step {worst['peak_step']}{beside}")
        return " · ".join(parts)

    def __repr__(self) -> str:
        return f"<Ranks: {self.text}>"

    def __str__(self) -> str:
        import pandas

        table = self.table()
        for name in ("peak_allocated", "peak_reserved", "allocated_after", "outside", "capacity"):
            table[name] = ["" if size is pandas.NA else size_text(int(size)) for size in table[name]]
        shown = table.dropna(axis="columns", how="all").head(20)
        more = f"\n… and {len(table) - 20} more ranks" if len(table) > 20 else ""
        return f"{self.text}\n{shown.to_string(index=False)}{more}"
