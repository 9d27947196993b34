"""Run collectives: request the memory that ProcessGroupNCCL requests, and return works that have finished.

The outputs of the c10d ops are tensors of their arguments. An asynchronous collective keeps its inputs and its flat
buffer until `Work.wait`, or as long as its outputs live. A real one that has ended before gives them back when the next
one begins: these blocks are reported (`collective_begins`). Source: `collective`, `workEnqueue`, the watchdog and the
functions of each collective in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp. NCCL's own memory is outside the
allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memexplore.tape import Category
from memexplore.torch_internals.dispatch import schema_of
from memexplore.torch_internals.distributed import AVAILABLE, work_from_future
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.kernels import collective_values, traffic
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.tensors.live_storages import StorageRef, live_storages

_HOLDS = "holds_of_running_collectives"
"""Attribute of an output: what its collectives keep until `Work.wait`."""


def _ops() -> list[Any]:
    if not AVAILABLE:
        return []
    namespace = torch.ops.c10d
    names = (
        "allreduce_ allreduce_coalesced_ allgather_ _allgather_base_ allgather_coalesced_ "
        "allgather_into_tensor_coalesced_ reduce_scatter_ _reduce_scatter_base_ reduce_scatter_tensor_coalesced_ "
        "broadcast_ reduce_ gather_ scatter_ alltoall_ alltoall_base_ send recv_ recv_any_source_ barrier"
    )
    return [getattr(namespace, name).default for name in names.split() if hasattr(namespace, name)]


OPS = _ops()
"""The collectives of this build of torch."""


@rule(Kind.OPS, "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp", *OPS)
def run(runner: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a collective: request its buffers, and return its outputs and a finished work."""
    schema = schema_of(func)
    arguments = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    outputs, inputs = _tensors(arguments)
    plan_runner = runner.plan_runner
    plan_runner.collective_begins()
    name = schema.name.removeprefix("c10d::")
    if plan_runner.traffic_log is not None:
        plan_runner.traffic_log.append(traffic.of(name, arguments, outputs, inputs))
    with runner:
        buffers = _buffers(name, arguments)
        _tag(plan_runner.observer, buffers)
        collective_values.follow(name, arguments, outputs)
    # ProcessGroupNCCL gathers into a flat buffer, which is then the output of its work.
    result = buffers if schema.name == "c10d::allgather_" and buffers else outputs
    if arguments.get("async_op", True) and result:
        _hold(plan_runner, result[0], [*inputs, *buffers])
    future: Any = torch.futures.Future()
    future.set_result(result)
    work = work_from_future(future).boxed()
    return work if len(schema.returns) == 1 else (args[0], work)


def _tensors(arguments: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs and the inputs of a collective; tensors that are both count as outputs."""
    inputs: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for name, value in arguments.items():
        (inputs if name.startswith("input") else outputs).extend(_flat(value))
    return outputs, inputs


def _flat(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _flat(entry)


def _buffers(name: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return the buffers that a collective of the default stream requests."""
    if name == "allgather_":
        return [_flat_buffer(tensors) for tensors in arguments["output_tensors"] if _same_size(tensors)]
    if name == "reduce_scatter_":
        return [_flat_buffer(tensors) for tensors in arguments["input_tensors"] if _same_size(tensors)]
    if name == "barrier":
        return [arguments["tensor"].new_zeros(1, dtype=torch.float32)]
    return []


def _tag(observer: Any, buffers: list[torch.Tensor]) -> None:
    """Tell the recorder which blocks the collective itself has requested."""
    if observer is not None:
        for buffer in buffers:
            ref = live_storages[storage_key(untyped_storage(buffer))]
            observer.tag_block(ref.address, (Category.COMMUNICATION_BUFFER, None))


def _same_size(tensors: list[torch.Tensor]) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _flat_buffer(tensors: list[torch.Tensor]) -> torch.Tensor:
    """`newLikeFlat`: one tensor for all."""
    return tensors[0].new_empty((len(tensors), *tensors[0].shape))


class _Hold:
    """The storages of tensors that a running collective keeps, until `release` or the death of its output."""

    def __init__(self, tensors: Iterable[torch.Tensor], free: Callable[[StorageRef], None]) -> None:
        keys = (storage_key(untyped_storage(tensor)) for tensor in tensors)
        self._refs = [live_storages[key] for key in keys if key in live_storages]
        self._free = free
        for ref in self._refs:
            ref.holds += 1

    def release(self) -> None:
        """Free the blocks of the storages that have died since, unless other collectives hold them."""
        refs, self._refs = self._refs, []
        for ref in refs:
            if ref.holds:
                ref.holds -= 1
                if not ref.holds and ref() is None:
                    self._free(ref)

    __del__ = release


def _hold(plan_runner: Any, output: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    others = [tensor for tensor in tensors if tensor is not output]
    if others:
        output.__dict__.setdefault(_HOLDS, []).append(_Hold(others, plan_runner.free_held))


def release(outputs: Any) -> None:
    """Release what collectives with these outputs keep, as `Work.wait` does."""
    for output in _flat(outputs):
        for hold in output.__dict__.pop(_HOLDS, ()):
            hold.release()
