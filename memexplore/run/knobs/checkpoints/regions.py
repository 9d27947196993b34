"""Regions: module calls that keep only tensors from outside the region, and are recomputed together in backward.

`torch.utils.checkpoint.checkpoint(use_reentrant=False)` does this for one function; a region does it for calls that
other code makes one after another, such as a model that loops over its layers. In forward, saved-tensor hooks replace
each saved tensor by a `Holder`. The first backward that needs a value runs all calls again, in order, each on the
results of the calls before it, in the random state, autocast and scopes of forward. A test compares the tape with that
of `torch.utils.checkpoint` on the same slices.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from memexplore.run.knobs.applying.scope import Scope, inside, scopes
from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.tensors import version_of

Run = Callable[[tuple[Any, ...], dict[str, Any], list[torch.Tensor]], Any]
"""Runs a module on arguments; the list holds the tensors among them that the region keeps."""


class _Stop(Exception):  # noqa: N818, no error
    """Raised when all tensors that are needed have been recomputed."""


class Holder:
    """Placeholder in the autograd graph for a tensor to recompute."""

    __slots__ = ("__weakref__", "region", "slot", "value")

    def __init__(self, region: Region, slot: ResultSlot | None = None) -> None:
        self.region = region
        self.slot = slot
        self.value: torch.Tensor | None = None

    def unpacked(self) -> torch.Tensor:
        """Return the tensor and drop it: autograd keeps it as long as it needs it."""
        if self.value is None:
            self.region.recompute()
        value, self.value = self.value, None
        if value is None:
            raise RuntimeError(f"{self.region.name} ran differently in backward than in forward")
        return value


class ResultSlot(NamedTuple):
    """Position of a tensor in the results of a region: number of the call, index among its tensors, and the view."""

    call: int
    leaf: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Made(NamedTuple):
    """A result of a call of the region: number of the call, index among its results."""

    call: int
    leaf: int


class _Kept(NamedTuple):
    """A tensor from outside the region, by its number in the call."""

    number: int


class _Call(NamedTuple):
    run: Run
    leaves: tuple[Any, ...]
    spec: Any
    keeper: Any
    """Autograd node that keeps the tensors from outside; saved-tensor hooks set outside the region apply to it."""
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

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        if self.device is not None:
            set_device_states(self.devices, self.states, device_type=self.device)


class Region:
    """Calls that are recomputed together; `name` appears in errors."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.last = -1
        """Position of the last block that joined, set by the user of the region."""
        self._calls: list[_Call] = []
        self._holders: list[weakref.ref[Holder]] = []
        self._asked: list[weakref.ref[Holder]] = []
        self._results: dict[int, _Result] = {}
        self._autocast: list[_Autocast] = []
        self._scopes: tuple[Scope, ...] = ()
        self._was_recomputed = False

    def continues(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether a call with these tensors takes a result of the last call and can join."""
        made = (self._made(tensor) for tensor in tensors)
        follows = any(result is not None and result.call == len(self._calls) - 1 for result in made)
        return follows and not self._was_recomputed and self._autocast == _autocasts(tensors)

    def kept(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return those among tensors that came from outside the region."""
        return [tensor for tensor in tensors if self._made(tensor) is None]

    def call(self, first: Run, later: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `first` now, and record `later`, which runs instead of it in backward."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        outside = self.kept(tensors)
        index_of = {id(tensor): index for index, tensor in enumerate(outside)}
        sources = tuple(self._source(leaf, index_of) for leaf in leaves)
        needs = frozenset(source.call for source in sources if type(source) is _Made)
        if not self._calls:
            self._autocast, self._scopes = _autocasts(tensors), scopes()
        keeper = _Keep.apply(torch.empty(0, requires_grad=True), *outside) if outside else None
        self._calls.append(_Call(later, sources, spec, keeper, _random_state(tensors), needs))
        del leaves, tensors
        with saved_tensors_hooks(self._pack, Holder.unpacked):
            result = first(args, kwargs, outside)
        for leaf, value in enumerate(pytree.tree_leaves(result)):
            if isinstance(value, torch.Tensor):
                made = _Made(len(self._calls) - 1, leaf)
                self._results[id(value)] = _Result(weakref.ref(value), version_of(value), made)
        return result

    def holder(self, tensor: torch.Tensor, made: torch.Tensor) -> Holder | None:
        """Return a placeholder for a view of a result of the region; None if the tensor is not a view of it."""
        result = self._made(made)
        if result is None or tensor.dtype != made.dtype or version_of(tensor) != version_of(made):
            return None
        offset = int(tensor.storage_offset()) - int(made.storage_offset())
        holder = Holder(self, ResultSlot(*result, tuple(tensor.shape), tensor.stride(), offset))
        self._asked.append(weakref.ref(holder))
        return holder

    def recompute(self) -> None:
        """Recompute the values of all placeholders that are alive.

        Raises RuntimeError if the calls save other tensors than in forward.
        """
        self._was_recomputed = True
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
        with (
            contextlib.suppress(_Stop),
            forked,
            self._forward_state(),
            saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
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
            call.state.restore()
            results[number] = pytree.tree_leaves(call.run(args, kwargs, kept))
            del args, kwargs, kept
            for holder in asked:
                slot = holder.slot
                if slot is not None and slot.call == number:
                    value = results[number][slot.leaf].detach()
                    holder.value = value.as_strided(slot.size, slot.stride, value.storage_offset() + slot.offset)

    @staticmethod
    def _arguments(call: _Call, results: dict[int, list[Any]], kept: list[torch.Tensor]) -> Any:
        def leaf(source: Any) -> Any:
            if type(source) is _Made:
                return results[source.call][source.leaf]
            return kept[source.number] if type(source) is _Kept else source

        return pytree.tree_unflatten([leaf(source) for source in call.leaves], call.spec)

    def _source(self, leaf: Any, index_of: dict[int, int]) -> Any:
        """Return where the recomputation gets an argument: from a result, from a kept tensor, or the value itself."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        index = index_of.get(id(leaf))
        return self._made(leaf) if index is None else _Kept(index)

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
    def _forward_state(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, enabled, dtype, caches in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, caches))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(inside(*self._scopes))
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
