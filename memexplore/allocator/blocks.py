"""Hold blocks, expandable segments, and the sets of free blocks: one `FreeSet` for each pool and stream."""

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

    __slots__ = ("identity", "large", "options", "segments", "small", "use_count")

    def __init__(self, identity: tuple[int, int], options: PoolOptions) -> None:
        self.identity = identity
        self.options = options
        self.use_count = 1
        self.segments = 0
        self.small = Pool("small", self)
        self.large = Pool("large", self)


class Pool:
    """The small or the large pool, a default or a private one: a `FreeSet` for each stream."""

    __slots__ = ("free_sets", "identity", "kind", "private", "searches")

    def __init__(self, kind: str, private: PrivatePool | None = None) -> None:
        self.kind = kind
        self.private = private
        self.identity = private.identity if private else (0, 0)
        self.free_sets: dict[int, FreeSet] = {}
        """By stream."""
        self.searches = 0
        """Searches so far. Counted only if garbage collection is on, which computes ages of blocks from it."""

    def free_blocks(self) -> list[Block]:
        """Return the free blocks in the order of PyTorch's set: by stream, then size, then tie-break."""
        return [block for stream in sorted(self.free_sets) for block in self.free_sets[stream].at_least(0)]


class FreeSet:
    """The free blocks of one pool and stream, by size; among blocks of equal size the highest rank is handed out first.

    A block is split if at least `min_remainder` bytes would remain and the rounded request is below `split_limit`.
    """

    __slots__ = ("by_size", "min_remainder", "pool", "sizes", "split_limit", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int, min_remainder: int, split_limit: int) -> None:
        self.pool = pool
        self.stream = stream
        self.min_remainder = min_remainder
        self.split_limit = split_limit
        self.by_size: dict[int, list[Block]] = {}
        """Blocks of each size, by ascending rank."""
        # A size stays listed after its last block left, until a search meets it: training requests it again soon.
        self.sizes: list[int] = []
        self.unmapped: list[Block] = []
        """Ranges of expandable segments without memory, by address."""

    def insert(self, block: Block) -> None:
        """Add a free block."""
        block.free = True
        block.inserted_at = self.pool.searches
        same_size = self.by_size.get(block.size)
        if same_size is None:
            self.by_size[block.size] = [block]
            insort(self.sizes, block.size)
        elif not same_size or same_size[-1].rank < block.rank:
            same_size.append(block)
        else:
            insort(same_size, block, key=RANK)

    def remove(self, block: Block) -> None:
        """Remove a given block."""
        block.free = False
        same_size = self.by_size[block.size]
        if same_size[-1] is block:
            same_size.pop()
        else:
            del same_size[bisect_left(same_size, block.rank, key=RANK)]

    def pop_best_fit(self, size: int) -> Block | None:
        """Remove and return the smallest block of at least `size` bytes, of the highest rank; None without one."""
        sizes, by_size = self.sizes, self.by_size
        at = bisect_left(sizes, size)
        while at < len(sizes):
            same_size = by_size[sizes[at]]
            if same_size:
                block = same_size.pop()
                block.free = False
                return block
            del by_size[sizes.pop(at)]
        return None

    def at_least(self, size: int) -> Iterator[Block]:
        """Yield the blocks of at least `size` bytes in search order; the set must not change meanwhile."""
        sizes, by_size = self.sizes, self.by_size
        at = bisect_left(sizes, size)
        while at < len(sizes):
            same_size = by_size[sizes[at]]
            if same_size:
                yield from reversed(same_size)
                at += 1
            else:
                del by_size[sizes.pop(at)]


class ExpandableSegment:
    """A range of virtual addresses to which memory is mapped page by page; base and sizes in bytes."""

    __slots__ = ("base", "page", "size")

    def __init__(self, base: int, page: int, size: int) -> None:
        self.base = base
        self.page = page
        self.size = size


class Block:
    """A piece of a segment, sizes in bytes; `previous` and `next` are its neighbours in the segment.

    `expandable` is the expandable segment that holds the block, None in a segment from cudaMalloc. Among free blocks of
    equal size the highest `rank` is handed out first.
    """

    __slots__ = (
        "address", "expandable", "free", "free_set", "inserted_at", "mapped", "next", "other_streams",
        "pending_events", "previous", "rank", "requested", "size",
    )  # fmt: skip

    def __init__(
        self, address: int, size: int, free_set: FreeSet, rank: int, expandable: ExpandableSegment | None
    ) -> None:
        self.address = address
        self.size = size
        self.free_set = free_set
        """The set that holds the block while it is free."""
        self.rank = rank
        self.expandable = expandable
        self.free = False
        """Whether the block is in its free set: mapped, not allocated, without pending events."""
        self.mapped = True
        self.previous: Block | None = None
        self.next: Block | None = None
        self.requested = 0
        self.other_streams: set[int] | None = None
        """Streams passed to `record_stream`."""
        self.pending_events = 0
        """Events that must complete before the block is free."""
        self.inserted_at = 0
        """The pool's `searches` when the block became free."""

    @property
    def available(self) -> bool:
        """Whether a request can use the block, perhaps after mapping memory."""
        return self.free or not self.mapped
