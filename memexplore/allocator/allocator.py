"""Answer as PyTorch's caching allocator: malloc, free, statistics, snapshots, and its out-of-memory messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memexplore.allocator.block_allocator import BlockAllocator
from memexplore.allocator.blocks import Block
from memexplore.allocator.placement import Placement
from memexplore.allocator.segments import ChooseAddress, OnEvent
from memexplore.allocator.sizes import format_size
from memexplore.allocator.stats import Statistics
from memexplore.tape import Action
from memexplore.tape.allocator_settings import UNLIMITED, Settings, version_of

_EXABYTE = 1 << 60


class OutOfMemory(MemoryError):  # noqa: N818  (torch's own class has Error in its name, this is the event)
    """A request exceeds the device's memory; the message is PyTorch's own text, `size` the rounded request in bytes."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


class Allocator:
    """One device's caching allocator with statistics; sizes and addresses in bytes.

    `capacity` is what may be reserved (the device's memory without what lies outside the allocator), `total` the
    memory that `get_device_properties` reports, `release` the torch release whose rules hold. `on_event` is called
    with action, address, size and stream of each segment_alloc, segment_free, segment_map, segment_unmap and oom.
    `choose_address` and `placement` are those of `Segments`, `finished` is that of `BlockAllocator`.

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
        self.settings = Settings() if settings is None else settings
        self._statistics = Statistics(self.settings.max_split_size)
        self.blocks = BlockAllocator(
            self.settings,
            capacity=capacity,
            total=total,
            release=release,
            on_event=on_event,
            choose_address=choose_address,
            placement=placement,
            finished=finished,
            statistics=self._statistics,
        )
        """Decides which block each request gets; has the private pools."""
        self.segments = self.blocks.segments
        self.live = self.segments.live
        """Allocated blocks by address."""
        self.gpu_index = gpu_index
        self.ooms = 0
        self.before_first_request: Callable[[], object] | None = None
        """Called before the first request, and before each until it has not raised."""

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
        if self.before_first_request is not None:
            self.before_first_request()
            self.before_first_request = None
        self._statistics.was_split = False
        block = self.blocks.allocate_block(size, stream)
        if block is None:
            raise self._out_of_memory(size, stream)
        self.live[block.address] = block
        self._statistics.allocated(block, size)
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
        self._statistics.freed(block)
        self.blocks.free_block(block)

    def record_stream(self, address: int, stream: int) -> None:
        """Note that another stream uses a block, so that its free waits for that stream."""
        self.blocks.record_stream(self.live[address], stream)

    def empty_cache(self) -> None:
        """Release every segment without a live block, after waiting for all streams."""
        self.blocks.release_cached()

    def block_size(self, address: int) -> int:
        """Return the bytes of the live block at an address."""
        return self.live[address].size

    def change_settings(self, settings: Settings) -> None:
        """Take other settings for all requests that come; the limit of reserved memory stays (`limit_to`)."""
        self.settings = settings
        self._statistics.max_split_size = settings.max_split_size
        self.blocks.change_settings(settings)

    def limit_to(self, limit: int | None) -> None:
        """Limit reserved memory to some bytes; None removes the limit."""
        self.blocks.limit_to(limit)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to a fraction of the device's memory; 1 removes the limit.

        Raises ValueError outside [0, 1].
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"invalid fraction: {fraction}. Please set within [0, 1].")
        self.limit_to(int(fraction * self.segments.total) if fraction < 1 else None)

    @property
    def limit(self) -> int | None:
        """Bytes that may be reserved (`limit_to`, `per_process_memory_fraction`); None without a limit."""
        return self.segments.limit

    @property
    def capacity(self) -> int:
        """Bytes that all segments together may reach."""
        return self.segments.capacity

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return self.segments.reserved

    @property
    def allocated(self) -> int:
        """Bytes of the allocated blocks."""
        return self._statistics.all.allocated_bytes.current

    @property
    def active(self) -> int:
        """Bytes of the allocated blocks and of those whose free waits for another stream."""
        return self._statistics.all.allocated_bytes.current + self._statistics.all.pending_bytes.current

    @property
    def requested(self) -> int:
        """Requested bytes of the active blocks."""
        return self._statistics.all.requested_bytes.current

    @property
    def peak_allocated(self) -> int:
        """The highest `allocated` since the last `reset_peak_stats`."""
        return self._statistics.all.allocated_bytes.highest

    @property
    def peak_active(self) -> int:
        """The highest `active` since the last `reset_peak_stats`."""
        return max(self._statistics.all.allocated_bytes.highest, self._statistics.all.active_bytes.peak)

    @property
    def peak_requested(self) -> int:
        """The highest `requested` since the last `reset_peak_stats`."""
        return self._statistics.all.requested_bytes.highest

    @property
    def peak_reserved(self) -> int:
        """The highest `reserved` since the last `reset_peak_stats`."""
        return self._statistics.all.reserved_bytes.highest

    @property
    def free_memory(self) -> int:
        """Free bytes of the device, the first value of `torch.cuda.mem_get_info()`."""
        return max(self.capacity - self.reserved, 0)

    def reset_peak_stats(self) -> None:
        """Set every peak to the current value."""
        self._statistics.reset_peaks()

    def mark_peaks(self) -> None:
        """Begin a period whose own peaks are `peaks_since_mark`; the peaks of the statistics stay as they are."""
        self._statistics.all.allocated_bytes.mark()
        self._statistics.all.reserved_bytes.mark()

    def peaks_since_mark(self) -> tuple[int, int]:
        """The highest `allocated` and `reserved` since `mark_peaks`, also where statistics were reset meanwhile."""
        return self._statistics.all.allocated_bytes.since_mark, self._statistics.all.reserved_bytes.since_mark

    def reset_accumulated_stats(self) -> None:
        """Start the sums of increases and decreases, and the counters, from zero."""
        self._statistics.reset_accumulated()
        blocks, segments = self.blocks, self.segments
        self.ooms = blocks.retries = blocks.synchronizations = blocks.rejections = 0
        segments.device_allocs = segments.device_frees = 0

    def stats(self) -> dict[str, int]:
        """Return the statistics under the names of `torch.cuda.memory_stats()`, sizes in bytes.

        >>> Allocator(capacity=None, total=None).stats()["allocated_bytes.all.current"]
        0
        """
        flat = self._statistics.values() | {
            "max_split_size": -1 if self.settings.max_split_size == UNLIMITED else self.settings.max_split_size,
            "num_alloc_retries": self.blocks.retries,
            "num_ooms": self.ooms,
            "num_sync_all_streams": self.blocks.synchronizations,
            "num_device_alloc": self.segments.device_allocs,
            "num_device_free": self.segments.device_frees,
            "num_oom_rejections": self.blocks.rejections,
        }
        return dict(sorted(flat.items()))

    def snapshot(self) -> list[dict[str, Any]]:
        """Return the segments as `torch.cuda.memory._snapshot()["segments"]` does, by address, sizes in bytes."""
        return [self._segment(blocks) for blocks in self.segments.contiguous_blocks()]

    def _segment(self, blocks: list[Block]) -> dict[str, Any]:
        free_set, pending = blocks[0].free_set, self.segments.pending
        states = {
            block: "inactive" if block.free else "active_pending_free" if block in pending else "active_allocated"
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

    def _out_of_memory(self, size: int, stream: int) -> OutOfMemory:
        total, limit = self.segments.total, self.segments.limit
        rounded = self.settings.round_size(size)
        if self.blocks.rejected:
            return OutOfMemory(
                "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
                f"per_process_memory_fraction limit. Requested size: {format_size(size)}",
                rounded,
            )
        self.ooms += 1
        if self.segments.on_event is not None:
            self.segments.on_event(Action.OOM, -1, rounded, stream)
        free_in_private = sum(
            block.size for pool in self.segments.pools() if pool.private is not None for block in pool.free_blocks()
        )
        allocated = self.allocated + free_in_private
        private = ""
        if free_in_private:
            private = f"with {format_size(free_in_private)} allocated in private pools (e.g., CUDA Graphs), "
        allowed = f"{format_size(limit)} allowed; " if limit is not None else ""
        page = "docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
        if version_of(self.segments.release) < (2, 11):
            page = "pytorch.org/docs/stable/notes/cuda.html#environment-variables"
        return OutOfMemory(
            f"CUDA out of memory. Tried to allocate {format_size(self.settings.segment_size(rounded))}. "
            f"GPU {self.gpu_index} has a total capacity of {format_size(total)} "
            f"of which {format_size(self.free_memory)} is free. "
            f"Including non-PyTorch memory, this process has {format_size(total - self.free_memory)} memory "
            f"in use. {allowed}Of the allocated memory {format_size(allocated)} is allocated by PyTorch, {private}"
            f"and {format_size(self.reserved - allocated)} is reserved by PyTorch but unallocated. "
            "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
            f"to avoid fragmentation.  See documentation for Memory Management  (https://{page})",
            rounded,
        )
