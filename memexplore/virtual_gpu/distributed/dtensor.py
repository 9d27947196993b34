"""DTensor on a virtual GPU: the device of its wrappers, shapes of results in a fake mode, and composite ops.

The dispatch mode of the virtual GPU leaves an op on a DTensor to DTensor, which calls ops on the local tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import DisableTorchFunction, disable_current_modes, schema_of
from memexplore.torch_internals.dtensor import (
    DETECT_FAKE_MODE,
    PROPAGATE,
    PROPAGATE_SHARDING,
    RANDOM_STATE,
    SHARDED_PARAMETER,
    WAIT_TENSOR,
    WRAP_TENSOR,
    AsyncCollectiveTensor,
    DTensor,
    OwnRandomState,
    forget_shardings,
)
from memexplore.virtual_gpu.distributed.list_ops import once_for_equal_elements
from memexplore.virtual_gpu.kernels import composite_dispatch, table
from memexplore.virtual_gpu.patches.install import Call, Insert, Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor, plain_fake_mode

_DEVICE_NAMES = ("device", "is_cuda", "is_cpu", "is_meta")
_INNER = ((DTensor, "_local_tensor"), (AsyncCollectiveTensor, "elem"))
"""Wrappers, and the attribute that holds the tensor inside."""


def patches() -> list[Patch]:
    """Return the patches of DTensor."""
    fake = plain_fake_mode()
    return [
        # Outermost: only torch's own caches can be cleared.
        Call(forget_shardings, forget_shardings),
        Replace(PROPAGATE.owner, PROPAGATE.name, _without_modes(PROPAGATE.value)),
        *(Replace(found.owner, found.name, once_for_equal_elements(found.value)) for found in PROPAGATE_SHARDING),
        Replace(DETECT_FAKE_MODE.owner, DETECT_FAKE_MODE.name, lambda *inputs: fake),
        Replace(RANDOM_STATE.owner, RANDOM_STATE.name, OwnRandomState()),
        Call(composite_dispatch.register_for_distributed, composite_dispatch.unregister_for_distributed),
        Insert(vars(SHARDED_PARAMETER), "type", _type_on_gpu),
        *(Insert(table.TABLE, op, {table.Kind.OPS: _WRAPPING}) for op in WRAP_TENSOR),
        *(Insert(table.TABLE, op, {table.Kind.OPS: _WAITING}) for op in WAIT_TENSOR),
        *(
            Replace(wrapper, name, property(operator.attrgetter(f"{inner}.{name}")))
            for wrapper, inner in _INNER
            for name in _DEVICE_NAMES
        ),
    ]


def _type_on_gpu(value: Any) -> type:
    """Return the type that a value has where the GPU is a real one."""
    return torch.Tensor if type(value) is VirtualTensor else type(value)


def _wrap(runner: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the op that wraps the output of a collective: a wrapper has no memory of its own."""
    return AsyncCollectiveTensor(args[0])


def _wait(runner: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the op that waits for the output of a collective: it returns this output, although its schema says a copy."""
    return args[0]


_WAITING = table.Entry(table.Kind.OPS, _wait, "torch/csrc/distributed/c10d/Functional.cpp")
_WRAPPING = table.Entry(table.Kind.OPS, _wrap, "torch/distributed/_functional_collectives.py")


def _without_modes(original: Callable[..., Any]) -> Callable[..., Any]:
    def propagate(propagator: Any, schema: Any) -> Any:
        if torch.Tag.nondeterministic_seeded in schema.op.tags and schema_of(schema.op).is_mutable:
            # Of the shape of its first argument. torch's fake mode would ask the GPU for its random state.
            return schema.args_schema[0].tensor_meta
        with disable_current_modes(), DisableTorchFunction():
            return original(propagator, schema)

    return propagate
