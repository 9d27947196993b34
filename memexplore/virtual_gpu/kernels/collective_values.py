"""Follow known values through a collective, as if every rank had the values of this rank.

A sum over N ranks is N times the value of this rank. The values of what another rank alone knows become unknown
(values/known_values.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.values import known_values

LIMIT = 4 << 20
"""Bytes of the largest output with values in a group of several ranks."""
_SAME_OF_EQUAL = frozenset(("max", "min", "avg", "band", "bor"))
"""Reductions that of equal values give this value."""
_COMBINED: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda value, size: value * size,
    "product": lambda value, size: value**size,
}
"""Reductions that of equal values give another value, from one of them and the number of ranks."""
_KEPT = ("barrier", "send", "broadcast_")
"""Collectives after which every rank has what this rank had before."""


class Reduction:
    """The reduction of the call that runs: the op of C++ does not say which it is."""

    op = ""
    """Name of a reduction in lower case, such as ``max``; empty where it is not known."""


def follow(name: str, arguments: dict[str, Any], outputs: list[torch.Tensor]) -> None:
    """Set or forget the values of the outputs of the collective `name` with these arguments."""
    if name == "broadcast_" and known_values.total():
        _receive(arguments, outputs)
    if name in _KEPT or not known_values.total():
        return
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    size, rank = group.size(), group.rank()
    agrees = "reduce_op" not in arguments or size == 1 or Reduction.op in _SAME_OF_EQUAL
    if name in ("allreduce_", "allreduce_coalesced_", "reduce_"):
        if not agrees:
            _combine(outputs, size)
        return
    sources = _sources(name, arguments, size, rank) if agrees else None
    if sources is None or len(sources) != len(outputs):
        _forget(outputs)
        return
    values = [None if source is None else known_values.of(source) for source in sources]
    total = sum(output.numel() * output.element_size() for output in outputs)
    if any(value is None for value in values) or (size > 1 and total > LIMIT) or not _fill_storages(outputs):
        _forget(outputs)
        return
    assumption = next(filter(None, (known_values.assumption(source) for source in sources if source is not None)), None)
    for output, value in zip(outputs, values, strict=True):
        assert value is not None
        copies = output.numel() // value.numel() if value.numel() else 0
        known_values.put(output, value.reshape(-1).repeat(copies).reshape(output.shape))
        if assumption is not None:
            known_values.assume(output, assumption)


def _receive(arguments: dict[str, Any], tensors: list[torch.Tensor]) -> None:
    """Note that another rank sends the values of tensors, such as a number that it alone has read."""
    group, source = dist.ProcessGroup.unbox(arguments["process_group"]), arguments["root_rank"]
    if group.rank() == source:
        return
    sender = dist.get_global_rank(group, source)
    text = f"what rank {sender} has broadcast counted as what this rank had in the tensor before"
    for tensor in tensors:
        known_values.assume(tensor, known_values.Assumption(text, is_made_up=False))


def _combine(tensors: list[torch.Tensor], size: int) -> None:
    """Set the values of tensors to the reduction of `size` ranks with their values, or forget them."""
    combine = _COMBINED.get(Reduction.op)
    for tensor in tensors:
        value = known_values.of(tensor)
        if value is None:
            continue
        if combine is None or value.dtype is torch.bool:
            known_values.forget(tensor)
        else:
            known_values.put(tensor, combine(value, size).to(value.dtype))


def reduce_values(tensor: torch.Tensor, size: int) -> None:
    """Write the reduction of `size` ranks with the values of a tensor on the CPU into it."""
    combine = _COMBINED.get(Reduction.op)
    if combine is not None and tensor.dtype is not torch.bool:
        tensor.copy_(combine(tensor, size))


def _sources(name: str, arguments: dict[str, Any], size: int, rank: int) -> Sequence[torch.Tensor | None] | None:
    """Return for each output the tensor of this rank whose values it has, repeated to its size; None for others."""
    if name in ("allgather_", "gather_"):
        pairs = zip(arguments["output_tensors"], arguments["input_tensors"], strict=False)
        return [own for outputs, own in pairs for _ in outputs]
    if name == "_allgather_base_":
        return [arguments["input_tensor"]]
    if name == "reduce_scatter_":
        return [parts[rank] for parts in arguments["input_tensors"]]
    if name == "_reduce_scatter_base_":
        return [_part(arguments["input_tensor"], size, rank)]
    if name == "alltoall_base_" and not (arguments["output_split_sizes"] or arguments["input_split_sizes"]):
        return [_part(arguments["input"], size, rank)]
    if name == "alltoall_":
        own = arguments["input_tensors"][rank]
        return [own if output.shape == own.shape else None for output in arguments["output_tensors"]]
    if name == "scatter_" and arguments["input_tensors"]:
        return [parts[rank] for parts in arguments["input_tensors"]]
    return None


def _part(tensor: torch.Tensor, size: int, rank: int) -> torch.Tensor:
    """Return the part of a contiguous tensor that belongs to a rank."""
    count = tensor.numel() // size
    return tensor.as_strided((count,), (1,), int(tensor.storage_offset()) + rank * count)


def _fill_storages(tensors: list[torch.Tensor]) -> bool:
    """Return whether the tensors are known already, or together all of their storages."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        key = storage_key(untyped_storage(tensor))
        sizes[key] = sizes.get(key, 0) + tensor.numel() * tensor.element_size()
    return all(
        known_values.is_known(tensor) or sizes[storage_key(untyped_storage(tensor))] == untyped_storage(tensor).nbytes()
        for tensor in tensors
    )


def _forget(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        known_values.forget(tensor)
