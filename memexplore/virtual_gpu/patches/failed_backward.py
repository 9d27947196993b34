"""Empty the queue of the autograd engine after a backward pass that failed, so that nothing of its graph stays alive.

The engine keeps nodes that are ready to run in a queue for each device (torch/csrc/autograd/engine.cpp). After an error
they stay in the queue until somebody takes them out, with the tensors that they have saved and their gradients. The
queue of a GPU belongs to a thread that waits for the next node and so drops them at once; nodes of a virtual GPU are in
the queue of the thread that calls `backward`, which takes nothing out before its next backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from memexplore.torch_internals.modules import engine_run_backward
from memexplore.torch_internals.tensors import current_autograd_node

_failed: set[int] = set()
"""Threads in which a backward pass has failed, inside of one that runs: their queues have nodes of it."""


def emptying_queue(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, the entry of the autograd engine, that leaves no node of a failed pass in the thread's queue.

    A pass inside of another, as in a reentrant checkpoint, leaves its nodes to the outer one, as on a GPU.
    """
    _leaf()

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException:
            _failed.add(get_ident())
            raise
        finally:
            if get_ident() in _failed and current_autograd_node() is None:
                _failed.discard(get_ident())
                _empty_queue()

    return run_backward


def _empty_queue() -> None:
    """Run a backward pass of a leaf alone: the engine takes nodes whose own pass has ended out of the queue first.

    CompareNodeTaskTime in engine.cpp orders the queue. The pass calls no operator and no hook.
    """
    leaf, gradient = _leaf()
    engine_run_backward((leaf,), (gradient,), False, False, (leaf,), allow_unreachable=True, accumulate_grad=False)


@functools.cache
def _leaf() -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor that requires its gradient, and a gradient; made before anything of torch is replaced."""
    with torch.inference_mode(False):
        return torch.zeros((), device="cpu", requires_grad=True), torch.ones((), device="cpu")
