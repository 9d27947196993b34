"""The ranks of a run side by side: a folder goes in; tables, tapes and differences come out.

DuckDB reads the Parquet files, without holding more of them than a query needs. The files may come from anybody: only
names and numbers of the expected kinds are taken over.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memexplore.extras import install_command
from memexplore.runs.descriptions import DIED, About, about
from memexplore.runs.rows import StepRow
from memexplore.tape import Tape
from memexplore.units import difference_text, size_text

if TYPE_CHECKING:
    import pandas

    from memexplore.analysis.difference import Difference

_RANK = re.compile(r"rank=([0-9]{1,7})")
_STEPS = re.compile(r"steps-([0-9]{1,15})-([0-9]{1,15})\.parquet")
_TAPE = re.compile(r"step-([0-9]{1,15})\.parquet")
_MEMORY = "1GB"
_NAMED = 5


class Ranks:
    """The ranks of a folder that `watch(folder=...)` or `Live.save` wrote; nothing is read before it is asked for."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        found = {int(match[1]): path for path in self.folder.iterdir() if (match := _RANK.fullmatch(path.name))}
        if not found:
            raise ValueError(f"{self.folder} has no folders of ranks: give a folder that `watch(folder=...)` wrote")
        self._folders = dict(sorted(found.items()))
        self._connection: Any = None
        self._summary: pandas.DataFrame | None = None
        self._abouts: dict[int, About] | None = None

    def __len__(self) -> int:
        return len(self._folders)

    # -- queries

    def query(self, sql: str) -> pandas.DataFrame:
        """Return the result of a DuckDB query; its tables are ``steps`` and ``events``, both with a column ``rank``.

        ``steps`` has the columns of `rows.StepRow`, ``events`` those of `Tape` and ``filename``.
        """
        return self._database().sql(sql).df()

    def _database(self) -> Any:
        if self._connection is None:
            try:
                import duckdb
            except ImportError:
                raise ImportError(
                    f"folders of runs are read with DuckDB, which is not installed: {install_command('runs')}"
                ) from None
            database = duckdb.connect()
            database.sql(f"SET memory_limit = '{_MEMORY}'")
            database.sql("SET preserve_insertion_order = false")
            steps = [path for folder in self._folders.values() for path in _step_files(folder / "steps")]
            tapes = [path for folder in self._folders.values() for path in sorted((folder / "tapes").glob("*.parquet"))]
            for name, files in (("steps", steps), ("events", tapes)):
                if files:
                    options = "hive_partitioning = true, hive_types = {'rank': BIGINT}"
                    options += ", filename = true" if name == "events" else ""
                    database.sql(f"CREATE VIEW {name} AS SELECT * FROM read_parquet({_list(files)}, {options})")
            self._connection = database
            self._has_steps = bool(steps)
        return self._connection

    @property
    def has_steps(self) -> bool:
        """Whether rows of steps are written yet."""
        self._database()
        return self._has_steps

    # -- tables

    def table(self) -> pandas.DataFrame:
        """Return one row per rank: those that an error ended, the first one first, those that died, then by peak.

        Columns `rank`, `steps`, `peak_allocated`, `peak_step`, `peak_reserved`, `allocated_after` (of the last step),
        `outside`, `seconds` (the median), `state`, `error`, `device`, `capacity` and `host`.
        """
        import pandas

        if self._summary is None:
            database = self._database()
            described = pandas.DataFrame([(rank, *each) for rank, each in self.abouts().items()])
            described.columns = pandas.Index(["rank", *About._fields])
            if not self._has_steps:
                raise ValueError(f"{self.folder} has no rows of steps yet: wait for the end of the first steps")
            numbers = database.sql(
                "SELECT rank, count(*) AS steps, max(peak_allocated) AS peak_allocated, "
                "arg_max(step, peak_allocated) AS peak_step, max(peak_reserved) AS peak_reserved, "
                "arg_max(allocated_after, step) AS allocated_after, max(outside) AS outside, "
                "median(seconds) AS seconds FROM steps GROUP BY rank"
            ).df()
            table = described.merge(numbers, on="rank", how="left")
            sizes = ["steps", "peak_allocated", "peak_step", "peak_reserved", "allocated_after", "outside", "capacity"]
            table = table.astype(dict.fromkeys(sizes, "Int64"))
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

    def abouts(self) -> dict[int, About]:
        """Return the descriptions of the ranks by rank."""
        if self._abouts is None:
            self._abouts = {rank: about(path) for rank, path in self._folders.items()}
        return self._abouts

    def steps(self, rank: int) -> pandas.DataFrame:
        """Return the rows of the steps of a rank, with the fields of `rows.StepRow`.

        Raises LookupError for a rank that the folder does not have.
        """
        self._folder_of(rank)
        names = ", ".join(StepRow._fields)
        return self.query(f"SELECT {names} FROM steps WHERE rank = {int(rank)} ORDER BY step")

    def recorded(self, rank: int) -> list[int]:
        """Return the steps of a rank whose tapes are in the folder."""
        names = (_TAPE.fullmatch(path.name) for path in (self._folder_of(rank) / "tapes").iterdir())
        return sorted(int(match[1]) for match in names if match)

    def tape(self, rank: int | None = None, step: int | None = None) -> Tape:
        """Return the tape of a step; by default of the worst rank, and of its recorded step with the highest peak.

        Raises LookupError for a rank or a step without a tape.
        """
        rank = self.worst if rank is None else rank
        recorded = self.recorded(rank)
        if step is None and recorded:
            rows = self.steps(rank)
            rows = rows[rows["step"].isin(recorded)].dropna(subset="peak_allocated")
            step = int(rows.loc[rows["peak_allocated"].idxmax(), "step"]) if len(rows) else recorded[-1]
        if step not in recorded:
            kept = ", ".join(map(str, recorded)) or "none"
            raise LookupError(f"rank {rank} has no tape of step {step}; it has: {kept}")
        return Tape.load(self._folder_of(rank) / "tapes" / f"step-{step}.parquet")

    def _folder_of(self, rank: int) -> Path:
        if rank not in self._folders:
            raise LookupError(f"the folder has no rank {rank}; it has {len(self)} ranks, from {min(self._folders)} on")
        return self._folders[rank]

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


def _step_files(folder: Path) -> list[Path]:
    """Return the files of rows, without those whose rows a merged file has as well."""
    found = []
    for path in folder.glob("steps-*.parquet"):
        match = _STEPS.fullmatch(path.name)
        if match:
            found.append((int(match[1]), -int(match[2]), path))
    kept: list[Path] = []
    covered = -1
    for first, last, path in sorted(found):
        if -last > covered or (first > covered):
            kept.append(path)
            covered = -last
    return kept


def _list(paths: list[Path]) -> str:
    quoted = ("'" + str(path).replace("'", "''") + "'" for path in paths)
    return f"[{', '.join(quoted)}]"
