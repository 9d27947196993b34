"""Selective checkpointing: results of matrix products, convolutions and attention stay, all others are recomputed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from memexplore.run.knobs.checkpoints.recompute import memory_of
from memexplore.torch_internals.dispatch import (
    DispatchKey,
    OpOverload,
    SetExcludeDispatchKeyGuard,
    TorchDispatchMode,
    pytree,
    schema_of,
)

_aten = torch.ops.aten
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
"""Ops that may overwrite a kept result: they save at most their own result, so neither op has to run again.

A result that another op overwrites is kept as a copy.
"""


def contexts() -> Any:
    """Return the two contexts that `torch.utils.checkpoint.checkpoint` takes from its `context_fn`.

    They do what `create_selective_checkpoint_contexts` does. Its policy does not get results in torch 2.11, and so
    cannot find the ops that overwrite a kept result.
    """
    kept: dict[tuple[Any, int], Any] = {}
    return _Keeping(kept), _Giving(kept)


class _Counting(TorchDispatchMode):
    """Numbers the calls of each op whose result may stay; op and number identify a call in the recomputation."""

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
    """The first run, which keeps results."""

    def __init__(self, kept: dict[tuple[Any, int], Any]) -> None:
        super().__init__(kept)
        self._calls_in: dict[int | None, list[tuple[Any, int]]] = {}
        """Storage -> the calls whose kept results are in it."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kept = self._overwritten(op, args)
        if kept and op not in _HARMLESS:
            self._copy(kept, args[0])
        result = op(*args, **kwargs)
        if op in KEPT:
            call = self.call(op)
            if not _draws(op, args, kwargs):
                self.kept[call] = pytree.tree_map_only(torch.Tensor, _detached, result)
                for tensor in _tensors(result):
                    self._calls_in.setdefault(memory_of(tensor), []).append(call)
        elif op in _HARMLESS:
            call = self.call(op)
            if kept:
                self.kept[call] = _detached(result)
                kept.append(call)
        return result

    def _overwritten(self, op: Any, args: Any) -> list[tuple[Any, int]]:
        """Return the calls whose kept results an op is about to overwrite."""
        if not isinstance(op, OpOverload) or not schema_of(op).is_mutable or not args:
            return []
        if not isinstance(args[0], torch.Tensor):
            return []
        return self._calls_in.get(memory_of(args[0]), [])

    def _copy(self, calls: list[tuple[Any, int]], overwritten: torch.Tensor) -> None:
        """Replace results that are about to be overwritten by copies; views of one memory share one copy."""
        storage = memory_of(overwritten)
        copies: dict[Any, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if memory_of(tensor) != storage:
                return tensor
            view = tensor.shape, tensor.stride(), tensor.storage_offset()
            if view not in copies:
                copies[view] = tensor.clone()
            return copies[view]

        for call in calls:
            self.kept[call] = pytree.tree_map_only(torch.Tensor, copied, self.kept[call])
        del self._calls_in[storage]


class _Giving(_Counting):
    """The second run, which returns each kept result once and runs all other ops."""

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
    """Return a tensor without its autograd node, which would be a reference cycle; both share one version counter."""
    with SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether attention has dropout: skipping it would shift the random numbers of later ops."""
    for index, argument in enumerate(schema_of(op).arguments):
        if argument.name == "dropout_p":
            value = kwargs.get("dropout_p", args[index] if index < len(args) else argument.default_value)
            return bool(value)
    return False
