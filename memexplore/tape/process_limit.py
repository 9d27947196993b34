"""The limit on what a process may reserve (`torch.cuda.set_per_process_memory_fraction`) in the metadata of a tape."""

from __future__ import annotations

from memexplore.tape import Meta


def limited(meta: Meta, limit: int | None) -> Meta:
    """Return metadata with another limit, and the capacity that follows from it; None for no limit.

    >>> from memexplore.tape import Source
    >>> meta = limited(Meta(Source.PREDICTED, "Tesla T4", capacity=14), 10)
    >>> meta.capacity, meta.capacity_without_limit
    (10, 14)
    >>> limited(meta, None).capacity, limited(meta, 16).capacity
    (14, 14)
    """
    device_capacity = meta.capacity if meta.capacity_without_limit is None else meta.capacity_without_limit
    if device_capacity is None or limit is None or limit >= device_capacity:
        return meta._replace(capacity=device_capacity, limit=limit, capacity_without_limit=None)
    return meta._replace(capacity=limit, limit=limit, capacity_without_limit=device_capacity)


def beside(meta: Meta, held: int) -> Meta:
    """Return metadata for a part of a process whose other tensors hold some bytes: these count within the limit too.

    >>> from memexplore.tape import Source
    >>> meta = beside(limited(Meta(Source.MEASURED, "Tesla T4", capacity=14), 10), 3)
    >>> meta.capacity, meta.limit, meta.capacity_without_limit
    (7, 7, 11)
    """
    without_limit = limited(meta, None)
    limit = None if meta.limit is None else max(meta.limit - held, 0)
    return limited(without_limit._replace(capacity=(without_limit.capacity or held) - held), limit)
