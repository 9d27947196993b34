"""Where each request goes: pools, best fit, splits, segments and their release, without statistics."""

from __future__ import annotations

import collections
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from memexplore.allocator import cache, expandable
from memexplore.allocator.blocks import RANK, Block, FreeSet, Pool, PoolOptions, PrivatePool
from memexplore.allocator.settings import BLOCK, SMALL, UNLIMITED, Order, Settings, order_of
from memexplore.tape import Action

OnEvent = Callable[[Action, int, int, int], object]
"""Called with action, address, size and stream of a segment or out-of-memory event."""

_FIRST_ADDRESS = 0x7F00_0000_0000
_RANK_BITS = 52  # more than any device address has


class Placement:
    """One device's allocator without statistics: which address each request gets (ALLOCATOR.md sections 2 to 12).

    `capacity` is what all segments together may take, in bytes, None for no limit; `total` is the device's memory.
    `choose_address` may give the address of a new segment from its size and stream; otherwise they follow one another.
    `finished` is asked at each request whether the work on a stream has reached the oldest free that waits for it;
    without it every stream always has.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        capacity: int | None = None,
        total: int | None = None,
        release: str = "2.13",
        on_event: OnEvent | None = None,
        choose_address: Callable[[int, int], int] | None = None,
        finished: Callable[[int], bool] | None = None,
    ) -> None:
        self.settings = settings if settings is not None else Settings()
        self.capacity = UNLIMITED if capacity is None else capacity
        self.total = total or capacity or 1 << 40
        self.release = release
        self.order = order_of(release)
        self.on_event = on_event
        self.on_completed: Callable[[Block], object] | None = None
        """Called with each block whose free had to wait for another stream, when it is done."""
        self.choose_address = choose_address
        self.finished = finished
        self.live: dict[int, Block] = {}
        """Blocks handed out, by address."""
        self.pending: dict[Block, None] = {}
        """Blocks whose free was asked for and waits."""
        self.private: dict[tuple[int, int], PrivatePool] = {}
        self.small, self.large = Pool("small"), Pool("large")
        self.reserved = 0
        self.retries = self.synchronizations = self.device_allocs = self.device_frees = self.rejections = 0
        self.rejected = False
        """Whether the last request was refused before cudaMalloc (`throw_on_cudamalloc_oom`)."""
        self.captures: list[tuple[PrivatePool, Callable[[int], bool]]] = []
        self._deferred: dict[Block, None] = {}
        self._capture_uses: dict[Block, set[int]] = {}
        self._events: dict[int, collections.deque[Block]] = {}
        self.next_address = _FIRST_ADDRESS
        self._counter = 0
        self._by_creation = self.order is Order.CREATION
        self._rounds_to_powers = any(self.settings.roundup_power2_divisions)
        self.set_memory_fraction(self.settings.per_process_memory_fraction)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit what may be reserved to a fraction of the device's memory; 1 takes the limit away.

        Raises ValueError outside [0, 1].
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"invalid fraction: {fraction}. Please set within [0, 1].")
        self.limit = int(fraction * self.total) if fraction < 1 else None
        self._ages = self.limit is not None and self.settings.garbage_collection_threshold > 0
        special = self.settings.expandable_segments or self.settings.max_split_size < UNLIMITED
        # Without these settings the first block that is large enough is the answer.
        self._plain = not special and not self._ages

    # ---- a request

    def take(self, requested: int, stream: int) -> Block | None:
        """Hand out a block for a request of at least one byte; None where the device has no memory left.

        The caller keeps `live`.
        """
        if self._events or self._deferred:
            self.process_events()
        size = self.settings.round_size(requested) if self._rounds_to_powers else (requested + 511) & -512
        pool = self.small if size <= SMALL else self.large
        if self.captures:
            pool = self._captured_pool(pool, stream)
        home = pool.streams.get(stream) or self.home(pool, stream)
        same = home.by_size.get(size)
        if same and self._plain:
            block = same.pop()
            block.free = False
        else:
            found = (home.best_fit(size) if self._plain else self._search(home, size)) or self._grow(home, size)
            if found is None:
                return None
            block = found
            rest = block.size - size
            home = block.home
            if rest >= home.least_rest and size < home.split_below:
                block = self.split(block, size)
        block.requested = requested
        return block

    def home(self, pool: Pool, stream: int) -> FreeSet:
        """The free set of a pool and stream."""
        if stream not in pool.streams:
            least_rest, split_below = SMALL + BLOCK, self.settings.max_split_size
            if pool.kind == "small" or self.expands(pool):
                least_rest, split_below = BLOCK, UNLIMITED
            if pool.private is not None and PoolOptions.NO_SPLIT in pool.private.use:
                least_rest = UNLIMITED
            pool.streams[stream] = FreeSet(pool, stream, least_rest, split_below)
        return pool.streams[stream]

    def expands(self, pool: Pool) -> bool:
        """Whether the pool's memory comes from expandable segments."""
        own = pool.private is not None and PoolOptions.OWN_ALLOCATOR in pool.private.use
        return self.settings.expandable_segments and not own

    def rank(self, address: int, near: Block | None = None) -> int:
        """The rank of a block that is made at an address, in the segment of `near` or in a new one."""
        if self._by_creation or near is None:
            self._counter += 1
        if self._by_creation:
            return -self._counter
        if near is not None:
            return near.rank + near.address - address
        return -address if self.order is Order.ADDRESS else -(self._counter << _RANK_BITS) - address

    def move(self, block: Block, address: int) -> None:
        """Let a block begin elsewhere in its segment."""
        if not self._by_creation:
            block.rank += block.address - address
        block.address = address

    def split(self, block: Block, size: int) -> Block:
        """The front of a block that was taken out of its free set; the rest goes back."""
        front = Block(block.address, size, block.home, block.rank, block.range)
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
        block.home.insert(block)
        return front

    def _search(self, home: FreeSet, size: int) -> Block | None:
        """Best fit with all its conditions (ALLOCATOR.md section 5)."""
        if self._ages:
            home.pool.searches += 1
        blocks = home.from_size(size)
        block = next(blocks, None)
        if block is None:
            return None
        if block.range is not None:
            if self.settings.expandable_segments:
                for other in blocks:
                    if block.range is None or expandable.reach(other) >= expandable.reach(block):
                        break
                    block = other
            else:
                block = next((other for other in blocks if other.range is None), None)
                if block is None:
                    return None
        most = self.settings.max_split_size
        if size < most <= block.size:
            return None
        if size >= most and block.size >= size + self.settings.max_non_split_rounding:
            return None
        home.remove(block)
        return block

    # ---- new memory

    def _grow(self, home: FreeSet, size: int) -> Block | None:
        """A block from a new segment, if need be after releasing what is cached."""
        if self._ages:
            cache.collect_garbage(self)
        segment = self.settings.segment_size(size)
        self.rejected = False
        block = self._new_segment(home, size, segment)
        if block is None and not self.rejected:
            block = self._from_overflow_pools(home, size)
        if block is None and not self.rejected and cache.release_oversize(self, home, size):
            block = self._new_segment(home, size, segment)
        if block is None and not self.rejected and not self.captures:
            self.release_cached()
            self.retries += 1
            block = self._new_segment(home, size, segment)
        return block

    def _new_segment(self, home: FreeSet, size: int, segment: int) -> Block | None:
        if self.limit is not None and self.reserved + segment > self.limit:
            return None
        if self.settings.throw_on_cudamalloc_oom:
            allowed = int(self.settings.per_process_memory_fraction * self.total)
            if self.reserved + segment > allowed:
                self.rejections += 1
                self.rejected = True
                return None
        private = home.pool.private
        if self.expands(home.pool):
            block = expandable.grow(self, home, size)
            if block is None:
                return None
        else:
            if self.reserved + segment > self.capacity:
                return None
            address = self.new_address(segment, home.stream)
            block = Block(address, segment, home, self.rank(address), None)
            self.device_allocs += 1
            self.reserve(Action.SEGMENT_ALLOC, address, segment, home)
        if private is not None:
            private.segments += 1
        return block

    def new_address(self, size: int, stream: int) -> int:
        """The address of a new segment."""
        if self.choose_address is not None:
            return self.choose_address(size, stream)
        address = self.next_address
        self.next_address += size
        return address

    def reserve(self, action: Action, address: int, size: int, home: FreeSet) -> None:
        """Account for memory that the device gave (segment_alloc, segment_map) or took back."""
        self.reserved += size if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP) else -size
        if self.on_event is not None:
            self.on_event(action, address, size, home.stream)

    def _from_overflow_pools(self, home: FreeSet, size: int) -> Block | None:
        if home.pool.private is not None:
            return None
        for private in self.private.values():
            if PoolOptions.ON_OOM in private.use:
                pool = private.small if home.pool.kind == "small" else private.large
                block = self._search(self.home(pool, home.stream), size)
                if block is not None:
                    return block
        return None

    def release_cached(self) -> None:
        """Give every segment without a live block back to the device, as `empty_cache` and a failed cudaMalloc do."""
        cache.release_everything(self)

    # ---- a free

    def give_back(self, block: Block) -> None:
        """Free a block that `take` returned and that is no longer in `live`, now or when other streams are done."""
        if not block.uses:
            self.complete(block)
            return
        self.pending[block] = None
        if self.captures:
            self._deferred[block] = None
        else:
            self._record_events(block)

    def complete(self, block: Block) -> None:
        """End a free."""
        self.settle(block)

    def settle(self, block: Block) -> None:
        """Merge a block with its free neighbours and put it into its free set."""
        home = block.home
        by_size = home.by_size
        size = block.size
        other = block.previous
        if other is not None and other.free:
            same = by_size[other.size]
            if same[-1] is other:
                same.pop()
            else:
                del same[bisect_left(same, other.rank, key=RANK)]
            size += other.size
            block.address = other.address
            if not self._by_creation:
                block.rank = other.rank
            before = block.previous = other.previous
            if before is not None:
                before.next = block
        other = block.next
        if other is not None and other.free:
            same = by_size[other.size]
            if same[-1] is other:
                same.pop()
            else:
                del same[bisect_left(same, other.rank, key=RANK)]
            size += other.size
            after = block.next = other.next
            if after is not None:
                after.previous = block
        block.size = size
        block.free = True
        block.age = home.pool.searches
        present = by_size.get(size)
        if present is None:
            by_size[size] = [block]
            insort(home.sizes, size)
        elif not present or present[-1].rank < block.rank:
            present.append(block)
        else:
            insort(present, block, key=RANK)

    def runs(self) -> Iterator[list[Block]]:
        """The blocks of each segment; of an expandable segment one run for each contiguous piece of memory."""
        free = [
            block
            for pool in (self.small, self.large, *(each for p in self.private.values() for each in (p.small, p.large)))
            for home in pool.streams.values()
            for block in home.from_size(0)
        ]
        run: list[Block] = []
        for block in sorted([*self.live.values(), *self.pending, *free], key=lambda block: block.address):
            if run and block.previous is not run[-1]:
                yield run
                run = []
            run.append(block)
        if run:
            yield run

    # ---- other streams

    def record_stream(self, address: int, stream: int) -> None:
        """Note that another stream uses the block, so that its free waits for that stream."""
        block = self.live[address]
        if stream == block.home.stream:
            return
        block.uses = (block.uses or set()) | {stream}
        if self.captures:
            self._capture_uses.setdefault(block, set()).add(stream)

    def _record_events(self, block: Block) -> None:
        for stream in sorted(block.uses or ()):
            block.waiting += 1
            self._events.setdefault(stream, collections.deque()).append(block)
        block.uses = None

    def _record_deferred(self) -> None:
        """Record the events of blocks that were freed during a capture; uses inside the capture are over."""
        for block in self._deferred:
            block.uses = (block.uses or set()) - self._capture_uses.pop(block, set())
            self._record_events(block)
            if not block.waiting:
                self._happened(block)
        self._deferred.clear()

    def _happened(self, block: Block) -> None:
        del self.pending[block]
        if self.on_completed is not None:
            self.on_completed(block)
        self.complete(block)

    def process_events(self) -> None:
        """Free the blocks whose streams have finished, as every request does first."""
        if not self.captures:
            self._drain(self.finished)

    def forget(self, block: Block) -> None:
        """Let a block wait no longer; the caller ends its free."""
        if not block.waiting:
            return
        block.waiting = 0
        del self.pending[block]
        for stream in list(self._events):
            self._events[stream] = collections.deque(other for other in self._events[stream] if other is not block)
            if not self._events[stream]:
                del self._events[stream]

    def synchronize(self) -> None:
        """Wait for every stream, as `empty_cache` and a failed cudaMalloc do."""
        self.synchronizations += 1
        self._drain(None)

    def _drain(self, finished: Callable[[int], bool] | None) -> None:
        self._record_deferred()
        for stream in list(self._events):
            queue = self._events[stream]
            while queue and (finished is None or finished(stream)):
                block = queue.popleft()
                block.waiting -= 1
                if not block.waiting:
                    self._happened(block)
            if not queue:
                del self._events[stream]

    # ---- private pools

    def create_pool(self, identity: tuple[int, int], use: PoolOptions = PoolOptions.NORMAL) -> None:
        """Make a private pool, or take one more share in it."""
        if identity in self.private:
            self.private[identity].users += 1
        else:
            self.private[identity] = PrivatePool(identity, use)

    def begin_pool(self, identity: tuple[int, int], wanted: Callable[[int], bool] = lambda stream: True) -> None:
        """Send requests of the streams that are `wanted` to a private pool; of several the last begun is asked first.

        The pool is made where `create_pool` has not. Events are not polled until `end_pool`.
        """
        if identity not in self.private:
            self.create_pool(identity)
        self.captures.append((self.private[identity], wanted))

    def end_pool(self, identity: tuple[int, int]) -> None:
        """Send requests to where they went before `begin_pool`."""
        at = max(place for place, (private, _) in enumerate(self.captures) if private.identity == identity)
        del self.captures[at]

    def release_pool(self, identity: tuple[int, int]) -> None:
        """Give up one share in a private pool; without shares its free segments can be released."""
        self.private[identity].users -= 1

    def _captured_pool(self, pool: Pool, stream: int) -> Pool:
        for private, wanted in reversed(self.captures):
            if wanted(stream):
                return private.small if pool.kind == "small" else private.large
        return pool
