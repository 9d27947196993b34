"""Settings and constants of PyTorch's caching allocator, and the sizes of blocks and segments that follow from them."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Mapping
from typing import Any

from memexplore.text.untrusted import shown

MIB = 1024**2
BLOCK = 512
"""Bytes: the unit to which requests are rounded."""
SMALL = MIB
"""Rounded requests up to this many bytes use the small pool."""
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_REQUEST = 10 * MIB
"""From this many bytes on a request gets a segment of its own size, rounded up to `SMALL_SEGMENT`."""
UNLIMITED = 1 << 62
INTERVALS = 16
"""Intervals of `roundup_power2_divisions`: [1 MiB, 2 MiB) up to [32 GiB, ...)."""

_WITHOUT_EFFECT = re.compile(
    r"pinned_\w+|release_lock_on_(cuda|hip)malloc|expandable_segments_reserve(_by_class)?"
    r"|graph_capture_record_stream_reuse"
)


class Order(enum.Enum):
    """Which of several free blocks of equal size is handed out first (docs/allocator.md section 5)."""

    ADDRESS = "address"
    """The lowest address: torch up to 2.11."""
    SEGMENT = "segment"
    """The block of the oldest segment, the lowest address in it: torch 2.13 and later."""
    CREATION = "creation"
    """The block that was created first: torch 2.12; the wheel of 2.12.1 has `BlockComparatorRegistrationCounter`."""


def order_of(release: str) -> Order:
    """Return the order of free blocks in a torch release.

    >>> [order_of(release).value for release in ("2.11.0+cu128", "2.12.1", "2.13")]
    ['address', 'creation', 'segment']
    """
    version = version_of(release)
    if version < (2, 12):
        return Order.ADDRESS
    return Order.CREATION if version < (2, 13) else Order.SEGMENT


def version_of(release: str) -> tuple[int, int]:
    """Return major and minor number of a torch release; raises ValueError for other text.

    >>> version_of("2.13.0+cpu")
    (2, 13)
    """
    match = re.match(r"(\d+)\.(\d+)", release)
    if match is None:
        raise ValueError(f"{release!r} is not a torch release; write it as in 2.13")
    return int(match[1]), int(match[2])


@dataclasses.dataclass(frozen=True)
class Settings:
    """Allocator settings as PyTorch names them, sizes in bytes; the defaults are PyTorch's own.

    >>> Settings.parse("expandable_segments:True,max_split_size_mb:64").max_split_size == 64 * 1024**2
    True
    >>> str(Settings.parse("expandable_segments:True , max_split_size_mb:64"))
    'max_split_size_mb:64,expandable_segments:True'
    >>> str(Settings())
    ''
    """

    max_split_size: int = UNLIMITED
    max_non_split_rounding: int = LARGE_SEGMENT
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    """The segment for a request above 1 MiB and below 10 MiB."""
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False

    def __post_init__(self) -> None:
        if self.large_segment_size < LARGE_SEGMENT:
            raise ValueError("large_segment_size_mb must be at least 20")
        # PyTorch checks these options only if they are given.
        rounding = self.max_non_split_rounding
        if self.max_split_size < self.large_segment_size or LARGE_SEGMENT != rounding < self.large_segment_size:
            raise ValueError("max_split_size_mb and max_non_split_rounding_mb must be at least large_segment_size_mb")
        if len(self.roundup_power2_divisions) != INTERVALS:
            raise ValueError(f"roundup_power2_divisions needs {INTERVALS} entries, one for each interval")
        if any(division & (division - 1) for division in self.roundup_power2_divisions):
            raise ValueError("roundup_power2_divisions must be powers of two, or 0 for none")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ValueError("garbage_collection_threshold must lie between 0 and 1")
        if not 0 <= self.per_process_memory_fraction <= 1:
            raise ValueError("per_process_memory_fraction must lie between 0 and 1")

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Parse a `PYTORCH_CUDA_ALLOC_CONF` string; options of pinned host memory are accepted and have no effect.

        >>> Settings.parse("roundup_power2_divisions:[256:1,512:2,>:8]").roundup_power2_divisions[8:12]
        (1, 2, 8, 8)

        Raises ValueError for a string that PyTorch refuses, and for another backend than `native`.
        """
        values: dict[str, object] = {}
        # A bracket inside brackets ends the search: otherwise a[a[a[ takes quadratic time.
        for option in re.findall(r"[^,\[]+(?:\[[^\[\]]*\])?", text.replace(" ", "")):
            name, colon, value = option.partition(":")
            if not colon or not value:
                raise ValueError(f"{shown(option)} is not an allocator setting; write NAME:VALUE, such as {_EXAMPLE}")
            if name == "backend":
                if value != "native":
                    raise ValueError(f"only the native allocator is modelled, not backend {shown(value)}")
            elif name in _READERS:
                field, read = _READERS[name]
                values[field] = read(name, value)
            elif not _WITHOUT_EFFECT.fullmatch(name):
                raise ValueError(f"{shown(name)} is not an allocator setting; write one of {', '.join(_READERS)}")
        return cls(**values)  # type: ignore[arg-type]

    def changed_by(self, text: str) -> Settings:
        """Return what these settings are after PyTorch reads another string; raises as `parse`.

        A string sets three options to their defaults that it does not name, and leaves all others as they are:
        `AcceleratorAllocatorConfig::parseArgs` in c10/core/AllocatorConfig.cpp.

        >>> str(Settings.parse("expandable_segments:True,max_split_size_mb:64").changed_by("large_segment_size_mb:40"))
        'expandable_segments:True,large_segment_size_mb:40'
        """
        return Settings.parse(",".join(filter(None, (str(dataclasses.replace(self, **_RESET)), text))))

    def limit(self, total: int) -> int | None:
        """Return the bytes that a process may reserve on a device of `total` bytes, None without a limit.

        >>> Settings.parse("per_process_memory_fraction:0.25").limit(4096), Settings().limit(4096)
        (1024, None)
        """
        return int(self.per_process_memory_fraction * total) if self.per_process_memory_fraction < 1 else None

    def __str__(self) -> str:
        default = Settings()
        parts = []
        for name, (field, _) in _READERS.items():
            value = getattr(self, field)
            if value == getattr(default, field):
                continue
            if name == "roundup_power2_divisions":
                parts.append(f"{name}:[{','.join(f'{1 << index}:{count}' for index, count in enumerate(value))}]")
            else:
                parts.append(f"{name}:{value // MIB if name.endswith('_mb') else value}")
        return ",".join(parts)

    def round_size(self, size: int) -> int:
        """Return the bytes of the block that a request needs, without a remainder that is too small to split off.

        Source: `round_size` in CUDACachingAllocator.cpp (docs/allocator.md section 2).

        >>> Settings().round_size(513), Settings.parse("roundup_power2_divisions:2").round_size(1200)
        (1024, 1536)
        """
        if size < BLOCK:
            return BLOCK
        level = size.bit_length() - 1
        divisions = self.roundup_power2_divisions[min(max(level - 20, 0), INTERVALS - 1)]
        if divisions <= 1 or size <= BLOCK * divisions:
            return -(-size // BLOCK) * BLOCK
        width = (1 << level) // divisions
        return -(-size // width) * width

    def segment_size(self, size: int) -> int:
        """Return the bytes of the new segment for a rounded request that no free block can serve.

        >>> [Settings().segment_size(size) // MIB for size in (512, 3 * MIB, 11 * MIB)]
        [2, 20, 12]
        """
        if size <= SMALL:
            return SMALL_SEGMENT
        if size < LARGE_REQUEST:
            return self.large_segment_size
        return -(-size // SMALL_SEGMENT) * SMALL_SEGMENT


_DIGITS = re.compile(r"[0-9]{1,18}")
_EXAMPLE = "expandable_segments:True"


def _mebibytes(name: str, value: str) -> int:
    if value == "-1":
        return UNLIMITED
    if not _DIGITS.fullmatch(value):
        raise ValueError(f"{name} takes a whole number of MiB, not {shown(value)}")
    return min(int(value) * MIB, UNLIMITED)


def _fraction(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{name} takes a number between 0 and 1, not {shown(value)}") from None


def _boolean(name: str, value: str) -> bool:
    if value not in ("True", "False", "true", "false"):
        raise ValueError(f"{name} takes True or False, not {shown(value)}")
    return value in ("True", "true")


def _divisions(name: str, value: str) -> tuple[int, ...]:
    if _DIGITS.fullmatch(value) and int(value):
        return (int(value),) * INTERVALS
    table = [0] * INTERVALS
    last, first = 0, True
    for pair in value.strip("[]").split(","):
        key, _, count = pair.partition(":")
        if not _DIGITS.fullmatch(count) or not (key == ">" or _DIGITS.fullmatch(key)):
            raise ValueError(f"{name} takes a power of two or a list such as [256:1,512:2,>:4], not {shown(value)}")
        if key == ">":
            table[last + 1 :] = [int(count)] * (INTERVALS - last - 1)
            continue
        if int(key) & (int(key) - 1) or key == "0":
            raise ValueError(f"the intervals of {name} are powers of two in MiB, not {key}")
        last = min(int(key).bit_length() - 1, INTERVALS - 1)
        if first:
            table[:last] = [int(count)] * last
            first = False
        table[last] = int(count)
    return tuple(table)


_RESET: dict[str, Any] = {
    name: getattr(Settings(), name)
    for name in ("max_split_size", "roundup_power2_divisions", "garbage_collection_threshold")
}
"""Options that are back at their defaults with the next string that PyTorch reads."""
_READERS = {
    "max_split_size_mb": ("max_split_size", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mebibytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _fraction),
    "expandable_segments": ("expandable_segments", _boolean),
    "large_segment_size_mb": ("large_segment_size", _mebibytes),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom", _boolean),
}


SETTINGS_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that hold allocator settings; the first that is set counts, also where it is empty."""


def settings_of_environment(environment: Mapping[str, str | None] = os.environ) -> str:
    """Return the allocator settings that an environment has for the processes of torch, empty without any.

    >>> settings_of_environment({"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    'expandable_segments:True'
    """
    texts = (environment.get(name) for name in SETTINGS_VARIABLES)
    return next((text for text in texts if text is not None), "")
