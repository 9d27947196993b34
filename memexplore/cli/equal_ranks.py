"""Run `--rank all`: every rank until the end of its first optimizer step, and of equal ranks two to the end.

Ranks are compared by what they allocated and freed, in order, with sizes and streams (`request_sequence`). The
first and the last of the ranks that are equal so far run to the end; if these differ after all, each of them does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from memexplore.cli.first_steps import Until


class Ran(Protocol):
    """A run of a rank, such as `rank_runs.RankRun`."""

    @property
    def rank(self) -> int:
        """The rank."""

    @property
    def status(self) -> int:
        """The exit status."""

    @property
    def summary(self) -> dict[str, Any] | None:
        """The object of `--json`, with the requests of `first_steps.Requests`."""


_Run = TypeVar("_Run", bound=Ran)
Part = tuple[int, Until]
"""A rank, and where its run ends."""


class Equal(NamedTuple):
    """Ranks that did not run on, because they are equal to ranks that ran to their end."""

    ranks: tuple[int, ...]
    to: tuple[int, ...]
    """The ranks that ran to their end, with equal requests."""
    requests: int
    """Number of allocations until the end of the first optimizer step, equal in all of these ranks."""


def run_distinct(
    ranks: Sequence[int], run: Callable[[Iterable[Part]], list[_Run]]
) -> tuple[list[_Run], tuple[Equal, ...]]:
    """Return the runs to the end, in the order of ranks, and the ranks that are equal to them.

    `run` runs ranks beside each other.
    """
    ends = {ranks[0], ranks[-1]}
    started = run((rank, Until.END if rank in ends else Until.FIRST_STEP) for rank in ranks)
    ended = {ran.rank: ran for ran in started if not _is_stopped(ran)}
    classes: dict[Any, list[int]] = {}
    for ran in started:
        if (first := _requests(ran).get("first_step")) is not None:
            classes.setdefault(tuple(first), []).append(ran.rank)

    def finish(wanted: Iterable[int]) -> None:
        missing = sorted(set(wanted) - set(ended))
        ended.update((ran.rank, ran) for ran in run((rank, Until.END) for rank in missing))

    finish(rank for members in classes.values() for rank in (members[0], members[-1]))
    differing = [members for members in classes.values() if len({_end(ended[r]) for r in members if r in ended}) > 1]
    finish(rank for members in differing for rank in members)
    equal = tuple(
        Equal(left, tuple(rank for rank in members if rank in ended), count)
        for (count, _), members in classes.items()
        if (left := tuple(rank for rank in members if rank not in ended))
    )
    return [ended[rank] for rank in sorted(ended)], equal


def _requests(ran: Ran) -> dict[str, Any]:
    requests: dict[str, Any] = (ran.summary or {}).get("requests", {})
    return requests


def _is_stopped(ran: Ran) -> bool:
    """Return whether a rank ended with its first step, and not by itself."""
    return bool(_requests(ran)) and _requests(ran)["end"] is None


def _end(ran: Ran) -> tuple[Any, ...]:
    """Return what is equal in the whole runs of equal ranks: the exit status and all requests."""
    return ran.status, *(_requests(ran).get("end") or (ran.rank,))
