"""Running a module a second time as if it had run once: statistics, hooks and kept inputs stay as they are."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from memexplore.torch_internals.dispatch import DisableTorchFunction, pytree
from memexplore.torch_internals.modules import HOOK_TABLES, NormBase, buffers_of
from memexplore.torch_internals.tensors import storage_key, untyped_storage, version_of


def memory_of(tensor: torch.Tensor) -> int | None:
    """A number that tells the memory that a tensor lies in; None where it has none: sparse, or inside `torch.func`.

    Function modes are not told: to the in-place knob's it would look as if somebody were handed the memory.

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
    """Call a module's `forward` again, with the hooks of torch itself and of the modules below, without its own.

    Its own hooks have had their say on what `forward` got and on what it returned.
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

    What the first call raises is raised after `checkpoint`, not through it: in torch 2.11 it would leave its hooks on
    for as long as the error is held.
    """
    carried = Carried(function)
    try:
        return torch_checkpoint.checkpoint(carried, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    finally:
        carried.over()


class Carried:
    """A function that raises nothing until the first call is over."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._call: Callable[..., Any] = self._caught
        self._function = function
        self._error: BaseException | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; None where the first call raises."""
        return self._call(*args, **kwargs)

    def _caught(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(*args, **kwargs)
        except BaseException as error:
            self._error = error

    def over(self) -> None:
        """End the first call, and raise what it raised."""
        self._call = self._function
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame


def counting(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules among some that keep running statistics."""
    return [module for module in modules if isinstance(module, NormBase)]


@contextlib.contextmanager
def statistics_kept(norms: list[nn.Module]) -> Iterator[None]:
    """Let batch norms run in the block without moving their running statistics.

    With momentum 0 the new average is the old one; without a counter of batches nothing is counted (torch/nn/modules/
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
    """How often each buffer has been written to, but for the statistics that `statistics_kept` keeps."""
    return [
        version_of(buffer)
        for module in modules
        if not isinstance(module, NormBase)
        for buffer in buffers_of(module).values()
        if buffer is not None and not buffer.is_inference()
    ]


class Guard:
    """Sees to it that inputs kept for the second run are not overwritten in the first.

    A module with `inplace=True` that is called with a kept tensor gets a copy, which is what it would have made itself
    without the flag.
    """

    def __init__(self) -> None:
        self._kept: list[set[int | None]] = []

    @contextlib.contextmanager
    def watching(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Watch the modules that have the flag in the block."""
        with contextlib.ExitStack() as undo:
            for module in modules:
                if hasattr(module, "inplace"):
                    undo.callback(module.register_forward_pre_hook(self._copied).remove)
            yield

    def _copied(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        if not (self._kept and module.inplace and inputs and isinstance(inputs[0], torch.Tensor)):
            return None
        if memory_of(inputs[0]) not in self._kept[-1] - {None}:
            return None
        return (inputs[0].clone(), *inputs[1:])

    @contextlib.contextmanager
    def keeping(self, name: str, tensors: list[torch.Tensor]) -> Iterator[None]:
        """Keep tensors as they are in the block, in which the block of a model of this name runs.

        Raises RuntimeError where code overwrote one: what would be computed again would be wrong.
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


class Given(NamedTuple):
    """What a module was called with, as it can be called with twice."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cache: bool
    """Whether a key-value cache was taken away."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments."""
        return [leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """Arguments without the key-value cache of transformers, which would grow in the second run as well.

    `GradientCheckpointingLayer` of transformers does the same.
    """
    cache = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
    if cache is None or not any(isinstance(value, cache) for value in (*args, *kwargs.values())):
        return Given(args, kwargs, False)
    kwargs = {name: None if isinstance(value, cache) else value for name, value in kwargs.items()}
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return Given(tuple(None if isinstance(value, cache) else value for value in args), kwargs, True)
