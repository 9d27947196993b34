"""Which memory every op of a step reads and writes, so that nothing is overwritten that is read again."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import memexplore
from memexplore.knobs.inplace.activations import Form, Place
from memexplore.knobs.inplace.byte_ranges import Extent, extent, overlap, overlaps_itself
from memexplore.torch_internals.dispatch import DisableTorchFunction, TorchDispatchMode, schema_or_none
from memexplore.torch_internals.tensors import (
    current_autograd_node,
    next_sequence_number,
    sequence_number_of,
    storage_key,
    untyped_storage,
    version_of,
)

# GONE  # type: ignore[attr-defined]
_OWN = tuple(f"{Path(package.__file__).parent}{os.sep}" for package in (torch, memexplore))  # type: ignore[arg-type]
_MARK = "memexplore.activation"


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def storage_of(tensor: torch.Tensor) -> Any:
    """The storage of a tensor, None for a wrapper without memory of its own."""
    try:
        with DisableTorchFunction():
            return untyped_storage(tensor)
    except NotImplementedError:
        return None


class _Func:
    """What has to be known of an op, worked out once."""

    __slots__ = ("places", "shapes_only", "words")

    def __init__(self, func: Any) -> None:
        schema = schema_or_none(func)
        arguments = schema.arguments if schema is not None else ()
        written = [value.alias_info is not None and value.alias_info.is_write for value in arguments]
        self.places = {number for number, writes in enumerate(written) if writes}
        self.words = {value.name for value, writes in zip(arguments, written, strict=True) if writes}
        name = schema.name.split("::")[-1] if schema is not None else ""
        self.shapes_only = name.endswith("_like") or name.startswith(("new_", "sym_")) or name == "is_same_size"


class _Ops(TorchDispatchMode):
    """Tells a subclass of every memory that an op reads or writes, and of every storage that one makes."""

    def __init__(self, forward_runs: Callable[[], bool]) -> None:
        super().__init__()
        self.forward_runs = forward_runs
        self.during: list[tuple[Any, int]] | None = None
        """Storages made by the activation that is running, with their bytes."""
        self._funcs: dict[Any, _Func] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction():
            result = func(*args, **kwargs)
            if func.namespace != "prim":
                self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        known = self._funcs.get(func)
        if known is None:
            known = self._funcs[func] = _Func(func)
        inputs: list[tuple[torch.Tensor, int, bool]] = []
        for number, value in enumerate(args):
            inputs += self._keyed((value,), number in known.places)
        for name, value in kwargs.items():
            inputs += self._keyed((value,), name in known.words)
        keys = {key for _, key, _ in inputs}
        outputs = self._keyed((result,), False)
        for tensor, key, _ in outputs:
            if key not in keys:
                self.made(tensor)
                if self.during is not None:
                    storage = storage_of(tensor)
                    self.during.append((weakref.ref(storage), storage.nbytes()))
        written = any(writes for *_, writes in inputs)
        # A view, or a `contiguous` that had nothing to do, looks at no value.
        if known.shapes_only or (outputs and not written and all(key in keys for _, key, _ in outputs)):
            return
        for tensor, key, writes in inputs:
            self.accessed(func, tensor, key, writes)

    def kept(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """What an activation answers, and how many bytes it made beside that are still alive: kept for backward."""
        self.during = []
        try:
            result = run()
            own = storage_of(result) if isinstance(result, torch.Tensor) else None
            made = {id(storage): size for one, size in self.during if (storage := one()) is not None}
            return result, sum(made.values()) - made.get(id(own), 0)
        finally:
            self.during = None

    @staticmethod
    def _keyed(values: Any, writes: bool) -> list[tuple[torch.Tensor, int, bool]]:
        return [
            (tensor, storage_key(storage), writes)
            for tensor in _tensors(values)
            if (storage := storage_of(tensor)) is not None
        ]

    def made(self, tensor: torch.Tensor) -> None:
        """An op made a storage."""

    def accessed(self, func: Any, tensor: torch.Tensor, key: int, written: bool) -> None:
        """An op read a tensor's memory or wrote it."""


class _Call:
    """A call of an activation function, and why its input must stay, if it must."""

    def __init__(self, place: Place, reason: str = "") -> None:
        self.place = place
        self.reason = reason
        self.kept = 0
        """Bytes that autograd keeps for it out of place, its output aside."""
        self.size = 0
        self.extent: Extent | None = None
        self.storage: Callable[[], Any] = lambda: None


class Trace(_Ops):
    """Runs activations out of place and finds whose input nobody needs afterwards."""

    def __init__(self, forward_runs: Callable[[], bool]) -> None:
        super().__init__(forward_runs)
        self.calls: list[_Call] = []
        self.outside: set[tuple[str, int]] = set()
        """Lines that a checkpoint ran again while no forward of a module ran that is known."""
        self._watched: dict[int, list[_Call]] = {}
        self._made: dict[int, Any] = {}
        self._lines: dict[int, tuple[Any, CodeType | None, int]] = {}

    def made(self, tensor: torch.Tensor) -> None:
        """Remember what the model's own forward made."""
        if self.forward_runs():
            storage = storage_of(tensor)
            key = storage_key(storage)
            self._made[key] = weakref.ref(storage, lambda _: self._made.pop(key, None))

    def around(self, place: Place, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
        """Run an activation out of place and watch its input from then on."""
        first, storage = next_sequence_number(), storage_of(tensor)
        try:
            result, kept = self.kept(lambda: run(Form.OUT_OF_PLACE))
        except Exception:
            # A checkpoint ends its recomputation by an exception, in the midst of the last call that it needs.
            self._watch(_Call(place), tensor, storage)
            raise
        if (
            storage is None
            or not isinstance(result, torch.Tensor)
            or storage_key(storage_of(result)) == storage_key(storage)
        ):
            return result  # dropout in eval mode hands its input back
        call = _Call(place, self._forbidden(tensor, storage_key(storage), result))
        call.kept, call.size = kept, tensor.nbytes
        if not call.reason:
            _mark(result.grad_fn, first, place)
        self._watch(call, tensor, storage)
        return result

    def _watch(self, call: _Call, tensor: torch.Tensor, storage: Any) -> None:
        self.calls.append(call)
        if not call.reason and storage is not None:
            key = storage_key(storage)
            call.extent = extent(tensor)
            call.storage = weakref.ref(storage, lambda _: self._watched.pop(key, None))
            self._watched.setdefault(key, []).append(call)

    def _forbidden(self, tensor: torch.Tensor, key: int, result: torch.Tensor) -> str:
        covered = extent(tensor)
        if key not in self._made:
            return "its input was there before the model ran: the batch, a weight, a buffer or something kept"
        if tensor.is_leaf and tensor.requires_grad:
            return "its input is a leaf that needs a gradient"
        if covered is None:
            return "its input is empty"
        if overlaps_itself(covered):
            return "its input is expanded: several of its elements share memory"
        if result.dtype is not tensor.dtype:
            return f"its output is {result.dtype}, its input {tensor.dtype}"
        if result.shape != tensor.shape or result.stride() != tensor.stride():
            return "its output lies otherwise in memory than its input"
        return ""

    def accessed(self, func: Any, tensor: torch.Tensor, key: int, written: bool) -> None:
        """Find the calls whose input this is."""
        node = current_autograd_node()
        forward = node is None or torch.is_grad_enabled()
        if forward and node is not None and not self.forward_runs():
            self.outside.update(_lines())
        if forward and torch.is_grad_enabled():
            self._lines.setdefault(next_sequence_number() - 1, (func, *_user_line()))
        watched = self._watched.get(key)
        if not watched:
            return
        covered = extent(tensor)
        for call in watched:
            if call.reason or covered is None or call.extent is None or not overlap(call.extent, covered):
                continue
            if not forward and node.metadata.get(_MARK) == call.place:
                call.kept, call.size = call.kept + call.size, 0
                continue  # the form in place keeps its output instead
            if forward:
                verb = "overwritten" if written else "read"
                call.reason = f"its input is {verb} again by {_words(func, *_user_line())}"
            else:
                made_by = self._lines.get(sequence_number_of(node))
                words = _words(*made_by) if made_by is not None else node.name()
                call.reason = f"its input is kept for the backward pass of {words}"

    def returned(self, values: list[Any]) -> None:
        """The step gave these back: they may be read."""
        for tensor, key, _ in self._keyed(values, False):
            covered = extent(tensor)
            for call in self._watched.get(key, ()):
                if not call.reason and covered and call.extent and overlap(call.extent, covered):
                    call.reason = "its input is what the step returns"

    def handed_out(self, tensor: torch.Tensor, how: str) -> None:
        """Somebody can read a tensor's memory from now on without any op."""
        for _, key, _ in self._keyed((tensor,), False):
            self._made.pop(key, None)
            for call in self._watched.get(key, ()):
                call.reason = call.reason or f"its input is read again through {how}"

    def costs(self) -> dict[Place, list[int]]:
        """Bytes that autograd keeps beside the output for each call of a place."""
        found: dict[Place, list[int]] = {}
        for call in self.calls:
            found.setdefault(call.place, []).append(call.kept)
        return found

    def held(self) -> list[_Call]:
        """Calls whose input is still alive."""
        return [call for call in self.calls if not call.reason and call.storage() is not None]


def _mark(node: Any, first: int, mark: Any) -> None:
    """Write on the autograd nodes that a call made whose they are: on those from a sequence number on.

    In a checkpoint the nodes of the first forward read what the second one saved, so the mark names the place.
    """
    last, open_nodes, seen = next_sequence_number(), [node], set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen or not first <= sequence_number_of(node) < last:
            continue
        seen.add(node)
        node.metadata[_MARK] = mark
        open_nodes += [following for following, _ in node.next_functions]


class _Write(NamedTuple):
    sequence: int
    """Autograd nodes with a lower number were made before."""
    extent: Extent
    place: Place | None
    """None for a write of the model's own."""


class Check(_Ops):
    """Runs a step with activations in place, and finds all of those that autograd or a saved tensor speaks against.

    Saved tensors are told by their version counters, which need `pack` and `unpack` as hooks; those that a checkpoint
    holds have no hooks, and are told by what autograd nodes read.
    """

    def __init__(self, forward_runs: Callable[[], bool], new: frozenset[Place], costs: dict[Place, list[int]]) -> None:
        super().__init__(forward_runs)
        self._costs = {place: list(reversed(kept)) for place, kept in costs.items()}
        self.refused: dict[Place, str] = {}
        self._new = new
        self._place: Place | None = None
        self._input = 0
        self._first = 0
        self._windows: list[tuple[int, int, Place]] = []
        self._writes: dict[int, list[_Write]] = {}
        self._alive: dict[int, Any] = {}

    def around(self, place: Place, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
        """Run an activation in place; where torch refuses, out of place."""
        storage = storage_of(tensor)
        if place in self.refused or storage is None:
            return run(Form.OUT_OF_PLACE)
        self._place, self._input, self._first = place, storage_key(storage), next_sequence_number()
        try:
            result, kept = self.kept(lambda: run(Form.IN_PLACE))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The exception by which a checkpoint ends its recomputation is none of these.
            self._refuse(place, f"torch refuses: {str(error).splitlines()[0].rstrip('.')}")
            self._place = None
            return run(Form.OUT_OF_PLACE)
        except Exception:
            self._write_of(place, tensor, storage)
            raise
        finally:
            self._place = None
        self._windows.append((self._first, next_sequence_number(), place))
        costs = self._costs.get(place)
        if costs and kept > costs.pop():
            self._refuse(
                place, "in place it keeps more for its backward pass than it saves: a mask or a copy of its input"
            )
        if not isinstance(result, torch.Tensor) or storage_key(storage_of(result)) != storage_key(storage):
            self._refuse(place, "it takes new memory even so")
        else:
            number = self._write_of(place, tensor, storage)
            _mark(result.grad_fn, self._first, (place, number))
        return result

    def _write_of(self, place: Place, tensor: torch.Tensor, storage: Any) -> int:
        """Note that an activation overwrote its input; the answer counts how often this one did before."""
        covered = extent(tensor)
        if covered is None:
            return 0
        writes = self._written(tensor, storage_key(storage), _Write(self._first, covered, place))
        return sum(write.place == place for write in writes) - 1

    def _refuse(self, place: Place, reason: str) -> bool:
        if place in self._new:
            self.refused.setdefault(place, reason)
        return place in self._new

    def accessed(self, func: Any, tensor: torch.Tensor, key: int, written: bool) -> None:
        """Note a write of the forward pass; find what the backward pass reads too late."""
        node = current_autograd_node()
        if self._place is not None:
            if key == self._input and func is torch.ops.aten.clone.default:
                self._refuse(self._place, "its backward pass needs its input: autograd would copy it, nothing is saved")
        elif node is None or torch.is_grad_enabled():
            covered = extent(tensor) if written else None
            if covered is not None:
                self._written(tensor, key, _Write(next_sequence_number() - 1, covered, None))
        elif key in self._writes and (mark := node.metadata.get(_MARK)) is not None:
            place, number = mark
            writes, covered = self._writes[key], extent(tensor)
            own = [index for index, write in enumerate(writes) if write.place == place]
            if number < len(own) and covered is not None:
                later = [write for write in writes[own[number] + 1 :] if overlap(covered, write.extent)]
                self._overwritten(later, place)

    def _written(self, tensor: torch.Tensor, key: int, write: _Write) -> list[_Write]:
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage_of(tensor), lambda _: self._forget(key))
        writes = self._writes.setdefault(key, [])
        writes.append(write)
        return writes

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self._writes.pop(key, None)

    def _overwritten(self, later: list[_Write], keeper: Place | None) -> None:
        """What was kept, by an activation or by another op (None), was overwritten since by all these."""
        for write in reversed(later):
            if write.place is not None:
                whose = f"what {keeper} keeps" if keeper is not None else "kept"
                if self._refuse(write.place, f"its input is {whose} for the backward pass"):
                    return
        if later and keeper is not None:
            self._refuse(keeper, "its output is overwritten, and would be kept for its backward pass")

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd keeps a tensor."""
        return tensor, version_of(tensor), self._first if self._place is not None else next_sequence_number() - 1

    def unpack(self, kept: Any) -> torch.Tensor:
        """Autograd wants it back."""
        tensor, version, number = kept
        storage = storage_of(tensor)
        if version_of(tensor) != version and storage is not None:
            later = [write for write in self._writes.get(storage_key(storage), ()) if write.sequence > number]
            keeper = next((place for first, last, place in self._windows if first <= number < last), None)
            self._overwritten(later, keeper)
        return tensor


def _user_line() -> tuple[CodeType | None, int]:
    """The innermost line that is neither torch's nor ours."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back  # type: ignore[assignment]
    return (frame.f_code, frame.f_lineno) if frame is not None else (None, 0)


def _lines() -> Iterator[tuple[str, int]]:
    """All lines that are running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _words(func: Any, code: CodeType | None, line: int) -> str:
    name = str(schema_or_none(func) or func).split("(")[0].split(".")[0]
    return f"{name} at {Path(code.co_filename).name}:{line}" if code is not None else name
