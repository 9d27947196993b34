"""Around a model's forward: a context it runs in, a change to its inputs; both off again after the block."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memexplore.torch_internals.dispatch import pytree


@contextlib.contextmanager
def forward_inside(model: torch.nn.Module, context: Callable[[], Any]) -> Iterator[None]:
    """Run the forward of a model inside a new `context()` each time it is called, for the block.

    >>> model = torch.nn.Linear(2, 2)
    >>> with forward_inside(model, torch.no_grad):
    ...     print(model(torch.ones(1, 2)).requires_grad)
    False
    >>> "forward" in model.__dict__
    False
    """
    before = {name: value for name, value in model.__dict__.items() if name == "forward"}
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with context():
            return inner(*args, **kwargs)

    model.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.__dict__["forward"]
        model.__dict__.update(before)


@contextlib.contextmanager
def inputs_through(model: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Give a model's forward every input tensor changed, those inside lists and dicts too, for the block.

    >>> model = torch.nn.Identity()
    >>> with inputs_through(model, torch.neg):
    ...     print(model(torch.ones(1)))
    tensor([-1.])
    """

    def before_forward(_: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, change, (args, kwargs))

    hook = model.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model is: the device of its first weight or buffer; where it has none, the GPU if there is one."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
