"""Run `memexplore run --world N --rank 0,4-7`: each rank in a process of its own.

The report shows the worst rank and how the others differ; the exit status is the worst rank's. Ranks that are named by
number run to their end: a script may do anything with its rank, so nobody knows before which ranks do the same. With
`--rank all` only the distinct ones run to their end (`equal_ranks`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from memexplore.cli.among_ranks import interrupted_by_sigterm
from memexplore.cli.equal_ranks import Equal, Part, run_distinct
from memexplore.cli.first_steps import VARIABLE, Until
from memexplore.cli.options import ERROR, FITS, INTERRUPTED, NOT_KNOWN, OOM, write_output
from memexplore.cli.report_text import text_table
from memexplore.cli.run_options import RunOptions, is_page
from memexplore.tape import Ending, Meta, Source, Tape
from memexplore.text.units import size_text

_WORST_FIRST = (INTERRUPTED, OOM, ERROR, NOT_KNOWN, FITS)
"""Statuses; any other one, which the script exits with, counts as an error."""
_SHOWN_LINES = 20
"""Last lines of the output of a rank that failed."""


class RankRun(NamedTuple):
    """One rank that was run."""

    rank: int
    summary: dict[str, Any] | None
    """The object of `memexplore run --json`, None where the run had none."""
    status: int
    output: str
    """What the script and memexplore printed to stdout and stderr, without the summary."""

    @property
    def outcome(self) -> str:
        """The outcome of the summary, else the exit status."""
        return str((self.summary or {}).get("outcome", f"exit status {self.status}"))

    def peak(self, name: str) -> int:
        """Return the peak "allocated" or "reserved" in bytes, 0 where the run had no summary."""
        return int((self.summary or {}).get(f"peak_{name}", 0))


def run(options: RunOptions) -> int:
    """Run the ranks in processes beside each other, print what they need, and return the status of the worst.

    With `-o` their tapes are written to a folder, with `--html` their pages, or the page of the worst to a file.
    """
    processes = _Processes()
    with tempfile.TemporaryDirectory(prefix="memexplore-ranks-") as files, interrupted_by_sigterm():
        folder = pathlib.Path(files)
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool, processes.ending():

                def run_parts(parts: Iterable[Part]) -> list[RankRun]:
                    return list(pool.map(lambda part: _run(part, options, folder, processes), parts))

                equal: tuple[Equal, ...] = ()
                if options.stops_equal_ranks:
                    runs, equal = run_distinct(options.ranks, run_parts)
                else:
                    runs = run_parts((rank, Until.END) for rank in options.ranks)
        except KeyboardInterrupt:
            return INTERRUPTED
        _write(runs, options, folder)
    for rank_run in runs:
        if rank_run.status and rank_run.output:
            lines = rank_run.output.rstrip().splitlines()[-_SHOWN_LINES:]
            print(f"Rank {rank_run.rank}:", *lines, sep="\n  ", file=sys.stderr)
    world = options.machine.world or 1
    if options.prints_json:
        objects = [{**(rank_run.summary or {}), "rank": rank_run.rank, "status": rank_run.status} for rank_run in runs]
        result = {"world": world, "worst": worst(runs).rank, "ranks": objects}
        print(json.dumps(result | {"equal": [same._asdict() for same in equal]}, indent=2))
    else:
        print(report(runs, world, equal))
        if options.output is not None:
            print(f"\nThe tapes of the ranks: memexplore open {options.output}")
    return min((rank_run.status for rank_run in runs), key=_severity)


class _Processes:
    """The processes of ranks that run."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._are_ended = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """End the processes where the block ends by an interrupt; none is started after it."""
        try:
            yield
        except KeyboardInterrupt:
            with self._lock:
                self._are_ended = True
                for process in self._running:
                    process.terminate()
            raise

    def run(self, words: Sequence[str], environment: dict[str, str]) -> tuple[str, str, int]:
        """Run a command; return its output, its errors and its exit status."""
        with self._lock:
            if self._are_ended:
                return "", "", INTERRUPTED
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                words, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environment, start_new_session=True
            )
            self._running.add(process)
        try:
            output, errors = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
        return output, errors, process.returncode


def _run(part: Part, options: RunOptions, folder: pathlib.Path, processes: _Processes) -> RankRun:
    """Run one rank in a process of its own, which writes its tape and its page to a folder if they are wanted."""
    rank, until = part
    files: list[str] = []
    if options.output is not None:
        files += ["-o", str(_tape(folder, rank))]
    if options.html is not None:
        files += ["--html", str(_page(folder, rank))]
    words = options.command_of_rank(rank, files)
    environment = {**os.environ, VARIABLE: until.value}
    output, errors, status = processes.run(words, environment)
    try:
        summary = json.loads(output)
    except ValueError:
        summary = None
    return RankRun(rank, summary, status, errors)


def _write(runs: Sequence[RankRun], options: RunOptions, folder: pathlib.Path) -> None:
    """Write the results of the ranks where the options name them."""
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        for rank_run in runs:
            path, target = _tape(folder, rank_run.rank), _tape(options.output, rank_run.rank)
            if path.exists():
                shutil.copyfile(path, target)
            else:
                _tape_of_error(rank_run, options.machine.world).save(target)
    if options.html is not None and is_page(options.html):
        page = _page(folder, worst(runs).rank)
        if page.exists():
            write_output(options.html, lambda path: shutil.copyfile(page, path))
    elif options.html is not None:
        options.html.mkdir(parents=True, exist_ok=True)
        for rank_run in runs:
            page = _page(folder, rank_run.rank)
            if page.exists():
                shutil.copyfile(page, options.html / page.name)


def _tape_of_error(rank_run: RankRun, world: int | None) -> Tape:
    """Return a tape without rows for a rank that an error ended before it had one."""
    error = rank_run.output.rstrip().rpartition("\n")[2]
    meta = Meta(Source.PREDICTED, "", ending=Ending.ERROR, error=error, rank=rank_run.rank, world=world)
    return Tape.from_columns({}, meta=meta)


def _tape(folder: pathlib.Path, rank: int) -> pathlib.Path:
    return folder / f"rank-{rank}.tape"


def _page(folder: pathlib.Path, rank: int) -> pathlib.Path:
    return folder / f"rank-{rank}.html"


def _severity(status: int) -> int:
    return _WORST_FIRST.index(status if status in _WORST_FIRST else ERROR)


def worst(runs: Iterable[RankRun]) -> RankRun:
    """Return the rank with the worst status, of those the one with the highest peak, of those the first."""
    return min(runs, key=_order)


def _order(rank_run: RankRun) -> tuple[int, int, int, int]:
    return _severity(rank_run.status), -rank_run.peak("reserved"), -rank_run.peak("allocated"), rank_run.rank


def report(runs: Sequence[RankRun], world: int, equal: Sequence[Equal] = ()) -> str:
    """Return the worst rank as a sentence, and a table in which ranks with equal peaks share a row.

    Ranks that are `equal` to others stand in their row; a note says which ranks these are and why.
    """
    first = worst(runs)
    summary = first.summary or {}
    capacity, needed = summary.get("capacity"), size_text(first.peak("reserved"))
    room = f" of {size_text(capacity)}" if capacity else ""
    gpu = summary.get("gpu", "?")
    text = f"Rank {first.rank} of {world} needs the most: {needed} reserved{room} ({gpu}): {first.outcome}."
    if nccl := summary.get("nccl"):
        text += f" Plus {size_text(nccl['low'])} to {size_text(nccl['high'])} of NCCL, outside the allocator."
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank_run in sorted(runs, key=_order):
        same = (rank for same_runs in equal if rank_run.rank == same_runs.to[0] for rank in same_runs.ranks)
        groups.setdefault((rank_run.peak("allocated"), rank_run.peak("reserved"), rank_run.outcome), []).extend(
            (rank_run.rank, *same)
        )
    rows = [
        (spans(sorted(ranks)), size_text(allocated), size_text(reserved), outcome)
        for (allocated, reserved, outcome), ranks in groups.items()
    ]
    table = text_table([("ranks", "peak allocated", "peak reserved", "outcome"), *rows], "lrrl")
    notes = dict.fromkeys(
        note.removesuffix(f"; this is rank {rank_run.rank} of {world}")
        for rank_run in runs
        for note in (rank_run.summary or {}).get("notes", ())
    )
    return "\n".join([text, "", *table, *(f"Note: {note}" for note in (*map(_equal_text, equal), *notes))])


def _equal_text(equal: Equal) -> str:
    """Return why ranks did not run on.

    >>> _equal_text(Equal((1, 2), (0, 3), 24))
    'ranks 1–2 made the 24 requests of ranks 0, 3 until the end of the first optimizer step and were not run further; \
ranks 0, 3 were run to the end and made equal requests'
    """
    ranks, to = spans(equal.ranks), spans(equal.to)
    return (
        f"{_plural(equal.ranks)} {ranks} made the {equal.requests} requests of ranks {to} until the end of the first "
        f"optimizer step and were not run further; ranks {to} were run to the end and made equal requests"
    )


def _plural(ranks: Sequence[int]) -> str:
    return "rank" if len(ranks) == 1 else "ranks"


def spans(numbers: Sequence[int]) -> str:
    """Return numbers in short.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    spans_of_numbers: list[list[int]] = []
    for number in numbers:
        if spans_of_numbers and number == spans_of_numbers[-1][1] + 1:
            spans_of_numbers[-1][1] = number
        else:
            spans_of_numbers.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans_of_numbers)
