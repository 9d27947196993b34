"""Find the cause of a failed request.

A cause is computed: the tape is replayed without what the cause names, and the request must succeed there.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from memexplore.hardware import catalogue
from memexplore.out_of_memory import counterfactual
from memexplore.out_of_memory.continuation import continuation
from memexplore.out_of_memory.evidence_types import Evidence
from memexplore.out_of_memory.held import held_groups
from memexplore.out_of_memory.held_types import GROWING, MAYBE_READ, WITHOUT_BACKWARD, HeldGroup, WhyHeld
from memexplore.tape import Phase, Tape
from memexplore.tape.process_limit import limited

_LEAST_OTHERS = 64 << 20
"""Bytes from which memory outside the allocator, beyond the usual, is another process."""
_MOST_REPLAYS = 6
_LITTLE = 0.05
"""Share of the device below which what is held is no cause where it is not known how the pass that fails goes on."""
_LITTLE_GROWTH = 0.01
"""Share of the device below which what grows is no cause: the missing bytes are as few by chance."""
_MUCH = 0.1
"""Share of the device from which what is free in pieces is a cause: a full GPU has some of it whatever fills it."""


class Cause(enum.StrEnum):
    """Why a request failed."""

    TOO_MUCH = "too much memory"
    FRAGMENTATION = "fragmentation"
    LEAK = "leak"
    HELD = "memory held by mistake"
    ANOTHER_PROCESS = "another process"
    UNKNOWN = "unknown"
    """Of a file that does not record the failure."""


class Finding(NamedTuple):
    """A cause with what it rests on; sizes in bytes."""

    cause: Cause
    held: tuple[HeldGroup, ...]
    """Memory that nothing needs, the group that the cause names first."""
    missing: int
    """Bytes that are missing for the request, and for the state of an update, if every free byte could be used."""
    others: int
    """Bytes of other processes, as far as known."""
    processes: tuple[tuple[int, int], ...]
    """Number and bytes of other processes, where the error names them."""
    fits_expandable: bool
    state_to_come: int = 0
    """`Evidence.state_to_come`."""
    fits_without_limit: bool = False
    """Whether the request succeeds without the limit of the process, by replaying the tape."""
    not_reached: tuple[HeldGroup, ...] = ()
    """What the failing call does not use; it may be read again, and so is no cause."""


def finding(tape: Tape, evidence: Evidence | None) -> Finding:
    """Return the cause of the failure of a tape that ends with it.

    The order of the causes: a leak fails sooner or later whatever else is changed; fragmentation is cured by a setting;
    then what is held, by one change of the code or by several together; then other processes. What is held, and what
    other processes have, counts before fragmentation where it is more than all that is free. What other processes have
    is a cause only where the limit of the process lets it use more.

    Without what a cause names the run has to go on: the rest of the failing period, and more periods like the last
    complete one (`continuation`). Where no period is complete, what follows is not known, and a setting is no cure of a
    forward or backward pass.
    """
    found = held_groups(tape, evidence)
    groups = [group for group in found if group.what not in MAYBE_READ]
    not_reached = tuple(group for group in found if group.what in MAYBE_READ)
    others, processes = _others(tape, evidence)
    # The update goes on only if the rest of the optimizer's state fits too.
    to_come = evidence.state_to_come if evidence is not None else 0
    unused = counterfactual.unused(tape)
    missing = max(counterfactual.missing(tape), to_come - unused)
    expandable = to_come <= unused and counterfactual.fits_expandable(tape)

    unlimited = to_come <= unused + _beyond_limit(tape) and counterfactual.fits_without_limit(tape)

    def finding_of(cause: Cause, first: list[HeldGroup]) -> Finding:
        held = [*first, *(group for group in groups if group not in first)]
        return Finding(cause, tuple(held), missing, others, processes, expandable, to_come, unlimited, not_reached)

    least = _LITTLE_GROWTH * (tape.meta.capacity or 0)
    causes = [group for group in groups if group.what not in GROWING or group.size >= least]
    growing = [group for group in causes if group.what in GROWING and not _is_of_evaluation(tape, group, causes)]
    if enough := _enough(tape, growing, missing):
        return finding_of(Cause.LEAK, enough)
    enough = _enough(tape, [group for group in causes if group.what is not WhyHeld.BEFORE], missing)
    # The little that a full GPU has left may be in pieces by chance: what is held is more.
    is_much = unused >= _MUCH * (tape.meta.capacity or unused)
    is_most = max(sum(group.size for group in enough), others) < unused
    if expandable and is_much and is_most and _goes_on_expandable(tape, to_come):
        return finding_of(Cause.FRAGMENTATION, [])
    if enough and _goes_on_without(tape, enough):
        return finding_of(Cause.HELD, enough)
    if others >= missing and counterfactual.fits_with(_ahead(tape), others):
        return finding_of(Cause.ANOTHER_PROCESS, [])
    if (enough := _enough(tape, causes, missing)) and _goes_on_without(tape, enough):
        return finding_of(Cause.HELD, enough)
    return finding_of(Cause.TOO_MUCH, [])


def _is_of_evaluation(tape: Tape, group: HeldGroup, groups: list[HeldGroup]) -> bool:
    """Return whether what grows are mostly graphs that no backward pass needs."""
    graphs = {row for other in groups if other.what in WITHOUT_BACKWARD for row in other.rows}
    return group.what is WhyHeld.GROWS and 2 * counterfactual.bytes_of(tape, graphs & {*group.rows}) > group.size


def _ahead(tape: Tape) -> Tape:
    """Return the tape with what would follow the failed request, as far as it is known."""
    continued = continuation(tape)
    return tape if continued is None else continued.tape


def _beyond_limit(tape: Tape) -> int:
    """Return the bytes that the process could reserve beyond its limit; 0 without one."""
    without_limit = tape.meta.capacity_without_limit
    return 0 if without_limit is None else without_limit - (tape.meta.capacity or 0)


def _goes_on_expandable(tape: Tape, to_come: int) -> bool:
    """Return whether the run goes on with expandable segments, as far as it is known."""
    if counterfactual.asks_for_more(tape):
        return False
    if continuation(tape) is not None:
        return counterfactual.fits_expandable(_ahead(tape))
    # State that is still to come is known, and fits: an update does not go on to add more.
    is_pass = tape.phase[-1] in (Phase.FORWARD, Phase.BACKWARD)
    return not is_pass and bool(to_come or not counterfactual.soon_full(tape))


def _goes_on_without(tape: Tape, enough: list[HeldGroup]) -> bool:
    """Return whether the rest of the period goes through without what is held, as far as it is known.

    Later periods may hold as much again, which the same change gives back. Where the rest of a forward or backward pass
    is not known, a little that is held is no cause.
    """
    continued = continuation(tape)
    if continued is not None:
        rows = {row for group in enough for row in group.rows}
        return counterfactual.fits_without(continued.tape[: continued.end_of_period], rows, len(tape) - 1)
    is_pass = tape.phase[-1] in (Phase.FORWARD, Phase.BACKWARD)
    return not is_pass or sum(group.size for group in enough) >= _LITTLE * (tape.meta.capacity or 0)


def _enough(tape: Tape, groups: list[HeldGroup], missing: int) -> list[HeldGroup]:
    """Return the one group, else the several groups, without whose blocks the request succeeds; empty if there is none.

    Groups that are large enough for the missing bytes are tried one by one, the largest first.
    """
    if not groups:
        return []
    for group in [group for group in groups if group.size >= missing][:_MOST_REPLAYS]:
        if counterfactual.fits_without(tape, group.rows):
            return [group]
    if len(groups) < 2 or sum(group.size for group in groups) < missing:
        return []
    rows = {row for group in groups for row in group.rows}
    return groups if counterfactual.fits_without(tape, rows) else []


def _others(tape: Tape, evidence: Evidence | None) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the bytes of other processes: as the error names them, else what is outside the allocator too much."""
    if evidence is not None and evidence.message.others:
        return sum(size for _, size in evidence.message.others), evidence.message.others
    meta = limited(tape.meta, None)
    if meta.capacity is None or meta.total is None:
        return 0, ()
    gpu = None
    for name in (meta.gpu, meta.device):
        try:
            gpu = catalogue.find(name or "").under(meta.versions)
            break
        except ValueError:
            continue
    if gpu is None or not gpu.outside:
        return 0, ()
    own = max(gpu.outside, gpu.outside_range[1])
    others = meta.total - meta.capacity - own
    return (others, ()) if others >= _LEAST_OTHERS else (0, ())
