"""Run collectives of Python objects: the requests of torch's own functions, and the object of this rank for every rank.

What one rank sends to another arrives where a command can run the other rank (messages.py), also what it sends to all,
where this rank has None in its place. Nothing else that another rank alone knows is received: a list keeps what this
rank has in it, and a note says so. Groups of real processes keep torch's own functions. Source: the functions of the
same names in torch/distributed/distributed_c10d.py.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from memexplore.torch_internals.distributed import c10d, device_of_objects, object_to_tensor
from memexplore.virtual_gpu.distributed import messages
from memexplore.virtual_gpu.distributed.groups import is_ours
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.values import notes

_UNKNOWN = object()


class _Received:
    """What the next object of another rank is, where this rank can derive it."""

    obj: Any = _UNKNOWN


@contextlib.contextmanager
def received(obj: Any) -> Iterator[None]:
    """Make an object the one that this rank receives in the block, from `broadcast_object_list` and the others."""
    before, _Received.obj = _Received.obj, obj
    try:
        yield
    finally:
        _Received.obj = before


def patches() -> list[Patch]:
    """Return the patches of the collectives that read objects back from the GPU."""
    functions: tuple[Callable[..., Any], ...] = (_all_gather, _gather, _broadcast, _scatter, _receive)
    names = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "recv_object_list")
    send = _sending(dist.send_object_list)
    return [
        *(Replace(module, "send_object_list", send) for module in (dist, c10d)),
        *(
            Replace(module, name, _in_virtual_groups(getattr(dist, name), function))
            for name, function in zip(names, functions, strict=True)
            for module in (dist, c10d)
        ),
    ]


def _in_virtual_groups(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        positional = (value for value in args if isinstance(value, dist.ProcessGroup))
        group = kwargs.get("group") or next(positional, None)
        return function(*args, **kwargs) if is_ours(group) else original(*args, **kwargs)

    return call


def _sending(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `send_object_list`, which keeps the objects for the process of the rank that receives them."""

    @functools.wraps(original)
    def send_object_list(
        object_list: list[Any],
        dst: int | None = None,
        group: Any = None,
        device: Any = None,
        group_dst: int | None = None,
        use_batch: bool = False,
    ) -> None:
        original(object_list, dst, group, device, group_dst, use_batch)
        if is_ours(group):
            receiver = dst if dst is not None else _global_rank(group, group_dst or 0)
            messages.send(object_list, dist.get_rank(), receiver)

    return send_object_list


def _all_gather(object_list: list[Any], obj: Any, group: Any = None) -> None:
    # torch keeps the tensors of sizes until the end.
    data, size = object_to_tensor(obj, device_of_objects(group), group)
    sizes = _gathered(size, group)
    received = data.new_empty(data.numel() * len(sizes))
    dist.all_gather(list(received.split(data.numel())), data, group=group)
    object_list[: len(sizes)] = [_copy(obj) for _ in sizes]


def _gather(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: Any = None,
) -> None:
    target = _rank_in(group, dst, group_dst)
    data, size = object_to_tensor(obj, device_of_objects(group), group)
    sizes = _gathered(size, group)
    if dist.get_rank(group) != target:
        dist.gather(data, group_dst=target, group=group)
        return
    received = data.new_empty(data.numel() * len(sizes))
    dist.gather(data, list(received.split(data.numel())), group_dst=target, group=group)
    if object_gather_list is None:
        raise ValueError("the rank that gathers needs a list: pass object_gather_list of the size of the group")
    object_gather_list[: len(sizes)] = [_copy(obj) for _ in sizes]


def _broadcast(
    object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None, group_src: Any = None
) -> None:
    source = _rank_in(group, src, group_src)
    device = device or device_of_objects(group)
    if dist.get_rank(group) == source:
        tensors = [object_to_tensor(obj, device, group) for obj in object_list]
        sizes = torch.cat([size for _, size in tensors])
        dist.broadcast(sizes, group_src=source, group=group)
        data = tensors[0][0] if len(tensors) == 1 else torch.cat([data for data, _ in tensors])
        dist.broadcast(data, group_src=source, group=group)
        _send_to_group(object_list, "broadcast", group)
        return
    sent = _sent_to_group(object_list, "broadcast", group, source)
    sizes = _sizes_to_receive(object_list, device)
    dist.broadcast(sizes, group_src=source, group=group)
    dist.broadcast(_bytes_to_receive(sent or object_list, sizes, group), group_src=source, group=group)
    if sent is not None:
        object_list[:] = sent
    else:
        _receive_into(object_list, "broadcast_object_list", source)


def _scatter(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: Any = None,
) -> None:
    source, rank = _rank_in(group, src, group_src), dist.get_rank(group)
    sends, device = rank == source, device_of_objects(group)
    if sends:
        if scatter_object_input_list is None:
            raise ValueError("source rank must provide non-None scatter_object_input_list")
        objects = scatter_object_input_list
    else:
        sent = _sent_to_group(scatter_object_output_list[:1], "scatter", group, source)
        objects = scatter_object_output_list[:1] if sent is None else sent
    tensors = [object_to_tensor(obj, device if sends else "cpu", group) for obj in objects]
    largest = max(data.numel() for data, _ in tensors)
    if sends:
        for data, _ in tensors:
            data.resize_(largest)
    size = tensors[0][1] if sends else _sizes_to_receive(objects[:1], device)
    dist.broadcast(size, group_src=source, group=group)
    output = torch.empty(largest, dtype=torch.uint8, device=device)
    dist.scatter(output, [data for data, _ in tensors] if sends else None, group_src=source, group=group)
    own_size = torch.zeros_like(size)
    dist.scatter(own_size, [size for _, size in tensors] if sends else None, group_src=source, group=group)
    if sends:
        _send_to_group(objects, "scatter", group)
        scatter_object_output_list[0] = _copy(objects[rank])
    elif sent is not None:
        scatter_object_output_list[0] = sent[rank]
    else:
        _receive_into(scatter_object_output_list, "scatter_object_list", source)


def _send_to_group(objects: list[Any], collective: str, group: Any) -> None:
    messages.send(objects, dist.get_rank(), _group_name(collective, group))


def _sent_to_group(placeholders: list[Any], collective: str, group: Any, source: int) -> list[Any] | None:
    """Return the objects that a rank of a group sends to all others, where this rank has None in the place of one.

    What this rank has itself counts as what is sent. None where the other rank is not run.
    """
    sender, name = _global_rank(group, source), _group_name(collective, group)
    if _Received.obj is _UNKNOWN and any(value is None for value in placeholders):
        return messages.receive(sender, dist.get_rank(), name)
    messages.skip(sender, name)
    return None


def _group_name(collective: str, group: Any) -> str:
    members = dist.get_process_group_ranks(group)
    return f"{collective}-{zlib.crc32(repr(members).encode()):08x}"


def _receive(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: Any = None,
    use_batch: bool = False,
) -> int:
    source = 0 if src is None and group_src is None else _rank_in(group, src, group_src)
    sender = _global_rank(group, source)
    received = messages.receive(sender, dist.get_rank())
    if received is not None:
        object_list[:] = received
    elif use_batch:
        # Only pipeline stages ask for it.
        raise RuntimeError(
            f"a pipeline stage receives the shapes of its tensors from rank {sender}, which does not run here: pass "
            "input_args= and output_args= to PipelineStage, or run the script by `memexplore run --world N --rank R`"
        )
    sizes = _sizes_to_receive(object_list, device or device_of_objects(group))
    dist.recv(sizes, group_src=source, group=group)
    dist.recv(_bytes_to_receive(object_list, sizes, group), group_src=source, group=group)
    if received is None:
        _receive_into(object_list, "recv_object_list", source)
    return source


def _gathered(size: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Gather the sizes of the objects of all ranks."""
    world = dist.get_world_size(group)
    sizes = list(torch.zeros(world, dtype=torch.long, device=size.device).split(1))
    dist.all_gather(sizes, size, group=group)
    for other in sizes[1:]:
        # The maximum, by which torch resizes the buffers.
        other.gt(sizes[0])
    return sizes


def _sizes_to_receive(objects: list[Any], device: Any) -> torch.Tensor:
    """Return a tensor for the sizes of objects that another rank sends."""
    return torch.empty(len(objects), dtype=torch.long, device=device)


def _bytes_to_receive(objects: list[Any], sizes: torch.Tensor, group: Any) -> torch.Tensor:
    """Return a tensor for objects that another rank sends: as many bytes as those that this rank has in their place."""
    sizes.sum()
    count = sum(object_to_tensor(obj, "cpu", group)[0].numel() for obj in objects)
    return torch.empty(count, dtype=torch.uint8, device=sizes.device)


def _rank_in(group: Any, rank: int | None, group_rank: int | None) -> int:
    """Return the number in a group of the rank given by its global number or by that in the group, 0 by default."""
    if group_rank is not None:
        return group_rank
    return (rank or 0) if group is None else dist.get_group_rank(group, rank or 0)


def _global_rank(group: Any, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)


def _copy(obj: Any) -> Any:
    return pickle.loads(pickle.dumps(obj))


def _receive_into(target: list[Any], name: str, source: int) -> None:
    """Set the first object of a list to the one that is known to come, else keep the list and say so."""
    if _Received.obj is not _UNKNOWN:
        target[0] = _Received.obj
        return
    notes.assume(f"{name} received what this rank has in its list: the objects of rank {source} are not known")
