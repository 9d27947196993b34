"""Stand-ins for the kernels that DeepSpeed compiles when an optimizer is made: they update tensors in place.

Without them a compiler and the CUDA toolkit would be needed, for kernels that allocate nothing. Source of the names and
arguments: deepspeed/ops/adam, deepspeed/ops/lion, deepspeed/ops/adagrad and deepspeed/ops/csrc.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from memexplore.torch_internals.dispatch import pytree
from memexplore.virtual_gpu.patches.install import Insert, Patch
from memexplore.virtual_gpu.tensors import known_values
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor

_MODULE = "deepspeed.ops.op_builder.builder"
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "fused_adam": ("multi_tensor_adam",),
    "fused_lion": ("multi_tensor_lion",),
    "cpu_adam": ("create_adam", "adam_update", "adam_rollback", "destroy_adam"),
    "cpu_adagrad": ("create_adagrad", "adagrad_update", "destroy_adagrad"),
    "cpu_lion": ("create_lion", "lion_update", "destroy_lion"),
}
"""Name of a compiled module -> its functions."""


def patches() -> list[Patch]:
    """Return the patches, none where DeepSpeed is not imported or has compiled its kernels."""
    builder = getattr(sys.modules.get(_MODULE), "OpBuilder", None)
    loaded = getattr(builder, "_loaded_ops", None)
    if not isinstance(loaded, dict):
        return []
    return [Insert(loaded, name, _stand_in(names)) for name, names in _FUNCTIONS.items() if name not in loaded]


def _stand_in(names: Iterable[str]) -> SimpleNamespace:
    return SimpleNamespace(**dict.fromkeys(names, _in_place))


def _in_place(*args: Any) -> None:
    """Forget the values of the tensors among the arguments, which the kernel would change."""
    for value in pytree.tree_leaves(args):
        if isinstance(value, VirtualTensor):
            known_values.forget(value)
