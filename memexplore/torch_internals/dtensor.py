"""Private names of DTensor, which FSDP2 and tensor parallelism are made of. Importing this module takes 0.5 s."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from memexplore.torch_internals.table import look_up, look_up_or_none, replaceable

_NO_SHARDS = "FSDP2 and tensor parallelism on a virtual GPU"

DTensor: Any = look_up("torch.distributed.tensor.DTensor", "says the device of its local tensor", _NO_SHARDS)
AsyncCollectiveTensor: Any = look_up(
    "torch.distributed._functional_collectives.AsyncCollectiveTensor", "says the device of its tensor", _NO_SHARDS
)


def _op(name: str, why: str, if_missing: str) -> tuple[Any, ...]:
    """Return an op of functional collectives, as a tuple: empty in a release without it."""
    op = look_up_or_none(f"torch.ops._c10d_functional.{name}", why, if_missing, needed=lambda: False)
    return () if op is None else (op.default,)


WAIT_TENSOR = _op(
    "wait_tensor",
    "returns the output of a collective itself; its schema says another tensor",
    "the output of a functional collective is requested twice",
)
WRAP_TENSOR = _op(
    "_wrap_tensor_autograd",
    "puts the output of a collective into an AsyncCollectiveTensor; its rule for fake tensors makes a copy",
    "the output of a functional collective is requested twice",
)
PROPAGATE = replaceable(
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    "computes the shape of a result in a fake mode of its own",
    _NO_SHARDS,
)
PROPAGATE_SHARDING = tuple(
    replaceable(
        name,
        "finds the sharding of a result for each element of a list alone, also where they are equal",
        "the speed of optimizers on DTensors on a virtual GPU",
    )
    for name in (
        "torch.distributed.tensor._sharding_prop.ShardingPropagator.propagate_op_sharding_non_cached",
        "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding",
    )
)
"""The method, and the cache that holds it since DTensor was imported."""
DETECT_FAKE_MODE = replaceable(
    "torch.distributed.tensor._sharding_prop.detect_fake_mode",
    "the fake mode of that computation; torch's own would look for a GPU",
    _NO_SHARDS,
)
RANDOM_STATE = replaceable(
    "torch.distributed.tensor._random._rng_tracker",
    "the random state that ranks agree on; torch's own reads it from the GPU",
    "random ops on a DTensor, such as dropout, on a virtual GPU",
)
_clear_shardings: Callable[[], None] = look_up(
    "torch.distributed.tensor.debug._clear_sharding_prop_cache",
    "forgets the shardings of ops, which name the groups of an earlier run with an equal mesh",
    "several ranks after each other in one process",
)
_transforms: Any = look_up(
    "torch.distributed.tensor._redistribute._gen_transform_infos",
    "keeps the same for changes of a sharding",
    "several ranks after each other in one process",
)


def forget_shardings() -> None:
    """Make DTensor compute the shardings of ops again: meshes of different ranks and runs are equal to its caches."""
    _clear_shardings()
    if hasattr(_transforms, "cache_clear"):
        _transforms.cache_clear()


class OwnRandomState:
    """Value of `RANDOM_STATE` with which each rank draws its own numbers: no values depend on those of other ranks."""

    distribute_region_enabled = False

    def _distribute_region(self, spec: Any, generator: Any = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
