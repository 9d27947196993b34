"""Count the bytes that a rank sends in a collective, by the ring algorithm.

Sources: NCCL tests, doc/PERFORMANCE.md (factors of bus bandwidth); Patarasuk and Yuan 2009. NCCL may choose a tree for
small messages, which sends about as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from memexplore.torch_internals.dispatch import schema_of
from memexplore.torch_internals.distributed import resolve_group


class Traffic(NamedTuple):
    """What one collective sends from this rank."""

    name: str
    """Of the op of c10d."""
    sent: int
    """Bytes."""
    ranks: tuple[int, ...]
    """Global numbers of the ranks that take part."""


def of(name: str, arguments: dict[str, Any], outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Traffic:
    """Return the traffic of the collective `name` with these arguments."""
    group = dist.ProcessGroup.unbox(arguments["process_group"])
    ranks = tuple(dist.get_process_group_ranks(group))
    return Traffic(name, ring_bytes(name, _bytes(outputs), _bytes(inputs), len(ranks)), ranks)


def is_functional(func: Any) -> bool:
    """Return whether an op is a functional collective, as DTensor uses them."""
    return getattr(func, "namespace", "") == "_c10d_functional" and any(
        argument.name == "group_name" for argument in schema_of(func).arguments
    )


def of_functional(func: Any, args: Any) -> Traffic:
    """Return the traffic of a functional collective."""
    schema = schema_of(func)
    arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    group = arguments["group_name"]
    ranks = tuple(dist.get_process_group_ranks(resolve_group(group) if isinstance(group, str) else group))
    tensors: Any = arguments.get("input", arguments.get("inputs"))
    inputs = _bytes([tensors] if isinstance(tensors, torch.Tensor) else tensors)
    name = schema.name.removeprefix("_c10d_functional::").replace("all_reduce", "allreduce_")
    name = name.replace("broadcast", "broadcast_")
    outputs = inputs * len(ranks) if "gather" in name else inputs
    return Traffic(name, ring_bytes(name, outputs, inputs, len(ranks)), ranks)


def ring_bytes(name: str, outputs: int, inputs: int, ranks: int) -> int:
    """Return the bytes that one of `ranks` ranks sends in a collective with outputs and inputs of a number of bytes.

    All-reduce passes each of the n parts around twice, all-gather and reduce-scatter once. Tensors that are output and
    input count as outputs.

    >>> ring_bytes("allreduce_", 800, 0, 8), ring_bytes("_allgather_base_", 800, 100, 8)
    (1400, 700)
    """
    if ranks == 1 or name in _SENDS_NOTHING:
        return 0
    if name in _PASSED_ON:
        return outputs or inputs
    if name.startswith("allreduce"):
        return 2 * outputs * (ranks - 1) // ranks
    total = outputs if "gather" in name else inputs
    return total * (ranks - 1) // ranks


_SENDS_NOTHING = ("barrier", "recv_", "recv_any_source_")
_PASSED_ON = ("broadcast_", "reduce_", "send")
"""Collectives whose tensor every rank but the last passes on."""


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
