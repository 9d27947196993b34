"""The caching allocator with its public behaviour: malloc, free, statistics, snapshots, out-of-memory messages.

Requests go in one at a time; addresses come out, or `OutOfMemory` with PyTorch's own text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memexplore.allocator.actions import GROWTH
from memexplore.allocator.blocks import Block, FreeSet
from memexplore.allocator.core import AllocatorCore
from memexplore.allocator.placement import Placement
from memexplore.allocator.segments import ChooseAddress, OnEvent
from memexplore.allocator.settings import UNLIMITED, Settings, version_of
from memexplore.allocator.sizes import format_size
from memexplore.allocator.stats import PoolStats, Stat
from memexplore.tape import Action

_EXABYTE = 1 << 60


class OutOfMemory(MemoryError):  # noqa: N818  (torch's own class has Error in its name, this is the event)
    """A request exceeds the device's memory; the message is PyTorch's own text, `size` the rounded request in bytes."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


class Allocator(AllocatorCore):
    """One device's caching allocator with statistics; sizes and addresses in bytes.

    `capacity` is what may be reserved (the device's memory without what lies outside the allocator), `total` the
    memory that `get_device_properties` reports, `release` the torch release whose rules hold. `on_event` is called
    with action, address, size and stream of each segment_alloc, segment_free, segment_map, segment_unmap and oom.
    `choose_address`, `placement` and `finished` are those of `AllocatorCore`.

    >>> allocator = Allocator(Settings(), capacity=8 * 1024**3, total=8 * 1024**3)
    >>> address = allocator.malloc(1000)
    >>> allocator.allocated, allocator.requested, allocator.reserved
    (1024, 1000, 2097152)
    >>> allocator.free(address)
    >>> allocator.empty_cache()
    >>> allocator.allocated, allocator.peak_allocated, allocator.reserved
    (0, 1024, 0)
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        capacity: int | None,
        total: int | None,
        gpu_index: int = 0,
        release: str = "2.13",
        on_event: OnEvent | None = None,
        choose_address: ChooseAddress | None = None,
        placement: Placement | None = None,
        finished: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__(
            settings,
            capacity=capacity,
            total=total,
            release=release,
            on_event=on_event,
            choose_address=choose_address,
            placement=placement,
            finished=finished,
        )
        self.gpu_index = gpu_index
        self.ooms = 0
        self._all_stats = PoolStats()
        self._stats = {"small": PoolStats(), "large": PoolStats()}
        """By the kind of the pool."""
        self._oversize_allocations, self._oversize_segments = Stat(), Stat()
        self._private_reserved: dict[tuple[int, int], dict[str, Stat]] = {}
        self._was_split = False

    def malloc(self, size: int, stream: int = 0) -> int:
        """Return the address of a block for a request of `size` bytes; 0 for a size of 0.

        Raises OutOfMemory, and ValueError for a negative size.
        """
        if not 0 < size < _EXABYTE:
            if size == 0:
                return 0
            if size < 0:
                raise ValueError(f"a request has a size of 0 or more bytes, not {size}")
            raise OutOfMemory("CUDA out of memory. Tried to allocate more than 1EB memory.", size)
        self._was_split = False
        block = self.allocate_block(size, stream)
        if block is None:
            raise self._out_of_memory(size, stream)
        self.live[block.address] = block
        block_size = block.size
        pool_stats = self._stats[block.free_set.pool.kind]
        if not self._was_split and block.expandable is None and (block.previous is not None or block.next is not None):
            self._all_stats.inactive_split.decrease(1)
            self._all_stats.inactive_split_bytes.decrease(block_size)
            pool_stats.inactive_split.decrease(1)
            pool_stats.inactive_split_bytes.decrease(block_size)
        # Stat.increase is written out: every tensor of a simulated training step passes here.
        for each in (self._all_stats, pool_stats):
            stat = each.allocation
            stat.current += 1
            if stat.current > stat.peak:
                stat.peak = stat.current
            stat = each.allocated_bytes
            stat.current += block_size
            if stat.current > stat.peak:
                stat.peak = stat.current
            stat = each.requested_bytes
            stat.current += size
            if stat.current > stat.peak:
                stat.peak = stat.current
        if self.pending:
            self._all_stats.update_active_peaks()
            pool_stats.update_active_peaks()
        if block_size >= self.settings.max_split_size:
            self._oversize_allocations.increase(1)
        return block.address

    def free(self, address: int) -> None:
        """Free a block, at once or when the streams of `record_stream` have finished.

        Raises ValueError if no live block has this address.
        """
        if address == 0:
            return
        block = self.live.pop(address, None)
        if block is None:
            raise ValueError(f"invalid device pointer: {address:#x}")
        block_size = block.size
        pool_stats = self._stats[block.free_set.pool.kind]
        for each in (self._all_stats, pool_stats):
            stat = each.allocation
            stat.current -= 1
            stat.freed += 1
            stat = each.allocated_bytes
            stat.current -= block_size
            stat.freed += block_size
        if block_size >= self.settings.max_split_size:
            self._oversize_allocations.decrease(1)
        if block.other_streams:
            for each in (self._all_stats, pool_stats):
                each.pending.increase(1)
                each.pending_bytes.increase(block_size)
        self.free_block(block)

    def _events_completed(self, block: Block) -> None:
        for each in (self._all_stats, self._stats[block.free_set.pool.kind]):
            each.pending.decrease(1)
            each.pending_bytes.decrease(block.size)
        super()._events_completed(block)

    def complete_free(self, block: Block) -> None:
        """Complete a free: merge the block, then lower the statistics that fall only now."""
        count = size = 0
        if block.expandable is None:
            previous, following = block.previous, block.next
            whole_segment = True
            if previous is not None:
                if previous.free:
                    count, size, whole_segment = -1, -previous.size, previous.previous is None
                else:
                    whole_segment = False
            if following is not None:
                if following.free:
                    count -= 1
                    size -= following.size
                    whole_segment = whole_segment and following.next is None
                else:
                    whole_segment = False
        requested = block.requested
        self.merge_free(block)
        pool_stats = self._stats[block.free_set.pool.kind]
        for each in (self._all_stats, pool_stats):
            stat = each.requested_bytes
            stat.current -= requested
            stat.freed += requested
        if block.expandable is None:
            if not whole_segment:
                count += 1
                size += block.size
            for each in (self._all_stats, pool_stats):
                each.inactive_split.change(count)
                each.inactive_split_bytes.change(size)

    def split(self, block: Block, size: int) -> Block:
        """Split a block as `Segments.split` does, and count inactive splits."""
        self._was_split = True
        was_split = block.previous is not None or block.next is not None
        front = super().split(block, size)
        if block.expandable is None:
            for each in (self._all_stats, self._stats[block.free_set.pool.kind]):
                if was_split:
                    each.inactive_split_bytes.decrease(size)
                else:
                    each.inactive_split.increase(1)
                    each.inactive_split_bytes.increase(block.size)
        return front

    def update_reserved(self, action: Action, address: int, size: int, free_set: FreeSet) -> None:
        """Account for memory that the device gave or took back, in every statistic that counts it."""
        pool_stats = self._stats[free_set.pool.kind]
        stats = [self._all_stats.reserved_bytes, pool_stats.reserved_bytes]
        if free_set.pool.private is not None:
            names = ("all", "large_pool", "small_pool")
            of_pool = self._private_reserved.setdefault(free_set.pool.identity, {name: Stat() for name in names})
            stats += [of_pool["all"], of_pool[f"{free_set.pool.kind}_pool"]]
        sign = 1 if action in GROWTH else -1
        for stat in stats:
            stat.change(sign * size)
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE):
            self._all_stats.segment.change(sign)
            pool_stats.segment.change(sign)
            if size >= self.settings.max_split_size:
                self._oversize_segments.change(sign)
        super().update_reserved(action, address, size, free_set)

    def empty_cache(self) -> None:
        """Release every segment without a live block, after waiting for all streams."""
        self.release_cached()

    def block_size(self, address: int) -> int:
        """Return the bytes of the live block at an address."""
        return self.live[address].size

    @property
    def allocated(self) -> int:
        """Bytes of the allocated blocks."""
        return self._all_stats.allocated_bytes.current

    @property
    def active(self) -> int:
        """Bytes of the allocated blocks and of those whose free waits for another stream."""
        return self._all_stats.allocated_bytes.current + self._all_stats.pending_bytes.current

    @property
    def requested(self) -> int:
        """Requested bytes of the active blocks."""
        return self._all_stats.requested_bytes.current

    @property
    def peak_allocated(self) -> int:
        """The highest `allocated` since the last `reset_peak_stats`."""
        return self._all_stats.allocated_bytes.highest

    @property
    def peak_active(self) -> int:
        """The highest `active` since the last `reset_peak_stats`."""
        return max(self._all_stats.allocated_bytes.highest, self._all_stats.active_bytes.peak)

    @property
    def peak_requested(self) -> int:
        """The highest `requested` since the last `reset_peak_stats`."""
        return self._all_stats.requested_bytes.highest

    @property
    def peak_reserved(self) -> int:
        """The highest `reserved` since the last `reset_peak_stats`."""
        return self._all_stats.reserved_bytes.highest

    @property
    def free_memory(self) -> int:
        """Free bytes of the device, the first value of `torch.cuda.mem_get_info()`."""
        return max(self.capacity - self.reserved, 0)

    def reset_peak_stats(self) -> None:
        """Set every peak to the current value."""
        for pool_stats in self._stats_by_pool().values():
            pool_stats.reset_peaks()
        for stat in (self._oversize_allocations, self._oversize_segments, *self._private_stats()):
            stat.reset_peak()

    def mark_peaks(self) -> None:
        """Begin a period whose own peaks are `peaks_since_mark`; the peaks of the statistics stay as they are."""
        self._all_stats.allocated_bytes.mark()
        self._all_stats.reserved_bytes.mark()

    def peaks_since_mark(self) -> tuple[int, int]:
        """The highest `allocated` and `reserved` since `mark_peaks`, also where statistics were reset meanwhile."""
        return self._all_stats.allocated_bytes.since_mark, self._all_stats.reserved_bytes.since_mark

    def reset_accumulated_stats(self) -> None:
        """Start the sums of increases and decreases, and the counters, from zero."""
        for pool_stats in self._stats_by_pool().values():
            pool_stats.reset_accumulated()
        for stat in (self._oversize_allocations, self._oversize_segments, *self._private_stats()):
            stat.reset_accumulated()
        self.retries = self.ooms = self.synchronizations = self.device_allocs = self.device_frees = 0
        self.rejections = 0

    def stats(self) -> dict[str, int]:
        """Return the statistics under the names of `torch.cuda.memory_stats()`, sizes in bytes.

        >>> Allocator(capacity=None, total=None).stats()["allocated_bytes.all.current"]
        0
        """
        flat: dict[str, int] = {}
        for pool, pool_stats in self._stats_by_pool().items():
            for name, values in pool_stats.values().items():
                flat |= {f"{name}.{pool}.{key}": value for key, value in values.items()}
        oversize = {"oversize_allocations": self._oversize_allocations, "oversize_segments": self._oversize_segments}
        for name, stat in oversize.items():
            flat |= {f"{name}.{key}": value for key, value in stat.values().items()}
        for identity, stats in self._private_reserved.items():
            prefix = f"reserved_bytes_by_private_pools.{identity[0]}_{identity[1]}"
            for pool, stat in stats.items():
                flat |= {f"{prefix}.{pool}.{key}": value for key, value in stat.values().items()}
        flat |= {
            "max_split_size": -1 if self.settings.max_split_size == UNLIMITED else self.settings.max_split_size,
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
            "num_sync_all_streams": self.synchronizations,
            "num_device_alloc": self.device_allocs,
            "num_device_free": self.device_frees,
            "num_oom_rejections": self.rejections,
        }
        return dict(sorted(flat.items()))

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the segments as `torch.cuda.memory._snapshot()["segments"]` does, by address, sizes in bytes."""
        return [self._segment(blocks) for blocks in self.contiguous_blocks()]

    def _segment(self, blocks: list[Block]) -> dict[str, Any]:
        free_set = blocks[0].free_set
        states = {
            block: "inactive" if block.free else "active_pending_free" if block in self.pending else "active_allocated"
            for block in blocks
        }
        return {
            "device": self.gpu_index,
            "address": blocks[0].address,
            "total_size": sum(block.size for block in blocks),
            "allocated_size": sum(block.size for block in blocks if states[block] == "active_allocated"),
            "active_size": sum(block.size for block in blocks if states[block] != "inactive"),
            "requested_size": sum(block.requested for block in blocks if states[block] != "inactive"),
            "stream": free_set.stream,
            "segment_type": free_set.pool.kind,
            "segment_pool_id": free_set.pool.identity,
            "is_expandable": blocks[0].expandable is not None,
            "frames": [],
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": states[block],
                    "frames": [],
                }
                for block in blocks
            ],
        }

    def _stats_by_pool(self) -> dict[str, PoolStats]:
        return {"all": self._all_stats, "large_pool": self._stats["large"], "small_pool": self._stats["small"]}

    def _private_stats(self) -> list[Stat]:
        return [stat for stats in self._private_reserved.values() for stat in stats.values()]

    def _out_of_memory(self, size: int, stream: int) -> OutOfMemory:
        rounded = self.settings.round_size(size)
        if self.rejected:
            return OutOfMemory(
                "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
                f"per_process_memory_fraction limit. Requested size: {format_size(size)}",
                rounded,
            )
        self.ooms += 1
        if self.on_event is not None:
            self.on_event(Action.OOM, -1, rounded, stream)
        free_in_private = sum(
            block.size for pool in self.pools() if pool.private is not None for block in pool.free_blocks()
        )
        allocated = self.allocated + free_in_private
        private = ""
        if free_in_private:
            private = f"with {format_size(free_in_private)} allocated in private pools (e.g., CUDA Graphs), "
        allowed = f"{format_size(self.limit)} allowed; " if self.limit is not None else ""
        page = "docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
        if version_of(self.release) < (2, 11):
            page = "pytorch.org/docs/stable/notes/cuda.html#environment-variables"
        return OutOfMemory(
            f"CUDA out of memory. Tried to allocate {format_size(self.settings.segment_size(rounded))}. "
            f"GPU {self.gpu_index} has a total capacity of {format_size(self.total)} "
            f"of which {format_size(self.free_memory)} is free. "
            f"Including non-PyTorch memory, this process has {format_size(self.total - self.free_memory)} memory "
            f"in use. {allowed}Of the allocated memory {format_size(allocated)} is allocated by PyTorch, {private}"
            f"and {format_size(self.reserved - allocated)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
            f"to avoid fragmentation.  See documentation for Memory Management  (https://{page})",
            rounded,
        )
