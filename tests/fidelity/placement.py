"""`python -m tests.fidelity.placement` prints, for each recording, how many addresses of segments the model predicts.

Two questions to each recording that has new segments:

- *Next address*: given all recorded addresses so far, is the address of the next segment predicted exactly? What the
  model would have preferred to a recorded address counts as used by something else of the process from then on: the
  CUDA context, libraries and the rest of the address space are not recorded.
- *Order*: started once at the recorded segments and then left alone, which share of the pairs of segments that exist at
  the same time has the recorded order of addresses? Only this order matters to PyTorch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from memexplore.allocator.placement import (
    END,
    Downwards,
    Placement,
    placement_on,
    system_of_address,
)
from memexplore.tape import Action, Os
from tests.data import kept
from tests.fidelity.followed import Followed, FollowedFirstFit, FollowedPlacement, FollowedSpare


class SegmentEvent(NamedTuple):
    """A recorded segment_alloc or segment_free, in bytes."""

    new: bool
    address: int
    size: int


class Recorded(NamedTuple):
    """The segments of one device of a recording."""

    name: str
    before: dict[int, int]
    """Size by address of the segments at the start."""
    events: list[SegmentEvent]

    @property
    def on_linux(self) -> bool:
        """Whether the addresses are those of Linux."""
        return system_of_address(min(event.address for event in self.events)) is Os.LINUX


def recorded(name: str, device: int = 0) -> Recorded:
    """Return the segments of a recording; those at its start follow from the final ones and the events."""
    data = kept.devices(name)[device]
    rows = zip(data.action.tolist(), data.address.tolist(), data.size.tolist(), strict=True)
    events = [
        SegmentEvent(action == Action.SEGMENT_ALLOC, address, size)
        for action, address, size in rows
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE)
    ]
    segments = {segment.address: segment.size for segment in data.segments}
    for event in reversed(events):
        if event.new:
            segments.pop(event.address, None)
        else:
            segments[event.address] = event.size
    return Recorded(name, segments, events)


def names() -> list[str]:
    """Return the recordings with new segments from cudaMalloc."""
    found = sorted(path.name.removesuffix(".json.gz") for path in kept.RECORDINGS.glob("*.json.gz"))
    return [name for name in found if 0 in kept.devices(name) and any(event.new for event in recorded(name).events)]


class Upwards:
    """Segments one behind the other; freed addresses are not used again: the model before it was fitted."""

    def __init__(self) -> None:
        self._next = END

    def place(self, size: int) -> int | None:
        """Return the address of a new segment."""
        self._next += size
        return self._next - size

    def release(self, address: int) -> None:
        """Keep the addresses of a segment out of use."""


def next_addresses(of: Recorded, follow: Callable[[dict[int, int]], FollowedPlacement]) -> int:
    """Return how many addresses of new segments are predicted from all recorded ones before."""
    placement = follow(of.before)
    right = 0
    for event in of.events:
        if event.new:
            right += placement.predicted(event.size) == event.address
            placement.follow(event.address, event.size)
        else:
            placement.release(event.address)
    return right


def beyond_all(of: Recorded) -> tuple[int, int]:
    """Return how many new segments lie directly below all segments so far, and how many directly above all."""
    lowest, highest = min(of.before, default=0), max((start + size for start, size in of.before.items()), default=0)
    downwards = upwards = 0
    for event in of.events:
        if event.new:
            downwards += event.address + event.size == lowest
            upwards += event.address == highest
            lowest = min(lowest or event.address, event.address)
            highest = max(highest, event.address + event.size)
    return downwards, upwards


class Pairs(NamedTuple):
    """Pairs of segments that exist at the same time, at least one of them new, and those in the recorded order."""

    right: int
    every: int
    right_of_one_size: int
    of_one_size: int


def order(of: Recorded, placement: Placement) -> Pairs:
    """Return how many pairs have the recorded order if the placement runs on alone from the first segments."""
    placed = {address: address for address in of.before}
    sizes = dict(of.before)
    counts = [0, 0, 0, 0]
    for event in of.events:
        if not event.new:
            placement.release(placed.pop(event.address))
            del sizes[event.address]
            continue
        ours = placement.place(event.size)
        assert ours is not None
        for address, other in placed.items():
            right, same = (other < ours) == (address < event.address), sizes[address] == event.size
            counts[0] += right
            counts[1] += 1
            counts[2] += right and same
            counts[3] += same
        placed[event.address], sizes[event.address] = ours, event.size
    return Pairs(*counts)


def below(before: Iterable[int]) -> Downwards:
    """Return a placement below the segments at the start."""
    placement = Downwards()
    placement._lowest = min(before, default=END)
    return placement


HEADS = (
    "recording", "system", "new segments", "next address", "… with room to spare", "… downwards", "… upwards",
    "order", "order, equal sizes", "… downwards", "… upwards",
)  # fmt: skip


def row(name: str) -> list[str]:
    """Return the cells of a recording."""
    of = recorded(name)
    own: Callable[[dict[int, int]], FollowedPlacement] = Followed if of.on_linux else FollowedFirstFit
    fitted = order(of, own(of.before) if of.before else placement_on(Os.LINUX if of.on_linux else Os.WSL))

    def share(right: int, every: int) -> str:
        return f"{100 * right / every:.1f} %" if every else "–"

    def equal(placement: Placement) -> str:
        pairs = order(of, placement)
        return share(pairs.right_of_one_size, pairs.of_one_size)

    return [
        name,
        "Linux" if of.on_linux else "WSL or Windows",
        str(sum(event.new for event in of.events)),
        str(next_addresses(of, own)),
        str(next_addresses(of, FollowedSpare)) if of.on_linux else "–",
        *map(str, beyond_all(of)),
        share(fitted.right, fitted.every),
        share(fitted.right_of_one_size, fitted.of_one_size),
        equal(below(of.before)),
        equal(Upwards()),
    ]


def markdown(rows: list[list[str]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


if __name__ == "__main__":
    print(markdown([row(name) for name in names()]))
