"""Keep the memory that the allocator holds on one device: pools, free sets, blocks and what the device may still give.

`Segments` splits and merges blocks and accounts for segments. It neither searches nor decides: `BlockAllocator` does,
with the functions of `cache` (releasing memory) and `expandable` (mapping memory).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from memexplore.allocator.actions import GROWTH
from memexplore.allocator.blocks import RANK, Block, FreeSet, Pool, PoolOptions, PrivatePool
from memexplore.allocator.placement import END, LinuxPlacement, Placement
from memexplore.allocator.stats import Statistics
from memexplore.tape import Action
from memexplore.tape.allocator_settings import BLOCK, SMALL, UNLIMITED, Order, Settings, order_of

OnEvent = Callable[[Action, int, int, int], object]
"""Called with action, address, size and stream of a segment or out-of-memory event."""
ChooseAddress = Callable[[int, int], int]
"""From size and stream of a new segment to its address."""

_RANK_BITS = 52  # more than any device address has


class Segments:
    """Segments and blocks of one device, sizes and addresses in bytes.

    `capacity` is the sum that all segments may reach, None for no limit; `total` is the device's memory; `release` is
    the torch release whose order of free blocks holds. `placement` chooses the addresses of new segments, by default as
    the driver on Linux does, unless `choose_address` is given. Expandable segments lie one behind the other.
    `statistics` count splits, and memory that the device gives or takes back.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        capacity: int | None = None,
        total: int | None = None,
        release: str = "2.13",
        on_event: OnEvent | None = None,
        choose_address: ChooseAddress | None = None,
        placement: Placement | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self.settings = settings if settings is not None else Settings()
        self.has_expandable = self.settings.expandable_segments
        """Whether segments may be expandable: those that were mapped before a change of the settings stay so."""
        self.capacity = UNLIMITED if capacity is None else capacity
        self.total = total or capacity or 1 << 40
        self.limit: int | None = None
        """Bytes that may be reserved under `per_process_memory_fraction`; None without a limit."""
        self.release = release
        self.order = order_of(release)
        self.on_event = on_event
        self.choose_address = choose_address
        self.placement = LinuxPlacement() if placement is None else placement
        self.statistics = statistics
        self.next_address = END
        """The address of the next expandable segment, and of a segment for which `placement` has no address."""
        self.small, self.large = Pool("small"), Pool("large")
        self.private: dict[tuple[int, int], PrivatePool] = {}
        self.live: dict[int, Block] = {}
        """Allocated blocks by address."""
        self.pending: dict[Block, None] = {}
        """Blocks whose free was requested and waits for events of other streams."""
        self.reserved = self.device_allocs = self.device_frees = 0
        self._counter = 0
        self._by_creation = self.order is Order.CREATION

    def free_set(self, pool: Pool, stream: int) -> FreeSet:
        """Return the free set of a pool and stream, an empty one at its first use."""
        if stream not in pool.free_sets:
            pool.free_sets[stream] = FreeSet(pool, stream, *self._splitting(pool))
        return pool.free_sets[stream]

    def _splitting(self, pool: Pool) -> tuple[int, int]:
        """Return `min_remainder` and `split_limit` of the free sets of a pool."""
        min_remainder, split_limit = SMALL + BLOCK, self.settings.max_split_size
        if pool.kind == "small" or self.uses_expandable(pool):
            min_remainder, split_limit = BLOCK, UNLIMITED
        if pool.private is not None and PoolOptions.NO_SPLIT in pool.private.options:
            min_remainder = UNLIMITED
        return min_remainder, split_limit

    def change_settings(self, settings: Settings) -> None:
        """Take other settings for all that comes; blocks and segments stay as they are."""
        self.settings = settings
        self.has_expandable |= settings.expandable_segments
        for pool in self.pools():
            for free_set in pool.free_sets.values():
                free_set.min_remainder, free_set.split_limit = self._splitting(pool)

    def pools(self) -> list[Pool]:
        """Return the default pools and those of every private pool."""
        private = self.private.values()
        return [self.small, self.large, *(pool for pools in private for pool in (pools.small, pools.large))]

    def uses_expandable(self, pool: Pool) -> bool:
        """Whether new memory of the pool comes from expandable segments."""
        own_allocator = pool.private is not None and PoolOptions.OWN_ALLOCATOR in pool.private.options
        return self.settings.expandable_segments and not own_allocator

    def new_address(self, size: int, stream: int) -> int:
        """Return the address of a new segment."""
        if self.choose_address is not None:
            return self.choose_address(size, stream)
        address = self.placement.place(size)
        return self.next_range(size) if address is None else address

    def new_range(self, size: int, stream: int) -> int:
        """Return the address of a new expandable segment."""
        return self.next_range(size) if self.choose_address is None else self.choose_address(size, stream)

    def next_range(self, size: int) -> int:
        """Return the first address behind all that this function returned so far."""
        address = self.next_address
        self.next_address += size
        return address

    def update_reserved(self, action: Action, address: int, size: int, free_set: FreeSet) -> None:
        """Account for memory that the device gave (segment_alloc, segment_map) or took back, and report the event."""
        self.reserved += size if action in GROWTH else -size
        if self.statistics is not None:
            self.statistics.segment_changed(action, size, free_set)
        if action is Action.SEGMENT_FREE:
            self.placement.release(address)
        if self.on_event is not None:
            self.on_event(action, address, size, free_set.stream)

    # ---- the order of free blocks (docs/allocator.md section 5)

    def rank(self, address: int, near: Block | None = None) -> int:
        """Return the rank of a new block at an address, in the segment of `near` or, without it, in a new segment."""
        if self._by_creation or near is None:
            self._counter += 1
        if self._by_creation:
            return -self._counter
        if near is not None:
            return near.rank + near.address - address
        return -address if self.order is Order.ADDRESS else -(self._counter << _RANK_BITS) - address

    def set_address(self, block: Block, address: int) -> None:
        """Move the start of a block within its segment; the caller adapts its size and neighbours."""
        if not self._by_creation:
            block.rank += block.address - address
        block.address = address

    # ---- blocks

    def split(self, block: Block, size: int) -> Block:
        """Return the first `size` bytes of a block that is not in its free set; the remainder goes into the set."""
        front = Block(block.address, size, block.free_set, block.rank, block.expandable)
        if self._by_creation:
            front.rank = self.rank(block.address)
        else:
            block.rank -= size
        before = front.previous = block.previous
        if before is not None:
            before.next = front
        front.next = block
        block.previous = front
        block.address += size
        block.size -= size
        block.free_set.insert(block)
        if self.statistics is not None:
            self.statistics.split(front, block)
        return front

    def merge_free(self, block: Block) -> None:
        """Merge a block with its free neighbours and insert it into its free set."""
        # FreeSet.remove and FreeSet.insert are written out: every free of a replay passes here.
        free_set = block.free_set
        by_size = free_set.by_size
        size = block.size
        other = block.previous
        if other is not None and other.free:
            same_size = by_size[other.size]
            if same_size[-1] is other:
                same_size.pop()
            else:
                del same_size[bisect_left(same_size, other.rank, key=RANK)]
            size += other.size
            block.address = other.address
            if not self._by_creation:
                block.rank = other.rank
            before = block.previous = other.previous
            if before is not None:
                before.next = block
        other = block.next
        if other is not None and other.free:
            same_size = by_size[other.size]
            if same_size[-1] is other:
                same_size.pop()
            else:
                del same_size[bisect_left(same_size, other.rank, key=RANK)]
            size += other.size
            after = block.next = other.next
            if after is not None:
                after.previous = block
        block.size = size
        block.free = True
        block.inserted_at = free_set.pool.searches
        merged_size = by_size.get(size)
        if merged_size is None:
            by_size[size] = [block]
            insort(free_set.sizes, size)
        elif not merged_size or merged_size[-1].rank < block.rank:
            merged_size.append(block)
        else:
            insort(merged_size, block, key=RANK)

    def contiguous_blocks(self) -> Iterator[list[Block]]:
        """Yield the blocks of each segment, by address; of an expandable segment those of each mapped run."""
        free = [block for pool in self.pools() for block in pool.free_blocks()]
        run: list[Block] = []
        for block in sorted([*self.live.values(), *self.pending, *free], key=lambda block: block.address):
            if run and block.previous is not run[-1]:
                yield run
                run = []
            run.append(block)
        if run:
            yield run
