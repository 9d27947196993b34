"""A second run of a module without side effects: statistics, hooks and kept inputs stay as they are."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from memexplore.run.knobs.applying.scope import RecomputedByKnob
from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.torch_internals.dispatch import DisableTorchFunction, pytree
from memexplore.torch_internals.modules import HOOK_TABLES, NormBase, buffers_of
from memexplore.torch_internals.tensors import storage_key, untyped_storage, version_of


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return a number that identifies a tensor's memory; None for a sparse tensor and inside `torch.func`.

    Function modes do not see the call: the in-place knob's mode would take it for a read through `untyped_storage`.

    >>> value = torch.ones(2, 2)
    >>> memory_of(value) == memory_of(value.T), memory_of(value) == memory_of(value.clone())
    (True, False)
    """
    try:
        with DisableTorchFunction():
            return storage_key(untyped_storage(tensor))
    except NotImplementedError:
        return None


def again(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module's `forward` again, with global hooks and the hooks of the modules below, without its own hooks.

    Its own hooks have already changed what `forward` got and what it returned.
    """
    own = {name: module.__dict__[name] for name in ("forward", *HOOK_TABLES) if name in module.__dict__}
    try:
        module.__dict__.update({name: OrderedDict() for name in HOOK_TABLES}, forward=forward)
        return module(*args, **kwargs)
    finally:
        module.__dict__.pop("forward")
        module.__dict__.update(own)


def call_twice(function: Callable[..., Any], contexts: Callable[[], Any], args: Any, kwargs: Any) -> Any:
    """Call a function through `torch.utils.checkpoint.checkpoint`, which calls it again in backward.

    An error of the first call is raised after `checkpoint`, not through it: in torch 2.11 `checkpoint` would leave its
    hooks on for as long as the error is held.
    """
    deferring = _ErrorDeferred(function)
    try:
        return torch_checkpoint.checkpoint(deferring, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    finally:
        deferring.end_first_call()


class _ErrorDeferred(RecomputedByKnob):
    """A function whose first call returns None instead of raising; `end_first_call` raises."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._call: Callable[..., Any] = self._caught
        self._function = function
        self._error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; return None if the first call raises."""
        return self._call(*args, **kwargs)

    def _caught(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(*args, **kwargs)
        except BaseException as error:
            self._error = error

    def end_first_call(self) -> None:
        """Raise the error of the first call, if any; later calls raise directly."""
        self._call = self._function
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame


def norms_with_statistics(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the batch and instance norms among modules."""
    return [module for module in modules if isinstance(module, NormBase)]


@contextlib.contextmanager
def frozen_statistics(norms: list[nn.Module]) -> Iterator[None]:
    """Run batch norms in the block without changing their running statistics.

    With momentum 0 the new average equals the old one; without a counter no batch is counted (torch/nn/modules/
    batchnorm.py). The kernel is the same, so it saves the same tensors.
    """
    moving = [norm for norm in norms if norm.training and norm.track_running_stats]
    before = [(norm, norm.momentum, buffers_of(norm).get("num_batches_tracked")) for norm in moving]
    try:
        for norm in moving:
            norm.momentum = 0.0  # type: ignore[assignment]
            buffers_of(norm)["num_batches_tracked"] = None
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum = momentum
            buffers_of(norm)["num_batches_tracked"] = count


def versions(modules: Iterable[nn.Module]) -> list[int]:
    """Return how often each buffer has been written to, except the statistics that `frozen_statistics` preserves."""
    return [
        version_of(buffer)
        for module in modules
        if not isinstance(module, NormBase)
        for buffer in buffers_of(module).values()
        if buffer is not None and not buffer.is_inference()
    ]


class InputGuard:
    """Protection of the inputs kept for the second run from being overwritten in the first.

    A module with `inplace=True` that is called with a kept tensor gets a copy, which it would have made itself without
    the flag.
    """

    def __init__(self) -> None:
        self._kept: list[set[int | None]] = []

    def protect(self, log: UndoLog, modules: Iterable[nn.Module]) -> None:
        """Watch the calls of modules that have the flag."""
        for module in modules:
            if hasattr(module, "inplace"):
                log.add_pre_hook(module, self._copied)

    def _copied(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not (self._kept and module.inplace and inputs and isinstance(inputs[0], torch.Tensor)):
            return None
        if memory_of(inputs[0]) not in self._kept[-1] - {None}:
            return None
        return (inputs[0].clone(), *inputs[1:]), kwargs

    @contextlib.contextmanager
    def keeping(self, name: str, tensors: list[torch.Tensor]) -> Iterator[None]:
        """Run the block `name` of a model, whose second run needs these tensors.

        Raises RuntimeError if code overwrote one of them: the recomputation would be wrong.
        """
        before = [version_of(tensor) for tensor in tensors if not tensor.is_inference()]
        self._kept.append({memory_of(tensor) for tensor in tensors})
        try:
            yield
        finally:
            self._kept.pop()
        if before != [version_of(tensor) for tensor in tensors if not tensor.is_inference()]:
            raise RuntimeError(
                f"{name} overwrites its input in place, so it cannot be computed again in backward; "
                "have it work on a copy, or leave it out of checkpointing"
            )


class CallInputs(NamedTuple):
    """Arguments of a module that can be called with them twice."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    had_cache: bool
    """Whether a key-value cache was removed from the arguments."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallInputs:
    """Return arguments without the key-value cache of transformers, which would grow in the second run as well.

    `GradientCheckpointingLayer` of transformers does the same.
    """
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if cache is None or not any(isinstance(value, cache) for value in (*args, *kwargs.values())):
        return CallInputs(args, kwargs, False)
    kwargs = {name: None if isinstance(value, cache) else value for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return CallInputs(tuple(None if isinstance(value, cache) else value for value in args), kwargs, True)
