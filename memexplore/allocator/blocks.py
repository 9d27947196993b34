"""Blocks and the pools that hold the free ones."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

RANK = attrgetter("rank")
ADDRESS = attrgetter("address")


class PoolOptions(enum.Flag):
    """Options of a private pool (`torch.cuda.MemPool`)."""

    NORMAL = 0
    ON_OOM = enum.auto()
    """Its free blocks serve the default pools when cudaMalloc fails (`use_on_oom`)."""
    NO_SPLIT = enum.auto()
    """Its blocks are handed out whole (`no_split`)."""
    OWN_ALLOCATOR = enum.auto()
    """Its segments come from a user's allocator, so they are never expandable."""


class PrivatePool:
    """The small and the large pool of a CUDA graph or a `torch.cuda.MemPool`."""

    __slots__ = ("identity", "large", "segments", "small", "use", "users")

    def __init__(self, identity: tuple[int, int], use: PoolOptions) -> None:
        self.identity = identity
        self.use = use
        self.users = 1
        self.segments = 0
        self.small = Pool("small", self)
        self.large = Pool("large", self)


class Pool:
    """The small or the large pool of one identity: a `FreeSet` for each stream."""

    __slots__ = ("identity", "kind", "private", "searches", "streams")

    def __init__(self, kind: str, private: PrivatePool | None = None) -> None:
        self.kind = kind
        self.private = private
        self.identity = private.identity if private else (0, 0)
        self.streams: dict[int, FreeSet] = {}
        self.searches = 0
        """Searches since the start, counted where garbage collection needs the age of a block."""


class FreeSet:
    """The free blocks of one pool and stream, by size; within a size the last block of the list goes first."""

    __slots__ = ("by_size", "least_rest", "pool", "sizes", "split_below", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int, least_rest: int, split_below: int) -> None:
        self.pool = pool
        self.stream = stream
        self.least_rest = least_rest
        """A block is split where at least so many bytes would remain ..."""
        self.split_below = split_below
        """... and the rounded request is smaller than this."""
        self.by_size: dict[int, list[Block]] = {}
        # A size stays listed after its last block left until a search meets it: the same sizes come back.
        self.sizes: list[int] = []
        self.unmapped: list[Block] = []
        """Ranges of expandable segments without memory behind them, by address."""

    def insert(self, block: Block) -> None:
        """Add a free block."""
        block.free = True
        block.age = self.pool.searches
        same = self.by_size.get(block.size)
        if same is None:
            self.by_size[block.size] = [block]
            insort(self.sizes, block.size)
        elif not same or same[-1].rank < block.rank:
            same.append(block)
        else:
            insort(same, block, key=RANK)

    def remove(self, block: Block) -> None:
        """Take a certain block out."""
        block.free = False
        same = self.by_size[block.size]
        if same[-1] is block:
            same.pop()
        else:
            del same[bisect_left(same, block.rank, key=RANK)]

    def best_fit(self, size: int) -> Block | None:
        """Take out the smallest block of at least `size` bytes, of several the one of highest rank."""
        sizes, by_size = self.sizes, self.by_size
        at = bisect_left(sizes, size)
        while at < len(sizes):
            same = by_size[sizes[at]]
            if same:
                block = same.pop()
                block.free = False
                return block
            del by_size[sizes.pop(at)]
        return None

    def from_size(self, size: int) -> Iterator[Block]:
        """The blocks of at least `size` bytes in the order in which a search meets them; none may leave meanwhile."""
        sizes, by_size = self.sizes, self.by_size
        at = bisect_left(sizes, size)
        while at < len(sizes):
            same = by_size[sizes[at]]
            if same:
                yield from reversed(same)
                at += 1
            else:
                del by_size[sizes.pop(at)]


class Range:
    """An expandable segment: a range of addresses that gets its memory page by page, in bytes."""

    __slots__ = ("base", "page", "size")

    def __init__(self, base: int, page: int, size: int) -> None:
        self.base = base
        self.page = page
        self.size = size


class Block:
    """A piece of a segment, sizes in bytes; `previous` and `next` are its neighbours in the segment."""

    __slots__ = (
        "address", "age", "free", "home", "mapped", "next", "previous", "range", "rank", "requested", "size", "uses",
        "waiting",
    )  # fmt: skip

    def __init__(self, address: int, size: int, home: FreeSet, rank: int, range: Range | None) -> None:
        self.address = address
        self.size = size
        self.home = home
        self.rank = rank
        """Among free blocks of equal size the highest rank goes first."""
        self.range = range
        """The expandable segment it lies in."""
        self.free = False
        """In the free set: not handed out, waiting for nothing, with memory behind it."""
        self.mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None
        self.requested = 0
        self.uses: set[int] | None = None
        """Other streams that used it (`record_stream`)."""
        self.waiting = 0
        """Events that have to happen before it is free."""
        self.age = 0
        """The pool's `searches` when it became free."""

    @property
    def idle(self) -> bool:
        """Whether it can be handed out, perhaps after memory was mapped behind it."""
        return self.free or not self.mapped
