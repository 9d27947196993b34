"""Normalisations and activation functions computed again in backward: what they make is thrown away.

What in-place activated batch norm (Rota Bulò et al. 2018) and the memory-efficient DenseNet (Pleiss et al. 2017) do.
The result of such a module is saved by the layer that takes it, so throwing away what the module itself saves is not
enough: hooks on every saved tensor tell which lies in the memory of such a result, and leave a stand-in for it.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memexplore.knobs.checkpoints.recompute import again, counting, memory_of, statistics_kept
from memexplore.knobs.checkpoints.regions import Holder, Region
from memexplore.knobs.checkpoints.watch import Watch, replace_forward
from memexplore.knobs.report import Applied, LeftOut
from memexplore.torch_internals.modules import NormBase
from memexplore.torch_internals.tensors import version_of

_SAVE_RESULT = (
    *(nn.ReLU, nn.Sigmoid, nn.Tanh, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin),
    *(nn.ELU, nn.SELU, nn.CELU, nn.Threshold),
)
"""Activation functions whose backward needs their result, as the next layer does: alone there is nothing to win."""
_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_ALONE = "nothing is won: it follows no normalisation, and it saves its result, as the next layer does"
_OVERWRITES = "it overwrites what would have to be kept, since it follows no normalisation"


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalises: it is called so, and has no weights but one number a channel.

    >>> is_norm(nn.LayerNorm(8)), is_norm(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    (True, False)
    """
    if isinstance(module, NormBase | nn.LayerNorm | nn.GroupNorm):
        return True
    weights = [*module.parameters(), *module.buffers()]
    # Spectral norm and its like normalise weights.
    named = "norm" in type(module).__name__.lower() and not type(module).__module__.startswith("torch.nn.utils")
    return named and next(module.children(), None) is None and all(weight.dim() <= 1 for weight in weights)


def is_activation(module: nn.Module) -> bool:
    """Whether a module is an activation function.

    >>> is_activation(nn.GELU()), is_activation(nn.MultiheadAttention(4, 2)), is_activation(nn.Dropout())
    (True, False, False)
    """
    simple = next(module.children(), None) is None
    return simple and type(module).__module__ in _ACTIVATIONS and not isinstance(module, nn.MultiheadAttention)


def saves_result(module: nn.Module) -> bool:
    """Whether an activation function's backward needs its result, so that alone there is nothing to win.

    >>> saves_result(nn.Tanh()), saves_result(nn.GELU())
    (True, False)
    """
    return isinstance(module, _SAVE_RESULT)


class _Result(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    region: weakref.ref[Region]


class _Saved(NamedTuple):
    """A saved tensor as autograd itself keeps it, with the version that it had."""

    tensor: torch.Tensor
    version: int


class _Results:
    """Results of regions that are alive, by their storage."""

    def __init__(self) -> None:
        self._found: dict[int, _Result] = {}

    def add(self, tensor: torch.Tensor, region: Region) -> None:
        key = memory_of(tensor)
        if key is not None:
            result = _Result(weakref.ref(tensor, lambda _: self._forget(key, result)), weakref.ref(region))
            self._found[key] = result

    def _forget(self, key: int, result: _Result) -> None:
        if self._found.get(key) is result:
            del self._found[key]

    def pack(self, tensor: torch.Tensor) -> Holder | _Saved:
        """What autograd keeps for a tensor."""
        key = memory_of(tensor)
        found = self._found.get(key) if key is not None else None
        if found is not None:
            made, region = found.tensor(), found.region()
            holder = region.holder(tensor, made) if made is not None and region is not None else None
            if holder is not None:
                return holder
        # A result of the node that saves it would hold the node, and the node it.
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


class _Row:
    """The last normalisation that ran, which an activation function may go on from."""

    region: weakref.ref[Region] | None = None


def recomputed(undo: contextlib.ExitStack, model: nn.Module, statistics: str) -> Applied:
    """Have the normalisations and activation functions of a model computed again in backward until `undo` is closed."""
    kinds = {module: name for name, module in model.named_modules() if is_norm(module) or is_activation(module)}
    normalising = {module: name for module, name in kinds.items() if is_norm(module)}
    if not kinds:
        reason = "it has no module that normalises or is an activation function (functions in code are not seen)"
        return Applied(("Recomputing nothing",), (LeftOut(type(model).__name__, reason),))
    watch, row, results = Watch(tuple(kinds.values())), _Row(), _Results()
    reasons: dict[str, str] = {}
    for module, name in kinds.items():
        replace_forward(undo, module, _again(name, module, module in normalising, watch, row, results, reasons))
    undo.enter_context(saved_tensors_hooks(results.pack, _unpack))
    others = len(kinds) - len(normalising)
    text = f"Recomputing {_number(len(normalising), 'normalisation')} and {_number(others, 'activation function')}"
    notes = (statistics,) if any(norm.track_running_stats for norm in counting(normalising)) else ()
    return Applied((text,), (), notes, (functools.partial(_settle, watch, reasons, normalising, text),))


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _settle(
    watch: Watch, reasons: dict[str, str], normalising: dict[nn.Module, str], text: str, applied: Applied
) -> Applied:
    left_out = tuple(entry._replace(reason=reasons.get(entry.where, entry.reason)) for entry in watch.left_out())
    names = {entry.where for entry in left_out}
    norms = sum(name not in names for name in normalising.values())
    others = len(watch.names) - len(normalising) - (len(names) - (len(normalising) - norms))
    now = f"Recomputing {_number(norms, 'normalisation')} and {_number(others, 'activation function')}"
    texts = tuple(now if given == text else given for given in applied.texts)
    return applied._replace(texts=texts, left_out=applied.left_out + left_out)


def _again(
    name: str,
    module: nn.Module,
    normalises: bool,
    watch: Watch,
    row: _Row,
    results: _Results,
    reasons: dict[str, str],
) -> Callable[..., Any]:
    """The `forward` of a normalisation or activation function, computed again in backward."""
    forward, statistics = module.forward, counting([module])

    def first(args: Any, kwargs: Any, kept: list[torch.Tensor]) -> Any:
        return forward(*args, **kwargs)

    def later(args: Any, kwargs: Any, kept: list[torch.Tensor]) -> Any:
        with statistics_kept(statistics):
            return again(module, forward, args, kwargs)

    def region_of(tensors: list[torch.Tensor]) -> Region | None:
        if normalises:
            return Region(name)
        open_ = row.region() if row.region is not None else None
        if open_ is not None and open_.takes(tensors):
            return open_
        if saves_result(module):
            reasons[name] = _ALONE
        elif getattr(module, "inplace", False):
            reasons[name] = _OVERWRITES
        else:
            return Region(name)
        return None

    def running(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        region = region_of(tensors) if torch.is_grad_enabled() else None
        if region is None or not watch.computes(name):
            if region is None and not torch.is_grad_enabled():
                watch.computes(name)
            return forward(*args, **kwargs)
        row.region = weakref.ref(region) if normalises else None
        inside = {memory_of(tensor) for tensor in region.kept(tensors)}
        result = region.call(first, later, args, kwargs)
        if isinstance(result, torch.Tensor) and memory_of(result) not in inside:
            results.add(result, region)
        return result

    return running
