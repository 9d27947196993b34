"""Selective checkpointing: results of matrix products, convolutions and attention stay, the rest is computed again."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
_storage = torch._C.TensorBase.untyped_storage

_KEPT_NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "linear"),
    *("convolution", "cudnn_convolution", "mkldnn_convolution", "_slow_conv2d_forward"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward", "_efficient_attention_forward"),
)
KEPT = frozenset(
    getattr(packet, overload)
    for name in _KEPT_NAMES
    if (packet := getattr(_aten, name, None)) is not None
    for overload in packet.overloads()
    if "out" not in overload.split("_")
)
"""Ops whose results stay."""
_HARMLESS = frozenset(
    {
        _aten.add_.Tensor,
        _aten.add_.Scalar,
        _aten.sub_.Tensor,
        _aten.relu_.default,
        _aten.sigmoid_.default,
        _aten.tanh_.default,
    }
)
"""Ops that may overwrite what stays: they save at most their result, so neither has to run again."""


def contexts() -> Any:
    """What `torch.utils.checkpoint.checkpoint` takes as `context_fn`."""
    kept: set[int] = set()
    return create_selective_checkpoint_contexts(functools.partial(_policy, kept), allow_cache_entry_mutation=True)


def _policy(kept: set[int], context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the result of an op stays; `kept` are the storages that do."""
    if op in KEPT and not _draws(op, args, kwargs):
        results = context.op_output if isinstance(context.op_output, list | tuple) else (context.op_output,)
        kept.update(_storage(result)._cdata for result in results if isinstance(result, torch.Tensor))
        return CheckpointPolicy.MUST_SAVE
    if op._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and _storage(args[0])._cdata in kept:
        if op not in _HARMLESS:
            raise RuntimeError(
                f"{op.name()} overwrites the result of a matrix product that checkpointing keeps; "
                "switch in-place activations off, or choose another checkpoint setting"
            )
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether attention drops out: not run again, it would leave the random numbers after it to others."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            value = kwargs.get("dropout_p", args[place] if place < len(args) else argument.default_value)
            return bool(value)
    return False
