"""What is shown of a watched run, of this process or of a rank in a folder, as one `Status`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from memexplore.ranks.rows import StepRow

if TYPE_CHECKING:
    from memexplore.live.live import Live
    from memexplore.ranks.ranks import Ranks

CURVE = 60
"""Points of the curve of all steps."""
RISES = 3
_RECENT = 20
"""Steps whose median time is shown."""


class Status(NamedTuple):
    """One watched run at one time; sizes in bytes."""

    state: str
    device: str
    capacity: int | None = None
    newest: StepRow | None = None
    worst: StepRow | None = None
    """The step with the highest peak allocated."""
    seconds: float | None = None
    """The median time of the last steps."""
    rises: tuple[StepRow, ...] = ()
    """The last steps whose peak was higher than all before, one for each kind of reason."""
    curve: tuple[int, ...] = ()
    """Highest peak allocated of consecutive steps, at most `CURVE` numbers."""
    growth: str = ""
    full_at: float | None = None
    held_by: tuple[str, ...] = ()
    overhead: float | None = None
    """What watching costs, as a share of the time."""
    notes: tuple[str, ...] = ()
    error: str = ""


def of_live(live: Live, device: str, holders: Holders, shown: float = 0.0) -> Status:
    """Return the status of a run of this process; `shown` is the share of the time that showing it takes."""
    rows = live.rows()
    leak = live.leak()
    return Status(
        state=live.state.value,
        device=device,
        capacity=live.capacity,
        newest=rows[-1] if rows else None,
        worst=highest(rows),
        seconds=statistics.median(row.seconds for row in rows[-_RECENT:]) if rows else None,
        rises=last_rises([row for row in rows if row.rose_because]),
        curve=curve((row.step, row.peak_allocated) for row in rows),
        growth=leak.text if leak is not None else "",
        full_at=leak.full_at if leak is not None else None,
        held_by=tuple(holders.of(live, leak.line)) if leak is not None else (),
        overhead=live.overhead.share + shown,
        notes=live.notes,
        error=live.error,
    )


class Holders:
    """Who holds the tensors of leaks; each leak is searched once, because that stops the program for a moment."""

    def __init__(self, seconds: float = 0.5) -> None:
        self._seconds = seconds
        self._holders: dict[str, list[str]] = {}

    def of(self, live: Live, line: str) -> list[str]:
        """Return who holds the tensors of the leak that a line allocates."""
        if line not in self._holders:
            self._holders[line] = live.held_by(self._seconds)
        return self._holders[line]


def last_rises(rows: Sequence[StepRow]) -> tuple[StepRow, ...]:
    """Return the last rows of `RISES` kinds of reasons; those that differ in numbers only are of one kind.

    >>> rows = [StepRow(step, 0.1, rose_because=f"leak: {step} MiB more") for step in (1, 2)]
    >>> [row.step for row in last_rises(rows)]
    [2]
    """
    kinds: dict[str, StepRow] = {}
    for row in reversed(rows):
        kinds.setdefault("".join(letter for letter in row.rose_because if not letter.isdigit()), row)
    return tuple(reversed(list(kinds.values())[:RISES]))


def highest(rows: Iterable[StepRow]) -> StepRow | None:
    """Return the row with the highest peak allocated, None without one."""
    return max((row for row in rows if row.peak_allocated is not None), key=_peak, default=None)


def _peak(row: StepRow) -> int:
    return row.peak_allocated or 0


def curve(peaks: Iterable[tuple[int, int | None]], points: int = CURVE) -> tuple[int, ...]:
    """Return the highest peak of consecutive steps, from steps and their peaks; groups without one are left out.

    >>> curve([(1, 10), (2, 30), (3, 20), (4, None)], points=2)
    (30, 20)
    """
    known = [(step, peak) for step, peak in peaks if peak is not None]
    last = max((step for step, _ in known), default=0)
    by_group: dict[int, int] = {}
    for step, peak in known:
        group = (step - 1) * points // max(last, points)
        by_group[group] = max(by_group.get(group, 0), peak)
    return tuple(by_group[group] for group in sorted(by_group))


def of_rank(ranks: Ranks, rank: int) -> Status:
    """Return the status of a rank of a folder, as it was written last.

    Raises LookupError for a rank that the folder does not have.
    """
    about, rows = ranks.abouts()[rank], ranks.rows(rank)
    # A virtual GPU has no clock.
    seconds = [row.seconds for row in rows[-_RECENT:] if not math.isnan(row.seconds)]
    return Status(
        state=about.state,
        device=about.device,
        capacity=about.capacity,
        newest=rows[-1] if rows else None,
        worst=highest(rows),
        seconds=statistics.median(seconds) if seconds else None,
        rises=last_rises([row for row in rows if row.rose_because]),
        curve=curve((row.step, row.peak_allocated) for row in rows),
        growth=about.growth,
        full_at=about.full_at,
        held_by=about.held_by,
        overhead=about.overhead,
        notes=about.notes,
        error=about.error,
    )
