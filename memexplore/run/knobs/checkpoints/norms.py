"""Checkpoint setting `norms`: results of normalisations and activation functions freed, and recomputed in backward.

In-place activated batch norm (Rota Bulò et al. 2018) and the memory-efficient DenseNet (Pleiss et al. 2017) do so too.
The layer that takes the result of such a module saves it, so freeing what the module itself saves is not enough: while
the model's forward runs, hooks replace every saved tensor in the memory of such a result by a placeholder.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memexplore.run.knobs.applying.forward import Wrapper, run_forward_inside, wrap_forward
from memexplore.run.knobs.applying.report import ApplyReport, Change, Skipped, counted
from memexplore.run.knobs.applying.scope import Reach
from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.run.knobs.checkpoints.recompute import again, frozen_statistics, memory_of, norms_with_statistics
from memexplore.run.knobs.checkpoints.regions import Holder, Region
from memexplore.run.knobs.checkpoints.watch import STATISTICS_ONCE, Watch
from memexplore.torch_internals.modules import NormBase
from memexplore.torch_internals.tensors import version_of

_SAVE_RESULT = (
    *(nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin),
    *(nn.ELU, nn.SELU, nn.CELU, nn.Threshold),
)
"""Activation functions whose backward needs their result, which the next layer saves anyway."""
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_SAVES_RESULT_ANYWAY = "it would save no memory: it follows no normalisation, and the next layer saves its result too"
_OVERWRITES_INPUT = "it overwrites its input, which would have to be kept since it follows no normalisation"


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation: named so, without children, its weights one number per channel.

    >>> is_norm(nn.LayerNorm(8)), is_norm(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    (True, False)
    """
    if isinstance(module, NormBase | nn.LayerNorm | nn.GroupNorm):
        return True
    weights = [*module.parameters(), *module.buffers()]
    # Spectral norm and similar modules normalise weights.
    named = "norm" in type(module).__name__.lower() and not type(module).__module__.startswith("torch.nn.utils")
    return named and next(module.children(), None) is None and all(weight.dim() <= 1 for weight in weights)


def is_activation(module: nn.Module) -> bool:
    """Return whether a module is an activation function.

    >>> is_activation(nn.GELU()), is_activation(nn.MultiheadAttention(4, 2)), is_activation(nn.Dropout())
    (True, False, False)
    """
    simple = next(module.children(), None) is None
    return simple and type(module).__module__ in _ACTIVATIONS and not isinstance(module, nn.MultiheadAttention)


def saves_result(module: nn.Module) -> bool:
    """Return whether an activation function's backward needs its result.

    >>> saves_result(nn.Tanh()), saves_result(nn.GELU())
    (True, False)
    """
    return isinstance(module, _SAVE_RESULT)


class _Result(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    region: weakref.ref[Region]


class _Saved(NamedTuple):
    """A saved tensor as autograd keeps it, with its version at that time."""

    tensor: torch.Tensor
    version: int


class _Results:
    """Results of regions that are alive, by their storage."""

    def __init__(self) -> None:
        self._results: dict[int, _Result] = {}

    def add(self, tensor: torch.Tensor, region: Region) -> None:
        key = memory_of(tensor)
        if key is not None:
            result = _Result(weakref.ref(tensor, lambda _: self._forget(key, result)), weakref.ref(region))
            self._results[key] = result

    def _forget(self, key: int, result: _Result) -> None:
        if self._results.get(key) is result:
            del self._results[key]

    def pack(self, tensor: torch.Tensor) -> Holder | _Saved:
        """Return what autograd keeps for a tensor."""
        key = memory_of(tensor)
        result = self._results.get(key) if key is not None else None
        if result is not None:
            made, region = result.tensor(), result.region()
            holder = region.holder(tensor, made) if made is not None and region is not None else None
            if holder is not None:
                return holder
        # A result kept by the node that made it would be a reference cycle.
        return _Saved(tensor if tensor.is_leaf else tensor.detach(), version_of(tensor))


def _unpack(kept: Holder | _Saved) -> torch.Tensor:
    if isinstance(kept, Holder):
        return kept.unpacked()
    if version_of(kept.tensor) != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(kept.tensor.shape)} is at version {version_of(kept.tensor)}; "
            f"expected version {kept.version} instead"
        )
    return kept.tensor


class _LastNorm:
    """The region of the last normalisation that ran, which an activation function may join."""

    region: weakref.ref[Region] | None = None


def recompute_norms(log: UndoLog, model: nn.Module, reach: Reach = Reach.FORWARD) -> ApplyReport:
    """Recompute the normalisations and activation functions of a model in backward."""
    names = {module: name for module, name in _named(model) if is_norm(module) or is_activation(module)}
    norms = {name for module, name in names.items() if is_norm(module)}
    if not names:
        reason = "it has no module that is a normalisation or an activation function (functions are not found)"
        change = Change("checkpoint", "Recomputing nothing")
        return ApplyReport((change,), (Skipped(type(model).__name__, reason),))
    change = _change(norms, set(names.values()))
    watch, last_norm, results = Watch(lambda _: change.text, tuple(names.values())), _LastNorm(), _Results()
    reasons: dict[str, str] = {}
    for module, name in names.items():
        wrap_forward(log, module, _recomputed(name, module, watch, last_norm, results, reasons))
    if reach is Reach.FORWARD:
        run_forward_inside(log, model, lambda: saved_tensors_hooks(results.pack, _unpack))
    else:
        stack = contextlib.ExitStack()
        log.add(stack.close)
        stack.enter_context(saved_tensors_hooks(results.pack, _unpack))
    statistics = any(norm.track_running_stats for norm in norms_with_statistics(names))
    notes = (STATISTICS_ONCE,) if statistics else ()

    def observed() -> ApplyReport:
        skipped = tuple(piece._replace(reason=reasons.get(piece.site, piece.reason)) for piece in watch.skipped())
        recomputed = set(watch.names) - {piece.site for piece in skipped}
        return ApplyReport((_change(norms, recomputed),), skipped)

    return ApplyReport((change,), (), notes, (observed,))


def _named(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(module, name) for name, module in model.named_modules()]


def _change(norms: set[str], recomputed: set[str]) -> Change:
    counts = counted(len(recomputed & norms), "normalisation"), counted(len(recomputed - norms), "activation function")
    return Change("checkpoint", f"Recomputing {' and '.join(counts)}")


def _recomputed(
    name: str,
    module: nn.Module,
    watch: Watch,
    last_norm: _LastNorm,
    results: _Results,
    reasons: dict[str, str],
) -> Wrapper:
    """Return the forward of a normalisation or activation function, recomputed in backward.

    `reasons` gets why an activation function is skipped.
    """
    statistics, normalises = norms_with_statistics([module]), is_norm(module)

    def region_for(tensors: list[torch.Tensor]) -> Region | None:
        if normalises:
            return Region(name)
        region = last_norm.region() if last_norm.region is not None else None
        if region is not None and region.continues(tensors):
            return region
        if saves_result(module):
            reasons[name] = _SAVES_RESULT_ANYWAY
        elif getattr(module, "inplace", False):
            reasons[name] = _OVERWRITES_INPUT
        else:
            return Region(name)
        return None

    def running(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def first(args: Any, kwargs: Any, kept: list[torch.Tensor]) -> Any:
            return forward(*args, **kwargs)

        def later(args: Any, kwargs: Any, kept: list[torch.Tensor]) -> Any:
            with frozen_statistics(statistics):
                return again(module, forward, args, kwargs)

        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        region = region_for(tensors) if torch.is_grad_enabled() else None
        if region is None:
            if not torch.is_grad_enabled():
                watch.computes_gradients(name)
            return forward(*args, **kwargs)
        watch.computes_gradients(name)
        last_norm.region = weakref.ref(region) if normalises else None
        outside = {memory_of(tensor) for tensor in region.kept(tensors)}
        result = region.call(first, later, args, kwargs)
        if isinstance(result, torch.Tensor) and memory_of(result) not in outside:
            results.add(result, region)
        return result

    return running
