"""Decide as PyTorch's caching allocator which block each request gets, and when memory is released.

The steps of a request are those of docs/allocator.md section 4.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

from memexplore.allocator import cache, expandable
from memexplore.allocator.blocks import Block, FreeSet, Pool, PoolOptions, PrivatePool
from memexplore.allocator.placement import Placement
from memexplore.allocator.segments import ChooseAddress, OnEvent, Segments
from memexplore.allocator.stats import Statistics
from memexplore.tape import Action
from memexplore.tape.allocator_settings import SMALL, UNLIMITED, Settings


class BlockAllocator:
    """One device's allocator, by blocks instead of addresses (docs/allocator.md sections 2 to 12).

    Arguments are those of `Segments`, which has the blocks. `finished` is called at each request with a stream and
    returns whether its work has reached the oldest pending free. Without it the work of every stream has always
    finished. `statistics` count requests, frees and segments; replays go without.
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
        finished: Callable[[int], bool] | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self.segments = segments = Segments(
            settings,
            capacity=capacity,
            total=total,
            release=release,
            on_event=on_event,
            choose_address=choose_address,
            placement=placement,
            statistics=statistics,
        )
        self.settings = settings = segments.settings
        self.finished = finished
        self.statistics = statistics
        self.on_pending_completed: Callable[[Block], object] | None = None
        """Called with each block whose pending free completes, before the block is merged."""
        self.retries = self.synchronizations = self.rejections = 0
        self.rejected = False
        """Whether the last request was refused before cudaMalloc (`throw_on_cudamalloc_oom`)."""
        self.captures: list[tuple[PrivatePool, Callable[[int], bool]]] = []
        """Active private pools with their stream filters, the most recent last."""
        self._events: dict[int, collections.deque[Block]] = {}
        """Blocks with an unfinished event on each stream, oldest first."""
        self._freed_in_capture: dict[Block, None] = {}
        self._streams_in_capture: dict[Block, set[int]] = {}
        self._rounds_to_powers = any(settings.roundup_power2_divisions)
        # Bound once, as every request of a replay needs them.
        self._small, self._large, self._split = segments.small, segments.large, segments.split
        self.limit_to(settings.limit(segments.total))

    def change_settings(self, settings: Settings) -> None:
        """Take other settings for all requests that come; the limit of reserved memory stays (`limit_to`)."""
        self.settings = settings
        self.segments.change_settings(settings)
        self._rounds_to_powers = any(settings.roundup_power2_divisions)
        self.limit_to(self.segments.limit)

    def limit_to(self, limit: int | None) -> None:
        """Limit reserved memory to some bytes; None removes the limit."""
        self.segments.limit = limit
        self._collects_garbage = limit is not None and self.settings.garbage_collection_threshold > 0
        conditions = self.segments.has_expandable or self.settings.max_split_size < UNLIMITED
        self._best_fit_suffices = not conditions and not self._collects_garbage
        """Whether the smallest sufficient block can be taken without the further conditions of `_search`."""

    # ---- a request

    def allocate_block(self, requested: int, stream: int) -> Block | None:
        """Return a block for a request of at least one byte, None if the device has no memory left.

        The caller keeps `segments.live`.
        """
        if self._events or self._freed_in_capture:
            self.process_events()
        size = self.settings.round_size(requested) if self._rounds_to_powers else (requested + 511) & -512
        pool = self._small if size <= SMALL else self._large
        if self.captures:
            pool = self._pool_of_capture(pool, stream)
        free_set = pool.free_sets.get(stream) or self.segments.free_set(pool, stream)
        same_size = free_set.by_size.get(size)
        if same_size and self._best_fit_suffices:
            block = same_size.pop()
            block.free = False
        else:
            best = free_set.pop_best_fit(size) if self._best_fit_suffices else self._search(free_set, size)
            best = best or self._from_device(free_set, size)
            if best is None:
                return None
            block = best
            remainder = block.size - size
            free_set = block.free_set
            if remainder >= free_set.min_remainder and size < free_set.split_limit:
                block = self._split(block, size)
        block.requested = requested
        return block

    def _search(self, free_set: FreeSet, size: int) -> Block | None:
        """Remove and return the best fit under all conditions of docs/allocator.md section 5; None without one."""
        if self._collects_garbage:
            free_set.pool.searches += 1
        candidates = free_set.at_least(size)
        block = next(candidates, None)
        if block is None:
            return None
        if block.expandable is not None:
            if self.settings.expandable_segments:
                for other in candidates:
                    larger = expandable.effective_size(other) >= expandable.effective_size(block)
                    if block.expandable is None or larger:
                        break
                    block = other
            else:
                block = next((other for other in candidates if other.expandable is None), None)
                if block is None:
                    return None
        max_split_size = self.settings.max_split_size
        if size < max_split_size <= block.size:
            return None
        if size >= max_split_size and block.size >= size + self.settings.max_non_split_rounding:
            return None
        free_set.remove(block)
        return block

    # ---- new memory

    def _from_device(self, free_set: FreeSet, size: int) -> Block | None:
        """Return a block of new memory, after releasing cached memory if the device has none left."""
        if self._collects_garbage:
            cache.collect_garbage(self.segments)
        self.rejected = False
        block = self._new_segment(free_set, size)
        if block is None and not self.rejected:
            block = self._from_on_oom_pools(free_set, size)
        if block is None and not self.rejected and cache.release_oversize(self.segments, free_set, size):
            block = self._new_segment(free_set, size)
        if block is None and not self.rejected and not self.captures:
            self.release_cached()
            self.retries += 1
            block = self._new_segment(free_set, size)
        return block

    def _new_segment(self, free_set: FreeSet, size: int) -> Block | None:
        segments = self.segments
        length = self.settings.segment_size(size)
        if segments.limit is not None and segments.reserved + length > segments.limit:
            return None
        if self.settings.throw_on_cudamalloc_oom:
            allowed = int(self.settings.per_process_memory_fraction * segments.total)
            if segments.reserved + length > allowed:
                self.rejections += 1
                self.rejected = True
                return None
        private = free_set.pool.private
        if segments.uses_expandable(free_set.pool):
            block = expandable.map_block(segments, free_set, size)
            if block is None:
                return None
        else:
            if segments.reserved + length > segments.capacity:
                return None
            address = segments.new_address(length, free_set.stream)
            block = Block(address, length, free_set, segments.rank(address), None)
            segments.device_allocs += 1
            segments.update_reserved(Action.SEGMENT_ALLOC, address, length, free_set)
        if private is not None:
            private.segments += 1
        return block

    def _from_on_oom_pools(self, free_set: FreeSet, size: int) -> Block | None:
        """Return a free block of the private pools that serve the default pools after a failed cudaMalloc."""
        if free_set.pool.private is not None:
            return None
        for private in self.segments.private.values():
            if PoolOptions.ON_OOM in private.options:
                pool = private.small if free_set.pool.kind == "small" else private.large
                block = self._search(self.segments.free_set(pool, free_set.stream), size)
                if block is not None:
                    return block
        return None

    def release_cached(self) -> None:
        """Release every segment without a live block, as `empty_cache` and the retry after a failed cudaMalloc do.

        Waits for all streams first. During a capture only private pools without users are released.
        """
        if not self.captures:
            self.synchronize()
            cache.release_pool(self.segments, self._large)
            cache.release_pool(self.segments, self._small)
        cache.release_unused_private_pools(self.segments)

    # ---- a free

    def free_block(self, block: Block) -> None:
        """Free a block that is no longer in `segments.live`, at once or when the streams that used it have finished."""
        if not block.other_streams:
            self.complete_free(block)
            return
        self.segments.pending[block] = None
        if self.captures:
            self._freed_in_capture[block] = None
        else:
            self._record_events(block)

    def complete_free(self, block: Block) -> None:
        """Complete a free: merge the block and insert it into its free set."""
        if self.statistics is not None:
            self.statistics.free_completes(block)
        self.segments.merge_free(block)

    # ---- other streams (docs/allocator.md section 9)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses a block, so that its free waits for that stream."""
        if stream == block.free_set.stream:
            return
        block.other_streams = (block.other_streams or set()) | {stream}
        if self.captures:
            self._streams_in_capture.setdefault(block, set()).add(stream)

    def _record_events(self, block: Block) -> None:
        for stream in sorted(block.other_streams or ()):
            block.pending_events += 1
            self._events.setdefault(stream, collections.deque()).append(block)
        block.other_streams = None

    def _record_deferred_events(self) -> None:
        """Record the events of blocks freed during a capture; streams of the capture itself need none."""
        for block in self._freed_in_capture:
            block.other_streams = (block.other_streams or set()) - self._streams_in_capture.pop(block, set())
            self._record_events(block)
            if not block.pending_events:
                self._events_completed(block)
        self._freed_in_capture.clear()

    def _events_completed(self, block: Block) -> None:
        del self.segments.pending[block]
        if self.statistics is not None:
            self.statistics.pending_ended(block)
        if self.on_pending_completed is not None:
            self.on_pending_completed(block)
        self.complete_free(block)

    def process_events(self) -> None:
        """Free the pending blocks whose streams have finished, as every request does first."""
        if not self.captures:
            self._complete_events(self.finished)

    def synchronize(self) -> None:
        """Wait for every stream and free all pending blocks."""
        self.synchronizations += 1
        self._complete_events(None)

    def _complete_events(self, finished: Callable[[int], bool] | None) -> None:
        self._record_deferred_events()
        for stream in list(self._events):
            queue = self._events[stream]
            while queue and (finished is None or finished(stream)):
                block = queue.popleft()
                block.pending_events -= 1
                if not block.pending_events:
                    self._events_completed(block)
            if not queue:
                del self._events[stream]

    def cancel_events(self, block: Block) -> None:
        """Remove a block from the pending ones; the caller completes its free."""
        if not block.pending_events:
            return
        block.pending_events = 0
        del self.segments.pending[block]
        for stream in list(self._events):
            self._events[stream] = collections.deque(other for other in self._events[stream] if other is not block)
            if not self._events[stream]:
                del self._events[stream]

    # ---- private pools

    def create_pool(self, identity: tuple[int, int], options: PoolOptions = PoolOptions.NORMAL) -> None:
        """Create a private pool, or add 1 to the use count of an existing one."""
        if identity in self.segments.private:
            self.segments.private[identity].use_count += 1
        else:
            self.segments.private[identity] = PrivatePool(identity, options)

    def begin_pool(self, identity: tuple[int, int], stream_filter: Callable[[int], bool] = lambda stream: True) -> None:
        """Direct requests on the streams of `stream_filter` to a private pool, before pools that were begun earlier.

        The pool is created if it does not exist. Events are not polled until `end_pool`.
        """
        if identity not in self.segments.private:
            self.create_pool(identity)
        self.captures.append((self.segments.private[identity], stream_filter))

    def end_pool(self, identity: tuple[int, int]) -> None:
        """Undo the latest `begin_pool` of a private pool."""
        latest = max(index for index, (private, _) in enumerate(self.captures) if private.identity == identity)
        del self.captures[latest]

    def release_pool(self, identity: tuple[int, int]) -> None:
        """Subtract 1 from the use count of a private pool; at 0 its free segments can be released."""
        self.segments.private[identity].use_count -= 1

    def _pool_of_capture(self, pool: Pool, stream: int) -> Pool:
        for private, stream_filter in reversed(self.captures):
            if stream_filter(stream):
                return private.small if pool.kind == "small" else private.large
        return pool
