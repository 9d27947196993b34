"""Count what `torch.cuda.memory_stats()` reports (docs/allocator.md section 14)."""

from __future__ import annotations

from memexplore.allocator.actions import GROWTH
from memexplore.allocator.blocks import Block, FreeSet
from memexplore.tape import Action


class Stat:
    """One statistic: its current value, its peak and the sums of increases and decreases."""

    __slots__ = ("base", "before_mark", "before_reset", "current", "freed", "peak")

    def __init__(self) -> None:
        # `base` is the current value at the last reset_accumulated; the sum of increases follows from it.
        self.current = self.freed = self.base = 0
        # `peak` starts anew at a mark and at a reset; the others hold what each of the two must not forget.
        self.peak = self.before_mark = self.before_reset = 0

    def increase(self, amount: int) -> None:
        """Raise the current value, and the peak with it."""
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current

    def decrease(self, amount: int) -> None:
        """Lower the current value."""
        self.current -= amount
        self.freed += amount

    def change(self, amount: int) -> None:
        """Raise the current value by a positive amount, lower it by a negative one."""
        if amount > 0:
            self.increase(amount)
        elif amount < 0:
            self.decrease(-amount)

    @property
    def highest(self) -> int:
        """The highest value since the last `reset_peak`."""
        return max(self.before_mark, self.peak)

    @property
    def since_mark(self) -> int:
        """The highest value since the last `mark`, whatever was reset meanwhile."""
        return max(self.before_reset, self.peak)

    def reset_peak(self) -> None:
        """Set the peak to the current value."""
        self.before_reset = self.since_mark
        self.before_mark, self.peak = 0, self.current

    def mark(self) -> None:
        """Begin a period whose own peak is `since_mark`; `highest` stays.

        >>> stat = Stat()
        >>> stat.increase(10), stat.decrease(4), stat.mark(), stat.increase(1)
        (None, None, None, None)
        >>> stat.highest, stat.since_mark
        (10, 7)
        """
        self.before_mark, self.before_reset = self.highest, 0
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Start the sums of increases and decreases from zero."""
        self.base, self.freed = self.current, 0

    def values(self) -> dict[str, int]:
        """Return the four values under PyTorch's names."""
        allocated = self.current + self.freed - self.base
        return {"current": self.current, "peak": self.highest, "allocated": allocated, "freed": self.freed}


class PoolStats:
    """The statistics of the small pools, of the large pools or of all."""

    __slots__ = (
        "active", "active_bytes", "allocated_bytes", "allocation", "inactive_split", "inactive_split_bytes",
        "pending", "pending_bytes", "requested_bytes", "reserved_bytes", "segment",
    )  # fmt: skip

    def __init__(self) -> None:
        self.allocation, self.allocated_bytes, self.requested_bytes = Stat(), Stat(), Stat()
        self.segment, self.reserved_bytes = Stat(), Stat()
        self.inactive_split, self.inactive_split_bytes = Stat(), Stat()
        # Active is allocated plus pending. Its own Stat holds only the peak while some block was pending.
        self.pending, self.pending_bytes, self.active, self.active_bytes = Stat(), Stat(), Stat(), Stat()

    def update_active_peaks(self) -> None:
        """Raise the peaks of the active statistics to their present values."""
        self.active.peak = max(self.active.peak, self.allocation.current + self.pending.current)
        self.active_bytes.peak = max(self.active_bytes.peak, self.allocated_bytes.current + self.pending_bytes.current)

    def reset_peaks(self) -> None:
        """Set every peak to the current value."""
        self.active.peak = self.active_bytes.peak = 0
        for name in _WITH_OWN_PEAK:
            getattr(self, name).reset_peak()
        self.update_active_peaks()

    def reset_accumulated(self) -> None:
        """Start the sums of increases and decreases from zero."""
        for name in self.__slots__:
            getattr(self, name).reset_accumulated()

    def values(self) -> dict[str, dict[str, int]]:
        """Return the values of every statistic under PyTorch's names."""
        values = {}
        for name, stat, pending in (
            ("allocation", self.allocation, None),
            ("segment", self.segment, None),
            ("active", self.allocation, self.pending),
            ("inactive_split", self.inactive_split, None),
            ("allocated_bytes", self.allocated_bytes, None),
            ("reserved_bytes", self.reserved_bytes, None),
            ("active_bytes", self.allocated_bytes, self.pending_bytes),
            ("inactive_split_bytes", self.inactive_split_bytes, None),
            ("requested_bytes", self.requested_bytes, None),
        ):
            values[name] = stat.values()
            if pending is not None:
                values[name]["current"] += pending.current
                values[name]["peak"] = max(stat.highest, getattr(self, name).peak)
                values[name]["freed"] += pending.base - pending.current
        return values


_WITH_OWN_PEAK = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "segment",
    "reserved_bytes",
    "inactive_split",
    "inactive_split_bytes",
)


class Statistics:
    """The statistics of one allocator by pool, which count requests, frees, splits and segments."""

    def __init__(self, max_split_size: int) -> None:
        self.max_split_size = max_split_size
        self.all = PoolStats()
        self.by_kind = {"small": PoolStats(), "large": PoolStats()}
        """By the kind of the pool."""
        self._oversize_allocations, self._oversize_segments = Stat(), Stat()
        self._private_reserved: dict[tuple[int, int], dict[str, Stat]] = {}
        self.was_split = False
        """Whether a block was split since this was set to False, which each request does."""

    def allocated(self, block: Block, requested: int) -> None:
        """Count a block that a request got."""
        size = block.size
        of_pool = self.by_kind[block.free_set.pool.kind]
        if not self.was_split and block.expandable is None and (block.previous is not None or block.next is not None):
            for stats in (self.all, of_pool):
                stats.inactive_split.decrease(1)
                stats.inactive_split_bytes.decrease(size)
        # Stat.increase is written out: every tensor of a simulated training step passes here.
        for stats in (self.all, of_pool):
            stat = stats.allocation
            stat.current += 1
            if stat.current > stat.peak:
                stat.peak = stat.current
            stat = stats.allocated_bytes
            stat.current += size
            if stat.current > stat.peak:
                stat.peak = stat.current
            stat = stats.requested_bytes
            stat.current += requested
            if stat.current > stat.peak:
                stat.peak = stat.current
        if self.all.pending.current:
            self.all.update_active_peaks()
            of_pool.update_active_peaks()
        if size >= self.max_split_size:
            self._oversize_allocations.increase(1)

    def freed(self, block: Block) -> None:
        """Count a block whose free was requested; it is pending while other streams use it."""
        size = block.size
        for stats in (self.all, self.by_kind[block.free_set.pool.kind]):
            stat = stats.allocation
            stat.current -= 1
            stat.freed += 1
            stat = stats.allocated_bytes
            stat.current -= size
            stat.freed += size
            if block.other_streams:
                stats.pending.increase(1)
                stats.pending_bytes.increase(size)
        if size >= self.max_split_size:
            self._oversize_allocations.decrease(1)

    def pending_ended(self, block: Block) -> None:
        """Count a pending block whose streams have finished."""
        for stats in (self.all, self.by_kind[block.free_set.pool.kind]):
            stats.pending.decrease(1)
            stats.pending_bytes.decrease(block.size)

    def free_completes(self, block: Block) -> None:
        """Count a block that is about to be free, before it is merged with the free blocks beside it."""
        requested = block.requested
        pools = self.all, self.by_kind[block.free_set.pool.kind]
        for stats in pools:
            stat = stats.requested_bytes
            stat.current -= requested
            stat.freed += requested
        if block.expandable is not None:
            return
        merged, size, fills_segment = _free_beside(block)
        for stats in pools:
            if fills_segment:  # which is no split any more
                stats.inactive_split.decrease(merged)
                stats.inactive_split_bytes.decrease(size)
            else:
                if merged != 1:
                    stats.inactive_split.change(1 - merged)
                stats.inactive_split_bytes.increase(block.size)

    def split(self, front: Block, rest: Block) -> None:
        """Count a block that was split in two, of which `rest` is inactive."""
        self.was_split = True
        if front.expandable is not None:
            return
        was_split_before = front.previous is not None or rest.next is not None
        for stats in (self.all, self.by_kind[front.free_set.pool.kind]):
            if was_split_before:
                stats.inactive_split_bytes.decrease(front.size)
            else:
                stats.inactive_split.increase(1)
                stats.inactive_split_bytes.increase(rest.size)

    def segment_changed(self, action: Action, size: int, free_set: FreeSet) -> None:
        """Count memory that the device gave or took back."""
        of_pool = self.by_kind[free_set.pool.kind]
        reserved = [self.all.reserved_bytes, of_pool.reserved_bytes]
        if free_set.pool.private is not None:
            names = ("all", "large_pool", "small_pool")
            private = self._private_reserved.setdefault(free_set.pool.identity, {name: Stat() for name in names})
            reserved += [private["all"], private[f"{free_set.pool.kind}_pool"]]
        sign = 1 if action in GROWTH else -1
        for stat in reserved:
            stat.change(sign * size)
        if action in (Action.SEGMENT_ALLOC, Action.SEGMENT_FREE):
            self.all.segment.change(sign)
            of_pool.segment.change(sign)
            if size >= self.max_split_size:
                self._oversize_segments.change(sign)

    def reset_peaks(self) -> None:
        """Set every peak to the current value."""
        for stats in self._pools().values():
            stats.reset_peaks()
        for stat in self._further():
            stat.reset_peak()

    def reset_accumulated(self) -> None:
        """Start the sums of increases and decreases from zero."""
        for stats in self._pools().values():
            stats.reset_accumulated()
        for stat in self._further():
            stat.reset_accumulated()

    def values(self) -> dict[str, int]:
        """Return the values under the names of `torch.cuda.memory_stats()`, sizes in bytes."""
        flat: dict[str, int] = {}
        for pool, stats in self._pools().items():
            for name, values in stats.values().items():
                flat |= {f"{name}.{pool}.{key}": value for key, value in values.items()}
        oversize = {"oversize_allocations": self._oversize_allocations, "oversize_segments": self._oversize_segments}
        for name, stat in oversize.items():
            flat |= {f"{name}.{key}": value for key, value in stat.values().items()}
        for identity, private in self._private_reserved.items():
            prefix = f"reserved_bytes_by_private_pools.{identity[0]}_{identity[1]}"
            for pool, stat in private.items():
                flat |= {f"{prefix}.{pool}.{key}": value for key, value in stat.values().items()}
        return flat

    def _pools(self) -> dict[str, PoolStats]:
        return {"all": self.all, "large_pool": self.by_kind["large"], "small_pool": self.by_kind["small"]}

    def _further(self) -> list[Stat]:
        private = [stat for stats in self._private_reserved.values() for stat in stats.values()]
        return [self._oversize_allocations, self._oversize_segments, *private]


def _free_beside(block: Block) -> tuple[int, int, bool]:
    """Return number and bytes of the free blocks beside a block, and whether they and it are a whole segment."""
    previous, following = block.previous, block.next
    count = size = 0
    fill_segment = True
    if previous is not None:
        if previous.free:
            count, size, fill_segment = 1, previous.size, previous.previous is None
        else:
            fill_segment = False
    if following is not None:
        if following.free:
            count += 1
            size += following.size
            fill_segment = fill_segment and following.next is None
        else:
            fill_segment = False
    return count, size, fill_segment
