"""The statistics of `torch.cuda.memory_stats()`."""

from __future__ import annotations


class Stat:
    """One statistic of `torch.cuda.memory_stats()`: its current value, its peak and what was added and taken."""

    __slots__ = ("base", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.freed = self.base = 0

    def add(self, amount: int) -> None:
        """Raise the current value."""
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current

    def take(self, amount: int) -> None:
        """Lower the current value."""
        self.current -= amount
        self.freed += amount

    def change(self, amount: int) -> None:
        """Raise or lower the current value."""
        if amount > 0:
            self.add(amount)
        elif amount < 0:
            self.take(-amount)

    def reset_accumulated(self) -> None:
        """Let what was added and taken start from zero."""
        self.base, self.freed = self.current, 0

    def values(self) -> dict[str, int]:
        """The four values under PyTorch's names."""
        allocated = self.current + self.freed - self.base
        return {"current": self.current, "peak": self.peak, "allocated": allocated, "freed": self.freed}


class Group:
    """The statistics of the small pool, the large pool or both."""

    __slots__ = (
        "active", "active_bytes", "allocated_bytes", "allocation", "inactive_split", "inactive_split_bytes",
        "requested_bytes", "reserved_bytes", "segment", "waiting", "waiting_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.allocation, self.allocated_bytes, self.requested_bytes = Stat(), Stat(), Stat()
        self.segment, self.reserved_bytes = Stat(), Stat()
        self.inactive_split, self.inactive_split_bytes = Stat(), Stat()
        # Active is allocated and waiting together. Its own Stat holds only the peak it had while some block waited.
        self.waiting, self.waiting_bytes, self.active, self.active_bytes = Stat(), Stat(), Stat(), Stat()

    def note_active(self) -> None:
        """Keep the peak of active while blocks wait."""
        self.active.peak = max(self.active.peak, self.allocation.current + self.waiting.current)
        self.active_bytes.peak = max(self.active_bytes.peak, self.allocated_bytes.current + self.waiting_bytes.current)

    def reset_peaks(self) -> None:
        """Let every peak start from the current value."""
        self.active.peak = self.active_bytes.peak = 0
        for name in ("allocation", "allocated_bytes", "requested_bytes", *_RARE):
            stat = getattr(self, name)
            stat.peak = stat.current
        self.note_active()

    def reset_accumulated(self) -> None:
        """Let what was added and taken start from zero."""
        for name in self.__slots__:
            getattr(self, name).reset_accumulated()

    def values(self) -> dict[str, dict[str, int]]:
        """Every statistic under PyTorch's name."""
        values = {}
        for name, held, waiting in (
            ("allocation", self.allocation, None),
            ("segment", self.segment, None),
            ("active", self.allocation, self.waiting),
            ("inactive_split", self.inactive_split, None),
            ("allocated_bytes", self.allocated_bytes, None),
            ("reserved_bytes", self.reserved_bytes, None),
            ("active_bytes", self.allocated_bytes, self.waiting_bytes),
            ("inactive_split_bytes", self.inactive_split_bytes, None),
            ("requested_bytes", self.requested_bytes, None),
        ):
            values[name] = held.values()
            if waiting is not None:
                values[name]["current"] += waiting.current
                values[name]["peak"] = max(held.peak, getattr(self, name).peak)
                values[name]["freed"] += waiting.base - waiting.current
        return values


_RARE = ("segment", "reserved_bytes", "inactive_split", "inactive_split_bytes")
