"""Parts of a GPU that NVIDIA's Multi-Instance GPU (MIG) makes: memory and multiprocessors of each profile.

A profile such as ``3g.20gb`` has its compute slices and the size of its memory in its name. What a driver gives it is
less than that share of the GPU (`1g.18gb` of an H200 has 16 GiB, not an eighth of 140), so these are readings.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Slice(NamedTuple):
    """Part of a GPU."""

    gib: float
    """Of memory, as torch and the driver report it."""
    multiprocessors: int
    memory_share: float
    """Of the memory slices, and so of the bandwidth of the GPU."""


SOURCE = "GPU instance profiles as `nvidia-smi mig -lgip` prints them; 71gb of the H200: total_memory in a log of torch"

_EIGHTH, _QUARTER, _HALF = 1 / 8, 1 / 4, 1 / 2

_A100_40GB = {
    "1g.5gb": Slice(4.75, 14, _EIGHTH),
    "1g.10gb": Slice(9.75, 14, _QUARTER),
    "2g.10gb": Slice(9.75, 28, _QUARTER),
    "3g.20gb": Slice(19.625, 42, _HALF),
    "4g.20gb": Slice(19.625, 56, _HALF),
}
_A100_80GB = {
    "1g.10gb": Slice(9.5, 14, _EIGHTH),
    "1g.20gb": Slice(19.5, 14, _QUARTER),
    "2g.20gb": Slice(19.5, 28, _QUARTER),
    "3g.40gb": Slice(39.25, 42, _HALF),
    "4g.40gb": Slice(39.25, 56, _HALF),
}
_H100_PCIE = {
    "1g.10gb": Slice(9.75, 14, _EIGHTH),
    "1g.20gb": Slice(19.625, 14, _QUARTER),
    "2g.20gb": Slice(19.625, 30, _QUARTER),
    "3g.40gb": Slice(39.5, 46, _HALF),
    "4g.40gb": Slice(39.5, 62, _HALF),
}
_H100_SXM = {
    "1g.10gb": Slice(9.75, 16, _EIGHTH),
    "1g.20gb": Slice(19.625, 26, _QUARTER),
    "2g.20gb": Slice(19.625, 32, _QUARTER),
    "3g.40gb": Slice(39.5, 60, _HALF),
    "4g.40gb": Slice(39.5, 64, _HALF),
}
_H100_NVL = {
    "1g.12gb": Slice(10.75, 16, _EIGHTH),
    "1g.24gb": Slice(21.625, 26, _QUARTER),
    "2g.24gb": Slice(21.625, 32, _QUARTER),
    "3g.47gb": Slice(46.375, 60, _HALF),
    "4g.47gb": Slice(46.375, 64, _HALF),
}
_H200 = {
    "1g.18gb": Slice(16, 16, _EIGHTH),
    "2g.35gb": Slice(32.5, 32, _QUARTER),
    "3g.71gb": Slice(69.75, 60, _HALF),
    "4g.71gb": Slice(69.75, 64, _HALF),
}

PROFILES: dict[str, dict[str, Slice]] = {
    "A100 40GB": _A100_40GB,
    "A100 80GB": _A100_80GB,
    "A100 PCIe 80GB": _A100_80GB,
    "H100 PCIe": _H100_PCIE,
    "H100 SXM": _H100_SXM,
    "H100 NVL": _H100_NVL,
    "H200": _H200,
}
"""Profiles by key of the catalogue entry; those with all slices are the GPU itself."""

_TEXT = re.compile(r"(?P<gpu>.+?)[\s_-]+(?:mig[\s_-]*)?(?P<profile>\d+g\.\d+gb)(\+\w+)?", re.IGNORECASE)


def parts_of(text: str) -> tuple[str, str] | None:
    """Return the GPU and the profile that a text names, None for a text without a profile.

    >>> parts_of("A100 40GB MIG 1g.5gb"), parts_of("NVIDIA H100 PCIe MIG 1g.10gb+me"), parts_of("A100 40GB")
    (('A100 40GB', '1g.5gb'), ('NVIDIA H100 PCIe', '1g.10gb'), None)
    """
    match = _TEXT.fullmatch(text.strip())
    return (match["gpu"], match["profile"].lower()) if match else None


def slice_of(key: str, profile: str) -> Slice:
    """Return the slice of a profile of a catalogue entry.

    Raises ValueError for a GPU whose profiles are not known, and for a profile that it does not have.
    """
    profiles = PROFILES.get(key)
    if profiles is None:
        raise ValueError(f"the MIG profiles of {key} are not known: name the size of the memory instead, such as 10GiB")
    if profile not in profiles:
        raise ValueError(f"{key} has no MIG profile {profile}: its profiles are {', '.join(profiles)}")
    return profiles[profile]
