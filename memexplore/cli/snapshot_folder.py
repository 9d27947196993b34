"""Show a folder of a job's snapshot files, one for each rank, as text or JSON: `memexplore open FOLDER`.

The ranks that ran out of memory come first, in the order of time, as the others fail because the first one did.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from memexplore.cli.report_text import report_of, text_table
from memexplore.text.units import size_text
from memexplore.text.untrusted import clean_text

if TYPE_CHECKING:
    from memexplore.tape import Tape

_SUFFIXES = (".pickle", ".pickle.gz", ".pkl", ".pkl.gz")
_RANK = re.compile(r"rank[-_= ]?([0-9]{1,7})", re.IGNORECASE)
_NUMBER = re.compile(r"([0-9]{1,7})(?!.*[0-9])")
_EARLIEST = 10**15
"""Microseconds since 1970 of September 2001: clocks that begin with their program are below, and not comparable."""
_ROWS = 16


class _Rank(NamedTuple):
    """What the file of one rank says."""

    number: int
    path: pathlib.Path
    device: int = 0
    failed: bool = False
    failed_at: float | None = None
    """Microseconds since 1970 of the request that failed."""
    peak_allocated: int = 0
    peak_reserved: int = 0
    sentence: str = ""
    """What happened, where it ran out of memory."""
    post_mortem: dict[str, Any] | None = None
    error: str = ""
    """Why the file cannot be read."""


def has_snapshots(path: pathlib.Path) -> bool:
    """Return whether a folder has snapshot files."""
    return bool(_files(path))


def text(path: pathlib.Path) -> str:
    """Return which rank ran out of memory first, a table of all, and the report of the first one.

    Raises ValueError where no file can be read.
    """
    ranks = _ranks(path)
    worst = ranks[0]
    _, tape, _ = _failed_device(worst.path)
    parts = [_summary(ranks), "\n".join(_table(ranks))]
    return "\n\n".join([*parts, f"Rank {worst.number}, {_name(worst)}:\n{report_of(tape)}"])


def as_json(path: pathlib.Path) -> str:
    """Return the ranks as one JSON object, the first that ran out of memory in front; sizes in bytes.

    Raises ValueError where no file can be read.
    """
    ranks = _ranks(path)
    return json.dumps({"ranks": [_as_dict(rank, _first_failure(ranks)) for rank in ranks]}, indent=2)


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES) and file.is_file())


def _numbers(files: list[pathlib.Path]) -> list[int]:
    """Return the rank of each file: the number behind "rank" in its name, else its last one, else its position."""
    for pattern in (_RANK, _NUMBER):
        matches = [pattern.search(file.name) for file in files]
        numbers = [int(match[1]) for match in matches if match is not None]
        if len(set(numbers)) == len(files):
            return numbers
    return list(range(len(files)))


def _ranks(path: pathlib.Path) -> list[_Rank]:
    files = _files(path)
    ranks = [_read(number, file) for number, file in zip(_numbers(files), files, strict=True)]
    if all(rank.error for rank in ranks):
        raise ValueError(ranks[0].error)
    return sorted(ranks, key=_order)


def _order(rank: _Rank) -> tuple[Any, ...]:
    kind = 0 if rank.failed else 2 if rank.error else 1
    return kind, rank.failed_at is None, rank.failed_at or 0, -rank.peak_allocated, rank.number


def _read(number: int, path: pathlib.Path) -> _Rank:
    from memexplore.analysis.curves import peak
    from memexplore.analysis.verdict import failed_request
    from memexplore.out_of_memory.value import of_tape

    try:
        device, tape, began = _failed_device(path)
    except (ValueError, OSError) as error:
        return _Rank(number, path, error=str(error))
    row, post_mortem = failed_request(tape), of_tape(tape)
    failed_at = None
    if row >= 0 and began is not None and began >= _EARLIEST:
        failed_at = began + int(tape.time[row]) / 1000
    return _Rank(
        number,
        path,
        device,
        row >= 0,
        failed_at,
        peak(tape)[0],
        peak(tape, "reserved")[0],
        post_mortem.sentences[0] if row >= 0 and post_mortem is not None else "",
        post_mortem.as_dict() if post_mortem is not None else None,
    )


def _failed_device(path: pathlib.Path) -> tuple[int, Tape, int | None]:
    """Return the device that ran out of memory, or the one with most events, its tape, and when its clock began."""
    from memexplore import snapshot
    from memexplore.analysis.verdict import failed_request

    tapes = snapshot.load_with_clock(path)
    device = max(tapes, key=lambda number: (failed_request(tapes[number][0]) >= 0, len(tapes[number][0])))
    return device, *tapes[device]


def _first_failure(ranks: list[_Rank]) -> float | None:
    """Return when the first rank failed, in microseconds since 1970; None where a failed rank's clock is unknown."""
    times = [rank.failed_at for rank in ranks if rank.failed]
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


def _summary(ranks: list[_Rank]) -> str:
    failed, first = [rank for rank in ranks if rank.failed], ranks[0]
    count = f"{len(ranks)} ranks" if len(ranks) > 1 else "1 rank"
    if not failed:
        peak = size_text(first.peak_allocated)
        return f"{count} · none ran out of memory · rank {first.number} has the highest peak: {peak}"
    if len(failed) == 1:
        outcome = f"rank {first.number} ran out of memory"
    elif (failed_at := _first_failure(ranks)) is None:
        outcome = f"{len(failed)} ran out of memory, and the files do not say which one first"
    else:
        later = (failed[1].failed_at or 0) - failed_at
        outcome = f"rank {first.number} ran out of memory first, {later / 1e6:.3f} s before rank {failed[1].number}"
    return f"{count} · {outcome}" + (f": {first.sentence}" if first.sentence else "")


def _table(ranks: list[_Rank]) -> list[str]:
    first = _first_failure(ranks)
    rows = [("rank", "file", "out of memory", "peak allocated", "peak reserved")]
    for rank in ranks[:_ROWS]:
        when = "yes" if first is None or rank.failed_at is None else f"+{(rank.failed_at - first) / 1e6:.3f} s"
        sizes = ("", "") if rank.error else (size_text(rank.peak_allocated), size_text(rank.peak_reserved))
        outcome = when if rank.failed else "not readable" if rank.error else "no"
        rows.append((str(rank.number), _name(rank), outcome, *sizes))
    more = len(ranks) - _ROWS
    errors = [f"  Rank {rank.number}: {clean_text(rank.error)}" for rank in ranks if rank.error]
    return text_table(rows, "rllrr") + ([f"  … and {more} more ranks"] if more > 0 else []) + errors[:_ROWS]


def _name(rank: _Rank) -> str:
    return clean_text(rank.path.name)


def _as_dict(rank: _Rank, first: float | None) -> dict[str, Any]:
    after = None if first is None or rank.failed_at is None else (rank.failed_at - first) / 1e6
    return {
        "rank": rank.number,
        "file": rank.path.name,
        "device": rank.device,
        "out_of_memory": rank.failed,
        "seconds_after_first": after,
        "peak_allocated": rank.peak_allocated,
        "peak_reserved": rank.peak_reserved,
        "post_mortem": rank.post_mortem,
        "error": rank.error,
    }
