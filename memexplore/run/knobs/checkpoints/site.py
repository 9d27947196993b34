"""A piece of a model together with what runs and observes it: the function that `torch.utils.checkpoint` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from memexplore.run.knobs.applying.forward import Wrapper
from memexplore.run.knobs.checkpoints.pieces import Piece, modules_in
from memexplore.run.knobs.checkpoints.recompute import again, call_twice, frozen_statistics, norms_with_statistics
from memexplore.run.knobs.checkpoints.watch import Watch
from memexplore.torch_internals.modules import children_of


class Site:
    """A piece to recompute; `contexts` is the `context_fn` of its checkpoint."""

    def __init__(
        self, piece: Piece, watch: Watch, contexts: Callable[[], Any] = torch_checkpoint.noop_context_fn
    ) -> None:
        self.piece = piece
        self.watch = watch
        self.modules = modules_in([piece])
        self.norms = norms_with_statistics(self.modules)
        self._contexts = contexts

    def computes_gradients(self) -> bool:
        """Return whether a call now saves tensors for backward, and have the watch observe the call."""
        return self.watch.computes_gradients(self.piece.name, *self.piece.others)

    def run(self, first: Callable[..., Any], later: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `first` now and `later` in backward."""
        return call_twice(_FirstThenLater(self, first, later), self._contexts, args, kwargs)


class _FirstThenLater:
    """A function for `checkpoint`: `first` at the first call, then `later`, which leaves statistics as they are."""

    def __init__(self, site: Site, first: Callable[..., Any], later: Callable[..., Any]) -> None:
        self._site, self._later = site, later
        self._first: Callable[..., Any] | None = first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site, run, self._first = self._site, self._first, None
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        with site.watch.guard.keeping(site.piece.name, tensors):
            if run is None:
                with frozen_statistics(site.norms):
                    return self._later(*args, **kwargs)
            with site.watch.buffers_of(site.piece.name, site.modules):
                return run(*args, **kwargs)


def sequential_forward(parent: nn.Module, sites: list[Site]) -> Wrapper:
    """Return the forward of an `nn.Sequential` whose runs of children at the sites are recomputed in backward."""
    children = list(children_of(parent).values())
    starts = {site.piece.start: site for site in sites}

    def sequential(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        (value,) = (*args, *kwargs.values())
        index = 0
        while index < len(children):
            site = starts.get(index)
            if site is None or not site.computes_gradients():
                value = children[index](value)  # type: ignore[misc]
                index += 1
            else:
                value = site.run(_chain(site.piece), _chain_again(site.piece), value)
                index += len(site.piece.modules)
        return value

    return sequential


def _chain(piece: Piece) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for module in piece.modules:
            value = module(value)
        return value

    return run


def _chain_again(piece: Piece) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for module in piece.modules:
            value = again(module, module.forward, (value,), {})
        return value

    return run
