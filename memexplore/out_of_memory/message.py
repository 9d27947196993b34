"""Read the sizes in PyTorch's text of an out-of-memory error."""

from __future__ import annotations

import re
from typing import NamedTuple

from memexplore.text.units import parse_size

_SIZE = r"(?P<size>\d+(?:\.\d+)? (?:[KMGTPE]iB|bytes))"
_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_TOTAL = re.compile(rf"total capacity of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch")
_DEVICE = re.compile(r"GPU (\d+) has a total capacity")
_OTHERS = re.compile(rf"Process (?P<process>\d+) has {_SIZE} memory in use")


class Message(NamedTuple):
    """Sizes of an error text in bytes, rounded as the text rounds them; None for a size that it does not name."""

    requested: int | None
    free: int | None
    """Bytes that the device had free."""
    total: int | None
    allocated: int | None
    device: int | None = None
    """Number of the GPU."""
    others: tuple[tuple[int, int], ...] = ()
    """Number and bytes of each other process on the device."""


def parse(text: str) -> Message:
    """Return the sizes of an error text.

    Source of the text: c10/cuda/CUDACachingAllocator.cpp.

    >>> found = parse("Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56 GiB of which 1.50 "
    ...               " GiB is free. Process 812 has 9.00 GiB memory in use. Including non-PyTorch memory, ...")
    >>> found.requested == 2 * 1024**3, found.others == ((812, 9 * 1024**3),)
    (True, True)
    """
    others = tuple((int(match["process"]), _bytes(match["size"])) for match in _OTHERS.finditer(text))
    requested, free, total, allocated = (_first(pattern, text) for pattern in (_TRIED, _FREE, _TOTAL, _ALLOCATED))
    gpu = _DEVICE.search(text)
    return Message(requested, free, total, allocated, int(gpu[1]) if gpu is not None else None, others)


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return _bytes(match["size"]) if match is not None else None


def _bytes(text: str) -> int:
    return parse_size(text.replace("bytes", "B"))
