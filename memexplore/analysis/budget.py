"""Say what a run needs and what there is: "needs 3.00 GiB · T4 has 2.00 GiB · 1.00 GiB over"."""

from __future__ import annotations

from memexplore.hardware import catalogue
from memexplore.hardware.catalogue import Gpu
from memexplore.tape import Meta, Source
from memexplore.text.units import parse_size, size_text

_FRACTION = "per_process_memory_fraction"


def budget(needed: int, capacity: int, owner: str, *, more: str = "", rest: str = "") -> str:
    """Return a sentence on the bytes that a run needs, the capacity, and the difference.

    `owner` is subject and verb of the capacity, such as "T4 has". `more` is put before the needed bytes, such as "more
    than ". `rest` replaces the difference.

    >>> budget(3 << 30, 2 << 30, "T4 has", more="more than "), budget(326 << 20, 1 << 30, "T4 has")
    ('needs more than 3.00 GiB · T4 has 2.00 GiB · 1.00 GiB over', 'needs 326 MiB · T4 has 1.00 GiB · 698 MiB to spare')
    """
    rest = rest or f"{size_text(abs(capacity - needed))} {'over' if needed > capacity else 'to spare'}"
    return f"needs {more}{size_text(needed)} · {owner} {size_text(capacity)} · {rest}"


def least_capacity(meta: Meta) -> int | None:
    """Return the capacity of a tape if as much lies outside the allocator as is known to be possible; None without one.

    It is less than the capacity only where the device has that of a GPU of the catalogue.

    >>> gpu = catalogue.find("T4")
    >>> meta = Meta(Source.PREDICTED, gpu.name, gpu="T4", capacity=gpu.capacity, total=gpu.total)
    >>> least_capacity(meta) == gpu.total - gpu.outside_range[1], least_capacity(meta._replace(capacity=1 << 30))
    (True, 1073741824)
    """
    if meta.source is not Source.PREDICTED or meta.gpu is None:
        return meta.capacity
    try:
        gpu = catalogue.find(meta.gpu).under(meta.versions)
    except ValueError:  # the GPU of this machine, with what is free of it
        return meta.capacity
    of_device = meta.capacity if meta.capacity_without_limit is None else meta.capacity_without_limit
    if meta.capacity is None or of_device != gpu.capacity:
        return meta.capacity
    return min(meta.capacity, gpu.total - gpu.outside_range[1])


def owner(meta: Meta) -> str:
    """Return subject and verb for the capacity of a tape: the device has it, or a limit lets the process use it.

    >>> from memexplore.tape.process_limit import limited
    >>> from memexplore.tape import Source
    >>> meta = Meta(Source.PREDICTED, "Tesla T4", gpu="T4", capacity=14 << 30)
    >>> owner(meta), owner(limited(meta, 10 << 30))
    ('T4 has', 'this process may use')
    """
    return (
        "this process may use"
        if meta.capacity_without_limit is not None
        else f"{short_name(meta.gpu or meta.device)} has"
    )


def owner_of(gpu: Gpu) -> str:
    """Return subject and verb for the capacity of a GPU.

    >>> from memexplore.hardware.catalogue import find
    >>> owner_of(find("T4"))
    'T4 has'
    """
    return "this process may use" if gpu.limit == gpu.capacity else f"{short_name(gpu.key)} has"


def limit_text(meta: Meta) -> str:
    """Return the limit on the memory of a process as text, with what sets it; empty without a limit.

    >>> from memexplore.tape.process_limit import limited
    >>> from memexplore.tape import Source
    >>> meta = Meta(Source.PREDICTED, "Tesla T4", capacity=14 << 30, total=15 << 30)
    >>> limit_text(limited(meta, 10 << 30))
    'this process may use 10.0 GiB of 15.0 GiB: torch.cuda.set_per_process_memory_fraction'
    """
    if meta.capacity is None or meta.capacity_without_limit is None:
        return ""
    unlimited = meta.total or meta.capacity_without_limit
    share = f"{size_text(meta.capacity)} of {size_text(unlimited)}"
    return f"this process may use {share}: {limit_setter(meta)}"


def limit_setter(meta: Meta) -> str:
    """Return what sets the limit of a tape: the allocator settings, or the function of torch.

    >>> from memexplore.tape import Source
    >>> limit_setter(Meta(Source.PREDICTED, "Tesla T4", settings="per_process_memory_fraction:0.5"))
    'per_process_memory_fraction of PYTORCH_CUDA_ALLOC_CONF'
    """
    return f"{_FRACTION} of PYTORCH_CUDA_ALLOC_CONF" if is_limited_by_settings(meta) else f"torch.cuda.set_{_FRACTION}"


def is_limited_by_settings(meta: Meta) -> bool:
    """Return whether the allocator settings of a tape name a limit; they may be settings that are not modelled.

    >>> from memexplore.tape import Source
    >>> is_limited_by_settings(Meta(Source.MEASURED, "Tesla T4", settings="backend:cudaMallocAsync"))
    False
    """
    return _FRACTION in meta.settings


def short_name(name: str) -> str:
    """Return the name of a device for a sentence.

    >>> short_name("T4"), short_name("24.0 GiB")
    ('T4', 'the GPU')
    """
    try:
        parse_size(name)
    except ValueError:
        return name
    return "the GPU"  # its name is its size
