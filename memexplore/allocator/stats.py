"""Counters of `torch.cuda.memory_stats()` (docs/allocator.md section 14)."""

from __future__ import annotations


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
