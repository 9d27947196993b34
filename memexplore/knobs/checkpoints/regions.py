"""Regions: module calls that keep only what came from outside, and are run again together in backward.

What `torch.utils.checkpoint.checkpoint(use_reentrant=False)` does with one function, done with calls that somebody else
makes one after another, such as a model that loops over its layers. The calls of a region share the saved-tensor hooks
that leave nothing behind; the first backward that needs a value runs all calls again, in order, each on the results of
those before it, in the random state and autocast of the first time. A test compares the tape with that of
`torch.utils.checkpoint` on the same slices.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.tensors import version_of

Run = Callable[[tuple[Any, ...], dict[str, Any], list[torch.Tensor]], Any]
"""Runs a module on arguments; the list has the tensors among them that the region keeps."""


class _Stop(Exception):  # noqa: N818, no error
    """All that was asked for has been computed again."""


class Holder:
    """Stands in the graph for a tensor that is computed again."""

    __slots__ = ("__weakref__", "place", "region", "value")

    def __init__(self, region: Region, place: Place | None = None) -> None:
        self.region = region
        self.place = place
        self.value: torch.Tensor | None = None

    def unpacked(self) -> torch.Tensor:
        """The tensor, which is forgotten: autograd keeps it as long as it needs it."""
        if self.value is None:
            self.region.run_again()
        value, self.value = self.value, None
        if value is None:
            raise RuntimeError(f"{self.region.name} ran another way in backward than in forward")
        return value


class Place(NamedTuple):
    """Where in a region's results a tensor lies."""

    call: int
    leaf: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Made(NamedTuple):
    """A result of a call of the region, by number."""

    call: int
    leaf: int


class _Kept(NamedTuple):
    """A tensor from outside, by number."""

    number: int


class _Call(NamedTuple):
    run: Run
    leaves: tuple[Any, ...]
    spec: Any
    keeper: Any
    """An autograd node that keeps the tensors from outside; the hooks that are on around it apply."""
    state: _State
    needs: frozenset[int]
    """Numbers of the calls whose results it takes."""


class _Result(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    version: int
    made: _Made


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marker: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on what this function returns")


class _Autocast(NamedTuple):
    device: str
    enabled: bool
    dtype: torch.dtype
    caches: bool


class _State(NamedTuple):
    """Random state before a call."""

    host: torch.Tensor
    device: str | None
    devices: tuple[int, ...] = ()
    states: tuple[torch.Tensor, ...] = ()

    def put(self) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            set_device_states(self.devices, self.states, device_type=self.device)


class Region:
    """Calls that are run again together."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Whom an error speaks of."""
        self.last = -1
        """Number that the maker of the region gave the last call."""
        self._calls: list[_Call] = []
        self._holders: list[weakref.ref[Holder]] = []
        self._asked: list[weakref.ref[Holder]] = []
        self._results: dict[int, _Result] = {}
        self._autocast: list[_Autocast] = []
        self._ran_again = False

    def takes(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a call with some tensors goes on where the last call ended."""
        made = (self._made(tensor) for tensor in tensors)
        follows = any(result is not None and result.call == len(self._calls) - 1 for result in made)
        return follows and not self._ran_again and self._autocast == _autocasts(tensors)

    def kept(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Those among some tensors that came from outside."""
        return [tensor for tensor in tensors if self._made(tensor) is None]

    def call(self, first: Run, later: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `first` now and note that `later` is to be run in its place in backward."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outside = self.kept(tensors)
        number = {id(tensor): place for place, tensor in enumerate(outside)}
        marked = tuple(self._mark(leaf, number) for leaf in leaves)
        needs = frozenset(mark.call for mark in marked if type(mark) is _Made)
        if not self._calls:
            self._autocast = _autocasts(tensors)
        keeper = _Keep.apply(torch.empty(0, requires_grad=True), *outside) if outside else None
        self._calls.append(_Call(later, marked, spec, keeper, _random_state(tensors), needs))
        del leaves, tensors
        with saved_tensors_hooks(self._pack, Holder.unpacked):
            result = first(args, kwargs, outside)
        for leaf, value in enumerate(pytree.tree_leaves(result)):
            if isinstance(value, torch.Tensor):
                made = _Made(len(self._calls) - 1, leaf)
                self._results[id(value)] = _Result(weakref.ref(value), version_of(value), made)
        return result

    def holder(self, tensor: torch.Tensor, made: torch.Tensor) -> Holder | None:
        """What stands for a tensor that lies in the memory of a result of the region, None where it does not."""
        result = self._made(made)
        if result is None or tensor.dtype != made.dtype or version_of(tensor) != version_of(made):
            return None
        offset = int(tensor.storage_offset()) - int(made.storage_offset())
        place = Place(*result, tuple(tensor.shape), tensor.stride(), offset)
        holder = Holder(self, place)
        self._asked.append(weakref.ref(holder))
        return holder

    def run_again(self) -> None:
        """Compute all that somebody still holds.

        Raises RuntimeError where the calls save other tensors than in forward.
        """
        self._ran_again = True
        asked = [holder for ref in self._asked if (holder := ref()) is not None and holder.value is None]
        filled = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal filled
            if filled == len(self._holders):
                raise RuntimeError(f"{self.name} saves more tensors in backward than in forward")
            holder = self._holders[filled]()
            filled += 1
            tensor = tensor.detach() if tensor.requires_grad else tensor
            if holder is not None:
                holder.value = tensor
            if filled == len(self._holders) and not asked:
                raise _Stop
            return tensor

        devices = self._calls[0].state
        forked = torch.random.fork_rng(devices.devices, device_type=devices.device or "cuda")
        with contextlib.suppress(_Stop), forked, self._as_then(), saved_tensors_hooks(pack, lambda tensor: tensor):
            self._replay(asked)
        if filled != len(self._holders):
            raise RuntimeError(f"{self.name} saves fewer tensors in backward than in forward: {filled}")

    def _replay(self, asked: list[Holder]) -> None:
        results: dict[int, list[Any]] = {}
        for number, call in enumerate(self._calls):
            kept = list(call.keeper.grad_fn.saved_tensors) if call.keeper is not None else []
            args, kwargs = self._arguments(call, results, kept)
            needed = frozenset[int]().union(*(later.needs for later in self._calls[number + 1 :]))
            for unneeded in set(results) - needed:
                del results[unneeded]
            call.state.put()
            results[number] = pytree.tree_leaves(call.run(args, kwargs, kept))
            del args, kwargs, kept
            for holder in asked:
                place = holder.place
                if place is not None and place.call == number:
                    value = results[number][place.leaf].detach()
                    holder.value = value.as_strided(place.size, place.stride, value.storage_offset() + place.offset)

    @staticmethod
    def _arguments(call: _Call, results: dict[int, list[Any]], kept: list[torch.Tensor]) -> Any:
        def leaf(mark: Any) -> Any:
            if type(mark) is _Made:
                return results[mark.call][mark.leaf]
            return kept[mark.number] if type(mark) is _Kept else mark

        return pytree.tree_unflatten([leaf(mark) for mark in call.leaves], call.spec)

    def _mark(self, leaf: Any, number: dict[int, int]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        place = number.get(id(leaf))
        return self._made(leaf) if place is None else _Kept(place)

    def _made(self, tensor: torch.Tensor) -> _Made | None:
        result = self._results.get(id(tensor))
        if result is None or result.tensor() is not tensor or result.version != version_of(tensor):
            return None
        return result.made

    def _pack(self, tensor: torch.Tensor) -> Holder:
        holder = Holder(self)
        self._holders.append(weakref.ref(holder))
        return holder

    @contextlib.contextmanager
    def _as_then(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype, caches in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, caches))
            stack.enter_context(torch.enable_grad())
            yield


def _device(tensors: list[torch.Tensor]) -> str | None:
    return next((tensor.device.type for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)


def _random_state(tensors: list[torch.Tensor]) -> _State:
    device = _device(tensors)
    if device is None:
        return _State(torch.get_rng_state(), None)
    devices, states = get_device_states(*{tensor.device: tensor for tensor in tensors}.values())
    return _State(torch.get_rng_state(), device, tuple(devices), tuple(states))


def _autocasts(tensors: list[torch.Tensor]) -> list[_Autocast]:
    caches = torch.is_autocast_cache_enabled()
    return [
        _Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), caches)
        for device in ("cpu", _device(tensors))
        if device is not None and torch.amp.is_autocast_available(device)
    ]
