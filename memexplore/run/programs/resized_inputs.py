"""Another number of samples for a program whose batch is in none of its variables: at the lines that make the batch.

A run as written on a virtual GPU shows which calls of torch make the tensors that become a model's inputs, and those
that meet its outputs, such as labels. Another run makes these calls with the other number: ``torch.randn(32, 8)`` with
another first argument, ``x[i : i + 32]`` with another slice, ``images.cuda()`` with fewer rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from memexplore.run.programs.hooks import OutermostCalls, tensors_of
from memexplore.text.package import FOLDER
from memexplore.torch_internals.dispatch import pytree

_TORCH, _OWN = str(torch.__path__[0]), str(FOLDER)
_MOST_NUMBERS = 8
"""Length up to which a list of numbers may be a shape."""


class Site(NamedTuple):
    """A call of torch in a program."""

    filename: str
    line: int
    function: str


Sites = frozenset[Site]


class Tracing(TorchFunctionMode):
    """Notes which calls of torch make the batch of a program that runs as written, where it has `size` samples."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.sites: set[Site] = set()
        """Calls that make what models are called with, or what their outputs meet."""
        self._size = size
        self._origins = WeakIdKeyDictionary()
        """Tensor -> the calls in which its samples were cut out or made."""
        self.calls: OutermostCalls | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.calls is None or self.calls.depth:
            return result
        used = tensors_of((args, kwargs))
        if any(value.requires_grad and not value.is_leaf for value in used):
            self._need(used)
            return result
        origins = {site for value in used for site in self._origins.get(value, ())}
        for value in tensors_of(result):
            if value.requires_grad:
                continue
            own = origins or ({_site(func)} if value.dim() and len(value) == self._size else set())
            if own:
                self._origins[value] = own
        return result

    def before_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what a model or a loss is called with."""
        self._need(tensors_of((args, kwargs)))

    def _need(self, values: list[torch.Tensor]) -> None:
        for value in values:
            self.sites |= set(self._origins.get(value, ()))


class Resizing(TorchFunctionMode):
    """Makes the calls at some sites with another number of samples."""

    def __init__(self, sites: Sites, written: int, size: int, calls: OutermostCalls) -> None:
        super().__init__()
        self._sites, self._written, self._size, self._calls = sites, written, size, calls
        self._files = {site.filename for site in sites}
        self._resized = WeakIdKeyDictionary()
        """Tensors that have the other number of samples already."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._calls.depth:
            return func(*args, **kwargs)
        used = tensors_of((args, kwargs))
        if any(value in self._resized for value in used):
            result = func(*args, **kwargs)
        elif _site(func) in self._sites:
            result = self._with_size(func, args, kwargs)
        else:
            return func(*args, **kwargs)
        for value in tensors_of(result):
            self._resized[value] = None
        return result

    def _with_size(self, func: Any, args: Any, kwargs: Any) -> Any:
        if any(self._is_whole(value) for value in tensors_of((args, kwargs))):
            args, kwargs = self._rows_of((args, kwargs))
            return func(*args, **kwargs)
        for changed_args, changed_kwargs in self._changed(args, kwargs):
            if self._gives_size(func, changed_args, changed_kwargs):
                return func(*changed_args, **changed_kwargs)
        return self._rows_of(func(*args, **kwargs))

    def _changed(self, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the arguments with the other number of samples in one place after the other."""
        for position, value in enumerate(args):
            for changed in self._values(value):
                yield (*args[:position], changed, *args[position + 1 :]), kwargs
        for name, value in kwargs.items():
            for changed in self._values(value):
                yield args, {**kwargs, name: changed}

    def _values(self, value: Any) -> Iterator[Any]:
        """Yield what an argument can be with the other number of samples."""
        if type(value) is int and value == self._written:
            yield self._size
        elif isinstance(value, slice) and type(value.stop) is int and value.step in (None, 1):
            if value.stop - (value.start or 0) == self._written:
                yield slice(value.start, (value.start or 0) + self._size)
        elif isinstance(value, tuple | list) and len(value) <= _MOST_NUMBERS:
            for position, part in enumerate(value):
                for changed in self._values(part):
                    yield type(value)((*value[:position], changed, *value[position + 1 :]))

    def _gives_size(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Return whether the first result of a call has as many samples, by running it on tensors without memory."""
        meta = torch.device("meta")
        if "device" in kwargs or not tensors_of((args, kwargs)):
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"} | {"device": meta}
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda value: value.to(meta), (args, kwargs))
        try:
            result = tensors_of(func(*args, **kwargs))
        except Exception:
            return False
        return bool(result) and result[0].dim() > 0 and len(result[0]) == self._size

    def _rows_of(self, tree: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self._rows, tree)

    def _is_whole(self, value: torch.Tensor) -> bool:
        return value.dim() > 0 and len(value) == self._written and not value.requires_grad

    def _rows(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the other number of samples; on the CPU the first ones may come again."""
        if not self._is_whole(value) or self._size == self._written:
            return value
        if self._size < self._written:
            return value[: self._size]
        if value.device.type != "cpu":
            raise ValueError(f"a batch of {self._size} is more than the {self._written} samples that are on the GPU")
        return torch.cat([value] * -(-self._size // self._written))[: self._size]


def _site(func: Callable[..., Any]) -> Site:
    """Return the call that runs, by the innermost line that is not of torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _OWN)):
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno, getattr(func, "__name__", str(func)))
