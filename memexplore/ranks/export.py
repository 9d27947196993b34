"""Folders of ranks as Parquet files, which DuckDB, Dask, Spark and pandas read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from memexplore.ranks.ranks import Ranks
from memexplore.ranks.watched import tape_name
from memexplore.text.result_files import require_pyarrow


class Exported(NamedTuple):
    """How many files were written."""

    steps: int
    tapes: int


def to_parquet(ranks: Ranks, folder: Path) -> Exported:
    """Write two tables below a folder: `steps`, a row a step, and `events`, a row an event of a tape.

    Both are partitioned by rank, so that readers give them a column `rank`:

        FOLDER/steps/rank=0/steps.parquet
        FOLDER/events/rank=0/step-12.parquet

    Raises ImportError where pyarrow is not installed, ValueError for files that are damaged.
    """
    require_pyarrow()
    steps = tapes = 0
    for rank in ranks:
        table = ranks.steps(rank)
        if len(table):
            table.to_parquet(_made(folder / "steps" / f"rank={rank}") / "steps.parquet", index=False)
            steps += 1
        for step in ranks.recorded(rank):
            path = _made(folder / "events" / f"rank={rank}") / Path(tape_name(step)).with_suffix(".parquet")
            ranks.tape(rank, step).to_parquet(path)
            tapes += 1
    return Exported(steps, tapes)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
