"""Make the post-mortem of a run out of memory, from its tape and what the live process knows.

A `PostMortem` is made of numbers and texts alone, so it needs no GPU memory and keeps none.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from memexplore.analysis.curves import by_category, curve
from memexplore.analysis.growth import leak
from memexplore.analysis.location import where
from memexplore.analysis.periods import periods
from memexplore.analysis.picture import picture
from memexplore.analysis.verdict import failed_request
from memexplore.out_of_memory.cause import Cause, Finding, finding
from memexplore.out_of_memory.evidence_types import Evidence, Holder
from memexplore.out_of_memory.failure import with_failure
from memexplore.out_of_memory.held_types import HeldGroup, WhyHeld
from memexplore.out_of_memory.message import parse
from memexplore.out_of_memory.suggestion import Suggestion
from memexplore.out_of_memory.suggestions import suggestions
from memexplore.tape import Action, Category, Ending, Tape
from memexplore.tape.process_limit import limited


class Request(NamedTuple):
    """The request that failed."""

    size: int
    """Requested bytes."""
    step: int
    phase: str
    layer: str
    op: str
    line: str
    """``file:line`` of the user's innermost line; each text is empty where it is not known."""


class Memory(NamedTuple):
    """Memory of the device when the request failed, in bytes; None where it is not known."""

    allocated: int
    reserved: int
    gaps: int
    """Reserved and not in use."""
    free: int | None
    """Neither reserved nor outside the allocator."""
    capacity: int | None
    """What the allocator can reserve without the limit of the process."""
    outside: int | None
    """Outside the allocator: CUDA context, kernels, and other processes."""
    total: int | None
    limit: int | None = None
    """Bytes that the process may reserve, where that is less than `capacity`; else None."""

    @property
    def usable(self) -> int:
        """Bytes that the process could still use: gaps, and what is free within its limit."""
        free = self.free or 0
        return self.gaps + (free if self.limit is None else max(min(free, self.limit - self.reserved), 0))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PostMortem:
    """What happened when a GPU ran out of memory, who had the memory, and what to change; see `of_tape`."""

    tape: Tape
    """The run until the request that failed, its last row."""
    cause: Cause
    request: Request | None
    """None for a file that does not record the failure."""
    memory: Memory
    missing: int
    """Bytes that are missing for the request, and for the rest of the optimizer's state where an update failed, if
    every free byte could be used for these."""
    held: tuple[HeldGroup, ...]
    """Memory that nothing needs any more, what the cause names first."""
    holders: tuple[Holder, ...]
    """Variables that keep memory which the failing call does not reach, the most bytes first."""
    suggestions: tuple[Suggestion, ...]
    growth: int
    """Bytes that memory grows from period to period; 0 without growth."""
    others: int
    """Bytes of other processes, as far as known."""
    processes: tuple[tuple[int, int], ...] = ()
    period: str = "step"
    """What a period is: "step", or "iteration" of a loop without steps."""
    by_category: tuple[tuple[str, int], ...] = ()
    """Allocated bytes by category, the most first."""
    fits_expandable: bool = False
    """Whether the request succeeds with expandable segments, by replaying the tape."""
    state_to_come: int = 0
    """Bytes at least of the optimizer's state that the failed update had still to allocate."""
    complete: bool = True
    """Whether the walk over references came to its end in time, without an error."""
    search_error: str = ""
    """The error of that walk, such as one of the user's class that cannot be read; else empty."""
    fits_without_limit: bool = False
    """Whether the request succeeds without the limit of the process, by replaying the tape."""

    @property
    def sentences(self) -> tuple[str, ...]:
        """What happened, in at most three sentences."""
        from memexplore.out_of_memory.sentences import sentences

        return sentences(self)

    @property
    def text(self) -> str:
        """The whole post-mortem as plain text."""
        from memexplore.out_of_memory.text import text

        return text(self)

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        from memexplore.out_of_memory.html import html

        return html(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the post-mortem as plain values, `post_mortem` in ``memexplore run --json``; sizes in bytes.

        Keys `cause`, `sentences`, `request`, `memory`, `missing`, `by_category`, `held` (without its rows), `holders`,
        `suggestions`, `growth_per_period`, `period`, `other_processes`, `fits_with_expandable_segments`,
        `fits_without_limit`, `complete` and `search_error`.
        """
        return {
            "cause": self.cause.value,
            "sentences": list(self.sentences),
            "request": self.request._asdict() if self.request is not None else None,
            "memory": self.memory._asdict(),
            "missing": self.missing,
            "by_category": dict(self.by_category),
            "held": [{name: value for name, value in group._asdict().items() if name != "rows"} for group in self.held],
            "holders": [
                {"name": holder.name, "use": holder.use.value, "size": holder.size, "tensors": holder.tensors}
                for holder in self.holders
            ],
            "suggestions": [suggestion._asdict() for suggestion in self.suggestions],
            "growth_per_period": self.growth,
            "period": self.period,
            "other_processes": self.others,
            "fits_with_expandable_segments": self.fits_expandable,
            "fits_without_limit": self.fits_without_limit,
            "complete": self.complete,
            "search_error": self.search_error,
        }


def of_tape(tape: Tape, evidence: Evidence | None = None) -> PostMortem | None:
    """Return the post-mortem of a tape; None for a tape that did not end out of memory.

    `evidence` is what the live process knows (`evidence.collect`); without it the holders are unknown, and a cause
    that needs them is not found. Of a file without history, the cause is `Cause.UNKNOWN` if `is_layout`.

    >>> from memexplore.tape import Meta, Source
    >>> columns = {"action": [Action.ALLOC, Action.OOM], "address": [0, -1], "size": [1024, 4096]}
    >>> failure = of_tape(Tape.from_columns(columns, meta=Meta(Source.PREDICTED, "4 KiB GPU", capacity=4096)))
    >>> failure.cause.value, failure.missing
    ('too much memory', 1024)

    Raises ValueError for a tape that is not placed.
    """
    if failed_request(tape) < 0 and tape.meta.ending is Ending.OUT_OF_MEMORY:
        # A run that was recorded only from its error on has the text of the error.
        tape = with_failure(tape, evidence if evidence is not None else Evidence(parse(tape.meta.error)))
    if failed_request(tape) < 0:
        return _of_layout(tape) if is_layout(tape) else None
    # `picture` may hold the run as if there were room; here it is the run as it happened.
    part = picture(tape.replace(whole=None))
    result = finding(part, evidence)
    grows = leak(part)
    return PostMortem(
        tape=part,
        cause=result.cause,
        request=_request(part, evidence),
        memory=_memory(part, len(part) - 1),
        missing=result.missing,
        held=result.held,
        holders=_holders(result, evidence) if evidence is not None else (),
        suggestions=suggestions(part, result, evidence),
        growth=grows.bytes_per_period if grows is not None else 0,
        period=periods(part).unit,
        others=result.others,
        processes=result.processes,
        by_category=_shares(part, len(part) - 1),
        fits_expandable=result.fits_expandable,
        state_to_come=result.state_to_come,
        complete=evidence is None or evidence.complete,
        search_error="" if evidence is None else evidence.search_error,
        fits_without_limit=result.fits_without_limit,
    )


def post_mortem(tape: Tape) -> PostMortem | None:
    """Return what happened when a GPU ran out of memory, who had the memory, and what to change; None if a tape fits.

    The variables that hold tensors are known to a live process only: the post-mortem that a notebook shows has them.

    >>> from memexplore.tape import Meta, Source
    >>> columns = {"action": [Action.ALLOC, Action.OOM], "address": [0, -1], "size": [1024, 4096]}
    >>> meta = Meta(Source.PREDICTED, "4 KiB GPU", capacity=4096)
    >>> print(post_mortem(Tape.from_columns(columns, meta=meta)).sentences[0])
    A request asked for 4.00 KiB.

    Raises ValueError for a tape that is not placed.
    """
    return of_tape(tape)


def of_failure(tape: Tape | None, evidence: Evidence | None) -> PostMortem | None:
    """Return the post-mortem of an error, of its tape where the run was recorded; None for another error.

    Without a tape of the failure, it is of what the GPU holds now.
    """
    if evidence is None:
        return None
    if tape is None or not len(tape):
        from memexplore.out_of_memory import layout

        tape = layout.present(evidence)
    return of_tape(with_failure(tape, evidence), evidence) if tape is not None else None


def is_layout(tape: Tape) -> bool:
    """Return whether a tape is a file's present layout without any event: it may be of a job that died.

    >>> from memexplore.tape import Meta, Source
    >>> columns = {"action": [Action.PREEXISTING], "address": [0], "size": [1024]}
    >>> is_layout(Tape.from_columns(columns, meta=Meta(Source.IMPORTED, "cuda:0")))
    True
    """
    events = (Action.ALLOC, Action.OOM)
    return bool(np.any(tape.action == Action.PREEXISTING)) and not np.any(np.isin(tape.action, events))


def _holders(result: Finding, evidence: Evidence) -> tuple[Holder, ...]:
    """Return the variables, and the attributes of layers that have results of ended calls, the most bytes first."""
    left = {group.holder: group for group in result.not_reached if group.what is WhyHeld.LEFT_BY_LAYERS}
    of_layers = [
        holder._replace(size=left[holder.name].size, tensors=left[holder.name].blocks)
        for holder in evidence.of_layers
        if holder.name in left
    ]
    return tuple(sorted([*evidence.holders, *of_layers], key=lambda holder: -holder.size))


def _of_layout(tape: Tape) -> PostMortem:
    last = len(tape) - 1
    empty = Finding(Cause.UNKNOWN, (), 0, 0, (), False)
    memory, shares = _memory(tape, last), _shares(tape, last)
    return PostMortem(tape, empty.cause, None, memory, 0, (), (), (), 0, 0, by_category=shares)


def _request(tape: Tape, evidence: Evidence | None) -> Request:
    last = len(tape) - 1
    location = where(tape, last)
    known = evidence if evidence is not None else None
    return Request(
        int(tape.size[last]),
        location["step"],
        location["phase"],
        location["layer"] or (known.layer if known is not None else ""),
        location["op"] or "",
        location["line"] or (known.line if known is not None else ""),
    )


def _memory(tape: Tape, row: int) -> Memory:
    allocated, active, reserved = (int(curve(tape, name)[row]) for name in ("allocated", "active", "reserved"))
    device = limited(tape.meta, None)
    capacity, total = device.capacity, device.total
    free = max(capacity - reserved, 0) if capacity is not None else None
    outside = total - capacity if total is not None and capacity is not None else None
    limit = tape.meta.capacity if tape.meta.capacity_without_limit is not None else None
    return Memory(allocated, reserved, reserved - active, free, capacity, outside, total, limit)


def _shares(tape: Tape, row: int) -> tuple[tuple[str, int], ...]:
    sizes = by_category(tape)[:, row].tolist()
    shares = [(kind.text, int(size)) for kind, size in zip(Category, sizes, strict=True) if size]
    return tuple(sorted(shares, key=lambda item: -item[1]))
