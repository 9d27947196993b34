"""`memexplore open FOLDER`: the ranks of a folder as text or JSON, also while they run; `memexplore export FOLDER`."""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import TYPE_CHECKING

from memexplore.cli import live_display, live_status, live_text
from memexplore.cli.report_text import report_of, text_table
from memexplore.cli.terminal import is_terminal
from memexplore.ranks.descriptions import PAUSED, WATCHING
from memexplore.ranks.export import to_parquet
from memexplore.ranks.ranks import Ranks
from memexplore.text.units import size_text
from memexplore.text.untrusted import clean_text

if TYPE_CHECKING:
    import pandas
    from rich.text import Text


_ROWS = 8
_SECONDS = 1.0
_SHARE = 0.1
"""Share of the time that reading the folder may take."""
_SILENT = 60.0
"""Seconds without a new file after which a rank is called silent, if its steps are not longer."""


def text(path: pathlib.Path) -> str:
    """Return the ranks of a folder, the worst first, what differs, and the recorded step with the highest peak.

    Raises ValueError or OSError for a folder that cannot be read.
    """
    ranks = Ranks(path)
    ranks.table()
    parts = ["\n".join(live_text.as_text(_lines(ranks, 120)))]
    worst, typical = ranks.worst, ranks.typical
    if ranks.recorded(worst):
        if worst != typical and ranks.recorded(typical):
            parts.append("\n".join(_difference(ranks)))
        parts.append(f"Rank {worst}, its recorded step with the highest peak:\n{report_of(ranks.tape(worst))}")
    return "\n\n".join(parts)


def as_json(path: pathlib.Path) -> str:
    """Return the table of the ranks as one JSON object.

    Raises ValueError or OSError for a folder that cannot be read.
    """
    records = json.loads(Ranks(path).table().to_json(orient="records"))
    return json.dumps({"ranks": records}, indent=2)


def is_running(path: pathlib.Path) -> bool:
    """Return whether a rank of a folder is still written.

    Raises ValueError or OSError for a folder that cannot be read.
    """
    return _is_running(Ranks(path))


def follow(path: pathlib.Path) -> None:
    """Show the ranks of a folder until all have ended: in place on a terminal, else as a line now and then.

    Raises ValueError or OSError for a folder that cannot be read.
    """
    from rich.console import Console, Group
    from rich.live import Live

    began, line_at = time.monotonic(), 0.0
    console = Console()
    in_place = is_terminal(sys.stdout)
    with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as shown:
        while True:
            reading = time.monotonic()
            ranks = Ranks(path)
            lines = _lines(ranks, console.width)
            if in_place:
                shown.update(Group(*lines), refresh=True)
            elif ranks.has_steps and reading - began >= line_at:
                worst = ranks.worst
                print(live_text.plain(live_status.of_rank(ranks, worst), f"rank {worst}"), flush=True)
                line_at = live_display.next_line(reading - began)
            if not _is_running(ranks):
                return
            time.sleep(max(_SECONDS, (time.monotonic() - reading) / _SHARE))


def export(path: pathlib.Path, target: pathlib.Path) -> str:
    """Write the steps and tapes of a folder as Parquet files into another one, and return a sentence about them.

    Raises ValueError or OSError for a folder that cannot be read or written.
    """
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"{str(target)!r} is not empty: name another folder with -o, or remove it")
    try:
        steps, tapes = to_parquet(Ranks(path), target)
    except ImportError as error:
        raise ValueError(str(error)) from None
    return f"Wrote the steps of {steps} ranks and {tapes} tapes: {target}"


def _is_running(ranks: Ranks) -> bool:
    return any(about.state in (WATCHING, PAUSED) for about in ranks.abouts().values())


def _lines(ranks: Ranks, width: int) -> list[Text]:
    """Return the table of several ranks, and the worst rank."""
    from rich.text import Text

    if not ranks.has_steps:
        return [Text(f"{len(ranks)} ranks wait for the end of their first step" if len(ranks) > 1 else "no step yet")]
    table = ranks.table()
    worst = ranks.worst
    shown = live_text.lines(live_status.of_rank(ranks, worst), width)
    silent = _silent(ranks, table)
    if len(table) > 1:
        summary = [Text(clean_text(line), "bold") for line in live_text.wrapped(ranks.text, width)]
        rows = [Text(line, no_wrap=True, overflow="ellipsis") for line in _table(table)]
        shown = [*summary, *rows, Text(""), Text(f"Rank {worst}", "bold"), *shown]
    if silent:
        shown += [Text(line, "bold") for line in live_text.wrapped(silent, width)]
    return shown


def _table(table: pandas.DataFrame) -> list[str]:
    rows = [("rank", "state", "steps", "ms/step", "peak allocated", "in step", "error")]
    for row in table.head(_ROWS).itertuples():
        peak, seconds = row.peak_allocated, row.seconds
        rows.append(
            (
                str(row.rank),
                str(row.state),
                _number(row.steps),
                "" if seconds != seconds else f"{float(seconds) * 1e3:.0f}",  # type: ignore[arg-type]
                size_text(int(peak)) if _number(peak) else "",  # type: ignore[call-overload]
                _number(row.peak_step),
                str(row.error),
            )
        )
    more = len(table) - _ROWS
    return text_table(rows, "rlrrrrl") + ([f"  … and {more} more ranks"] if more > 0 else [])


def _number(value: object) -> str:
    import pandas

    return "" if pandas.isna(value) else f"{int(value):,}"  # type: ignore[call-overload]


def _silent(ranks: Ranks, table: pandas.DataFrame) -> str:
    """Return a sentence about the ranks that have written nothing for a while, "" if none."""
    now = time.time()
    longest = {int(row.rank): 20 * float(row.seconds) for row in table.itertuples() if row.seconds == row.seconds}  # type: ignore[arg-type, call-overload]
    ages = {
        rank: now - about.time
        for rank, about in ranks.abouts().items()
        if about.state == WATCHING and about.time is not None
    }
    silent = {rank: age for rank, age in ages.items() if age > max(_SILENT, longest.get(rank, 0.0))}
    if not silent:
        return ""
    rank = max(silent, key=lambda number: silent[number])
    who = f"Rank {rank} has" if len(silent) == 1 else f"{len(silent)} ranks, first rank {rank}, have"
    return f"{who} written nothing for {silent[rank] / 60:.0f} min: a step takes long, or the process is gone."


def _difference(ranks: Ranks) -> list[str]:
    """Return what differs between the worst rank and a typical one."""
    difference = ranks.difference()
    changed = difference[difference["difference"] != 0].head(_ROWS)
    rows = changed.to_string(index=False) if len(changed) else "Both hold the same at their peaks."
    return [f"Rank {ranks.typical} → rank {ranks.worst}: {difference.text}", rows]
