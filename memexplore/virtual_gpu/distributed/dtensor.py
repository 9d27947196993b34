"""DTensor on a virtual GPU: the device of its wrappers, shapes of results in a fake mode, and composite ops.

The dispatch mode of the virtual GPU leaves an op on a DTensor to DTensor, which calls ops on the local tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import DisableTorchFunction, disable_current_modes
from memexplore.torch_internals.dtensor import (
    DETECT_FAKE_MODE,
    PROPAGATE,
    RANDOM_STATE,
    AsyncCollectiveTensor,
    DTensor,
    OwnRandomState,
)
from memexplore.virtual_gpu.kernels import composite_dispatch
from memexplore.virtual_gpu.patches.install import Call, Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import plain_fake_mode

_DEVICE_NAMES = ("device", "is_cuda", "is_cpu", "is_meta")
_INNER = ((DTensor, "_local_tensor"), (AsyncCollectiveTensor, "elem"))
"""Wrappers, and the attribute that holds the tensor inside."""


def patches() -> list[Patch]:
    """Return the patches of DTensor."""
    fake = plain_fake_mode()
    return [
        Replace(PROPAGATE.owner, PROPAGATE.name, _without_modes(PROPAGATE.value)),
        Replace(DETECT_FAKE_MODE.owner, DETECT_FAKE_MODE.name, lambda *inputs: fake),
        Replace(RANDOM_STATE.owner, RANDOM_STATE.name, OwnRandomState()),
        Call(composite_dispatch.register_for_distributed, composite_dispatch.unregister_for_distributed),
        *(
            Replace(wrapper, name, property(operator.attrgetter(f"{inner}.{name}")))
            for wrapper, inner in _INNER
            for name in _DEVICE_NAMES
        ),
    ]


def _without_modes(original: Callable[..., Any]) -> Callable[..., Any]:
    def propagate(propagator: Any, schema: Any) -> Any:
        if torch.Tag.nondeterministic_seeded in schema.op.tags and schema.op._schema.is_mutable:
            # Of the shape of its first argument. torch's fake mode would ask the GPU for its random state.
            return schema.args_schema[0].tensor_meta
        with disable_current_modes(), DisableTorchFunction():
            return original(propagator, schema)

    return propagate
