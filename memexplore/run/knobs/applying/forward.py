"""The forward of a model: replaced, run inside a context, or given changed inputs, until an undo log is restored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memexplore.run.knobs.applying.undo import UndoLog
from memexplore.torch_internals.dispatch import pytree

Wrapper = Callable[..., Any]
"""Runs instead of a forward: takes the forward, then its positional arguments, then its keyword arguments."""


def wrap_forward(log: UndoLog, module: nn.Module, wrapper: Wrapper) -> None:
    """Make `wrapper(forward, *args, **kwargs)` run instead of `forward(*args, **kwargs)`; the signature stays.

    >>> log, model = UndoLog(), nn.Identity()
    >>> wrap_forward(log, model, lambda forward, value: forward(value) + 1)
    >>> model(1)
    2
    >>> log.restore()
    >>> model(1), "forward" in vars(model)
    (1, False)
    """
    inner = _Inner(module.forward)

    @functools.wraps(inner.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper(inner.forward, *args, **kwargs)

    setattr(forward, _INNER, inner)
    log.set_item(module.__dict__, "forward", forward)


def wrap_innermost_forward(log: UndoLog, module: nn.Module, wrapper: Wrapper) -> None:
    """Do what `wrap_forward` does, inside the wrappers that the module has already.

    For a wrapper that does not call the forward that it gets: those around it still run.

    >>> log, model = UndoLog(), nn.Identity()
    >>> wrap_forward(log, model, lambda forward, value: forward(value) + 1)
    >>> wrap_innermost_forward(log, model, lambda forward, value: 10 * value)
    >>> model(2)
    21
    >>> log.restore()
    >>> model(2)
    2
    """
    innermost, inner = None, getattr(module.forward, _INNER, None)
    while inner is not None:
        innermost, inner = inner, getattr(inner.forward, _INNER, None)
    if innermost is None:
        wrap_forward(log, module, wrapper)
    else:
        log.add(setattr, innermost, "forward", innermost.forward)
        innermost.forward = functools.partial(wrapper, innermost.forward)


class _Inner:
    """The forward that a wrapper gets."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward


_INNER = "memexplore_inner"
"""Attribute of a wrapped forward that holds its `_Inner`."""


def run_forward_inside(log: UndoLog, model: nn.Module, context: Callable[[], Any]) -> None:
    """Run the forward of a model inside a new `context()` at each call.

    >>> log, model = UndoLog(), nn.Linear(2, 2)
    >>> run_forward_inside(log, model, torch.no_grad)
    >>> model(torch.ones(1, 2)).requires_grad
    False
    >>> log.restore()
    """

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    wrap_forward(log, model, run)


def change_inputs(log: UndoLog, model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change each input tensor of a model's forward, those inside lists and dicts too.

    >>> log, model = UndoLog(), nn.Identity()
    >>> change_inputs(log, model, torch.neg)
    >>> model(torch.ones(1))
    tensor([-1.])
    >>> log.restore()
    """

    def changed(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, change, (args, kwargs))

    log.add_pre_hook(model, changed)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first weight or buffer; for a model without any, the GPU if there is one."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
