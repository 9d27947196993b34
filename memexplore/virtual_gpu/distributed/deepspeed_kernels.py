"""Stand in for the kernels that DeepSpeed compiles, and for its comparison of this rank with rank 0.

The kernels update tensors in place and allocate nothing; a compiler and the CUDA toolkit would be needed for them.
Source of the names and arguments: deepspeed/ops/adam, deepspeed/ops/lion, deepspeed/ops/adagrad, deepspeed/ops/csrc and
deepspeed/runtime/zero/utils.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from memexplore.torch_internals.dispatch import pytree
from memexplore.virtual_gpu.distributed.groups import is_ours
from memexplore.virtual_gpu.patches.install import Insert, Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values import known_values

_MODULE = "deepspeed.ops.op_builder.builder"
_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "fused_adam": ("multi_tensor_adam",),
    "fused_lion": ("multi_tensor_lion",),
    "cpu_adam": ("create_adam", "adam_update", "adam_rollback", "destroy_adam"),
    "cpu_adagrad": ("create_adagrad", "adagrad_update", "destroy_adagrad"),
    "cpu_lion": ("create_lion", "lion_update", "destroy_lion"),
}
"""Name of a compiled module -> its functions."""
_COMPARISONS = "deepspeed.runtime.zero.utils"
"""The module by which ZeRO 3 compares lists of all ranks with that of rank 0."""


def _kernels() -> list[Patch]:
    builder = getattr(sys.modules.get(_MODULE), "OpBuilder", None)
    loaded = getattr(builder, "_loaded_ops", None)
    if not isinstance(loaded, dict):
        return []
    return [Insert(loaded, name, _stand_in(names)) for name, names in _FUNCTIONS.items() if name not in loaded]


def _comparisons() -> list[Patch]:
    module: Any = sys.modules.get(_COMPARISONS)
    if not (hasattr(module, "get_lst_from_rank0") and hasattr(module, "assert_lst_len_same_as_other_ranks")):
        return []
    received = module.get_lst_from_rank0

    def numbers(own: list[int]) -> Any:
        """Receive the numbers of rank 0, which are those of this rank."""
        of_rank_0 = received(own)
        return list(own) if is_ours(None) else of_rank_0

    def compare_length(
        own: list[int], original: Callable[..., Any] = module.assert_lst_len_same_as_other_ranks
    ) -> None:
        if is_ours(None):
            received([len(own)])
        else:
            original(own)

    return [
        Replace(module, "get_lst_from_rank0", numbers),
        Replace(module, "assert_lst_len_same_as_other_ranks", compare_length),
    ]


PATCHES: dict[str, Callable[[], list[Patch]]] = {_MODULE: _kernels, _COMPARISONS: _comparisons}
"""Name of a module of DeepSpeed -> function that returns its patches, none where it is not imported."""


def _stand_in(names: Iterable[str]) -> SimpleNamespace:
    return SimpleNamespace(**dict.fromkeys(names, _in_place))


def _in_place(*args: Any) -> None:
    """Forget the values of the tensors among the arguments, which the kernel would change."""
    for value in pytree.tree_leaves(args):
        if is_virtual(value):
            known_values.forget(value)
