"""Selective checkpointing: results of matrix products, convolutions and attention stay, the rest is computed again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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
    """What `torch.utils.checkpoint.checkpoint` takes as `context_fn`.

    They do what `create_selective_checkpoint_contexts` does, whose policy is not told of results in torch 2.11 and so
    could not tell there what overwrites one that stays.
    """
    kept: dict[tuple[Any, int], Any] = {}
    return _Keeping(kept), _Giving(kept)


class _Counting(TorchDispatchMode):
    """Numbers the calls of each op whose result may stay: by op and number they are found when all runs again."""

    def __init__(self, kept: dict[tuple[Any, int], Any]) -> None:
        super().__init__()
        self.kept = kept
        self._calls: Counter[Any] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as the modes of torch.utils.checkpoint

    def call(self, op: Any) -> tuple[Any, int]:
        self._calls[op] += 1
        return op, self._calls[op]


class _Keeping(_Counting):
    """The first run: results that stay are kept."""

    def __init__(self, kept: dict[tuple[Any, int], Any]) -> None:
        super().__init__(kept)
        self._storages: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op not in _HARMLESS and self._overwrites_kept(op, args):
            raise RuntimeError(
                f"{op.name()} overwrites the result of a matrix product that checkpointing keeps; "
                "switch in-place activations off, or choose another checkpoint setting"
            )
        result = op(*args, **kwargs)
        if op in KEPT:
            call = self.call(op)
            if not _draws(op, args, kwargs):
                self.kept[call] = pytree.tree_map_only(torch.Tensor, _detached, result)
                self._storages.update(_storage(tensor)._cdata for tensor in _tensors(result))
        elif op in _HARMLESS:
            call = self.call(op)
            if self._overwrites_kept(op, args):
                self.kept[call] = _detached(result)
        return result

    def _overwrites_kept(self, op: Any, args: Any) -> bool:
        if not isinstance(op, torch._ops.OpOverload) or not op._schema.is_mutable or not args:
            return False
        return isinstance(args[0], torch.Tensor) and _storage(args[0])._cdata in self._storages


class _Giving(_Counting):
    """The second run: results that stayed are given, once, and the other ops run."""

    def __enter__(self) -> Any:
        self._calls.clear()  # as a second backward begins anew
        return super().__enter__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = self.call(op) if op in KEPT or op in _HARMLESS else None
        if call not in self.kept:
            return op(*args, **(kwargs or {}))
        result = self.kept[call]
        if result is _GIVEN:
            raise RuntimeError("checkpoints that keep matrix products can go backward once only, as in torch itself")
        self.kept[call] = _GIVEN
        return result


_GIVEN = object()


def _tensors(result: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the node that made it, which would hold it in a circle; it counts versions with the other."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether attention drops out: not run again, it would leave the random numbers after it to others."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            value = kwargs.get("dropout_p", args[place] if place < len(args) else argument.default_value)
            return bool(value)
    return False
