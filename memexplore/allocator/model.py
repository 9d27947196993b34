"""The caching allocator as PyTorch code meets it: malloc and free, statistics, snapshots and the OOM message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memexplore.allocator.blocks import Block
from memexplore.allocator.placement import OnEvent, Placement
from memexplore.allocator.settings import UNLIMITED, Settings, version_of
from memexplore.allocator.stats import Group, Stat
from memexplore.tape import Action

_EXABYTE = 1 << 60


class OutOfMemory(MemoryError):  # noqa: N818  (torch's own class has Error in its name, this is the event)
    """The device has no memory for a request; the message has PyTorch's own wording, `size` is the rounded request."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


class Allocator(Placement):
    """One device's caching allocator, asked one request at a time; sizes and addresses in bytes.

    `capacity` is what it may reserve (total memory without what lies outside the allocator), `total` the device's
    memory as `get_device_properties` tells it, `release` the torch release whose rules hold. `on_event` is called
    with action, address, size and stream of each segment_alloc, segment_free, segment_map, segment_unmap and oom.

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
        choose_address: Callable[[int, int], int] | None = None,
        finished: Callable[[int], bool] | None = None,
    ) -> None:
        super().__init__(
            settings,
            capacity=capacity,
            total=total,
            release=release,
            on_event=on_event,
            choose_address=choose_address,
            finished=finished,
        )
        self.gpu_index = gpu_index
        self.ooms = 0
        self._all, self._small_group, self._large_group = Group(), Group(), Group()
        self._oversize_allocations, self._oversize_segments = Stat(), Stat()
        self._private_reserved: dict[tuple[int, int], dict[str, Stat]] = {}
        self._was_split = False

    def malloc(self, size: int, stream: int = 0) -> int:
        """The address of a block for a request of `size` bytes; 0 for a request of nothing.

        Raises OutOfMemory, ValueError for a negative size.
        """
        if not 0 < size < _EXABYTE:
            if size == 0:
                return 0
            if size < 0:
                raise ValueError(f"a request has a size of 0 or more bytes, not {size}")
            raise OutOfMemory("CUDA out of memory. Tried to allocate more than 1EB memory.", size)
        self._was_split = False
        block = self.take(size, stream)
        if block is None:
            raise self._out_of_memory(size, stream)
        self.live[block.address] = block
        held = block.size
        group = self._small_group if block.home.pool.kind == "small" else self._large_group
        if not self._was_split and block.range is None and (block.previous is not None or block.next is not None):
            self._all.inactive_split.take(1)
            self._all.inactive_split_bytes.take(held)
            group.inactive_split.take(1)
            group.inactive_split_bytes.take(held)
        # Written out because every tensor of a virtual training run passes here.
        for each in (self._all, group):
            stat = each.allocation
            stat.current += 1
            if stat.current > stat.peak:
                stat.peak = stat.current
            stat = each.allocated_bytes
            stat.current += held
            if stat.current > stat.peak:
                stat.peak = stat.current
            stat = each.requested_bytes
            stat.current += size
            if stat.current > stat.peak:
                stat.peak = stat.current
        if self.pending:
            self._all.note_active()
            group.note_active()
        if held >= self.settings.max_split_size:
            self._oversize_allocations.add(1)
        return block.address

    def free(self, address: int) -> None:
        """Give a block back; it is free at once, or when the streams of `record_stream` are done.

        Raises ValueError where no live block has this address.
        """
        if address == 0:
            return
        block = self.live.pop(address, None)
        if block is None:
            raise ValueError(f"invalid device pointer: {address:#x}")
        held = block.size
        group = self._small_group if block.home.pool.kind == "small" else self._large_group
        for each in (self._all, group):
            stat = each.allocation
            stat.current -= 1
            stat.freed += 1
            stat = each.allocated_bytes
            stat.current -= held
            stat.freed += held
        if held >= self.settings.max_split_size:
            self._oversize_allocations.take(1)
        if block.uses:
            for each in (self._all, group):
                each.waiting.add(1)
                each.waiting_bytes.add(held)
        self.give_back(block)

    def _happened(self, block: Block) -> None:
        for each in (self._all, self._small_group if block.home.pool.kind == "small" else self._large_group):
            each.waiting.take(1)
            each.waiting_bytes.take(block.size)
        super()._happened(block)

    def complete(self, block: Block) -> None:
        """End a free: the statistics that fall now, then the merge."""
        count = size = 0
        if block.range is None:
            previous, following = block.previous, block.next
            lonely = True
            if previous is not None:
                if previous.free:
                    count, size, lonely = -1, -previous.size, previous.previous is None
                else:
                    lonely = False
            if following is not None:
                if following.free:
                    count -= 1
                    size -= following.size
                    lonely = lonely and following.next is None
                else:
                    lonely = False
        requested = block.requested
        self.settle(block)
        group = self._small_group if block.home.pool.kind == "small" else self._large_group
        for each in (self._all, group):
            stat = each.requested_bytes
            stat.current -= requested
            stat.freed += requested
        if block.range is None:
            if not lonely:
                count += 1
                size += block.size
            for each in (self._all, group):
                each.inactive_split.change(count)
                each.inactive_split_bytes.change(size)

    def split(self, block: Block, size: int) -> Block:
        """The front of a block; inactive splits change."""
        self._was_split = True
        was_split = block.previous is not None or block.next is not None
        front = super().split(block, size)
        if block.range is None:
            for each in (self._all, self._small_group if block.home.pool.kind == "small" else self._large_group):
                if was_split:
                    each.inactive_split_bytes.take(size)
                else:
                    each.inactive_split.add(1)
                    each.inactive_split_bytes.add(block.size)
        return front

    def reserve(self, action: Action, address: int, size: int, home: Any) -> None:
        """Account for memory that the device gave or took back."""
        group = self._small_group if home.pool.kind == "small" else self._large_group
        stats = [self._all.reserved_bytes, group.reserved_bytes]
        if home.pool.private is not None:
            names = ("all", "large_pool", "small_pool")
            pool = self._private_reserved.setdefault(home.pool.identity, {name: Stat() for name in names})
            stats += [pool["all"], pool[f"{home.pool.kind}_pool"]]
        sign = 1 if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP) else -1
        for stat in stats:
            stat.change(sign * size)
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE):
            self._all.segment.change(sign)
            group.segment.change(sign)
            if size >= self.settings.max_split_size:
                self._oversize_segments.change(sign)
        super().reserve(action, address, size, home)

    def empty_cache(self) -> None:
        """Release every segment without a live block, after waiting for all streams."""
        self.release_cached()

    def block_size(self, address: int) -> int:
        """The bytes of the live block at an address."""
        return self.live[address].size

    @property
    def allocated(self) -> int:
        """Bytes of the blocks handed out."""
        return self._all.allocated_bytes.current

    @property
    def active(self) -> int:
        """Bytes of the blocks handed out and of those that wait for another stream."""
        return self._all.allocated_bytes.current + self._all.waiting_bytes.current

    @property
    def requested(self) -> int:
        """Bytes that the active blocks were asked for with."""
        return self._all.requested_bytes.current

    @property
    def peak_allocated(self) -> int:
        """The highest `allocated` since the last `reset_peak_stats`."""
        return self._all.allocated_bytes.peak

    @property
    def peak_active(self) -> int:
        """The highest `active` since the last `reset_peak_stats`."""
        return max(self._all.allocated_bytes.peak, self._all.active_bytes.peak)

    @property
    def peak_requested(self) -> int:
        """The highest `requested` since the last `reset_peak_stats`."""
        return self._all.requested_bytes.peak

    @property
    def peak_reserved(self) -> int:
        """The highest `reserved` since the last `reset_peak_stats`."""
        return self._all.reserved_bytes.peak

    @property
    def free_memory(self) -> int:
        """Bytes of the device that nobody holds, the first value of `torch.cuda.mem_get_info()`."""
        return max(self.capacity - self.reserved, 0)

    def reset_peak_stats(self) -> None:
        """Let every peak start from the current value."""
        for group in self._groups().values():
            group.reset_peaks()
        for stat in (self._oversize_allocations, self._oversize_segments, *self._private_stats()):
            stat.peak = stat.current

    def reset_accumulated_stats(self) -> None:
        """Let what was added and taken, and the counters, start from zero."""
        for group in self._groups().values():
            group.reset_accumulated()
        for stat in (self._oversize_allocations, self._oversize_segments, *self._private_stats()):
            stat.reset_accumulated()
        self.retries = self.ooms = self.synchronizations = self.device_allocs = self.device_frees = 0
        self.rejections = 0

    def stats(self) -> dict[str, int]:
        """The statistics under the names of `torch.cuda.memory_stats()`, sizes in bytes.

        >>> Allocator(capacity=None, total=None).stats()["allocated_bytes.all.current"]
        0
        """
        flat: dict[str, int] = {}
        for pool, group in self._groups().items():
            for name, values in group.values().items():
                flat |= {f"{name}.{pool}.{key}": value for key, value in values.items()}
        for name, stat in (
            ("oversize_allocations", self._oversize_allocations),
            ("oversize_segments", self._oversize_segments),
        ):
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
        """The segments in the form of `torch.cuda.memory._snapshot()["segments"]`, by address, sizes in bytes."""
        return [self._segment(blocks) for blocks in self.runs()]

    def _segment(self, blocks: list[Block]) -> dict[str, Any]:
        home = blocks[0].home
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
            "stream": home.stream,
            "segment_type": home.pool.kind,
            "segment_pool_id": home.pool.identity,
            "is_expandable": blocks[0].range is not None,
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

    def _groups(self) -> dict[str, Group]:
        return {"all": self._all, "large_pool": self._large_group, "small_pool": self._small_group}

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
        held_in_private = sum(
            block.size
            for private in self.private.values()
            for pool in (private.small, private.large)
            for home in pool.streams.values()
            for block in home.from_size(0)
        )
        allocated = self.allocated + held_in_private
        private = ""
        if held_in_private:
            private = f"with {format_size(held_in_private)} allocated in private pools (e.g., CUDA Graphs), "
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


def format_size(size: int) -> str:
    """A size as PyTorch's messages write it, which is not how memexplore's own do.

    >>> format_size(1024), format_size(3 * 1024**2), format_size(8 * 1024**3)
    ('1024 bytes', '3.00 MiB', '8.00 GiB')
    """
    if size <= 1024:
        return f"{size} bytes"
    for unit, bytes_of_unit in (("KiB", 1024), ("MiB", 1024**2)):
        if size <= 1024 * bytes_of_unit:
            return f"{size / bytes_of_unit:.2f} {unit}"
    return f"{size / 1024**3:.2f} GiB"
