"""Memory accesses of a step: a dispatch mode that reports the storages each op creates, reads and writes."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from memexplore.text.package import FOLDER
from memexplore.torch_internals.dispatch import DisableTorchFunction, TorchDispatchMode, schema_or_none
from memexplore.torch_internals.tensors import next_sequence_number, sequence_number_of, storage_key, untyped_storage

LABEL = "memexplore.activation"
"""Key of the label that `label_nodes` writes into the metadata of autograd nodes."""
_LIBRARIES = f"{Path(torch.__file__).parent}{os.sep}", f"{FOLDER}{os.sep}"


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def storage_of(tensor: torch.Tensor) -> Any:
    """Return the storage of a tensor, None for a wrapper without memory of its own."""
    try:
        with DisableTorchFunction():
            return untyped_storage(tensor)
    except NotImplementedError:
        return None


class _OpTraits:
    """Which arguments an op writes to, and whether it reads only shapes."""

    __slots__ = ("reads_only_shapes", "written_names", "written_positions")

    def __init__(self, func: Any) -> None:
        schema = schema_or_none(func)
        arguments = schema.arguments if schema is not None else ()
        written = [value.alias_info is not None and value.alias_info.is_write for value in arguments]
        self.written_positions = {number for number, writes in enumerate(written) if writes}
        self.written_names = {value.name for value, writes in zip(arguments, written, strict=True) if writes}
        name = schema.name.split("::")[-1] if schema is not None else ""
        self.reads_only_shapes = name.endswith("_like") or name.startswith(("new_", "sym_")) or name == "is_same_size"


class MemoryAccessMode(TorchDispatchMode):
    """Calls `created` for each storage that an op creates, and `accessed` for each tensor it reads or writes."""

    def __init__(self, forward_runs: Callable[[], bool]) -> None:
        super().__init__()
        self.forward_runs = forward_runs
        self._created_by_activation: list[tuple[Any, int]] | None = None
        """Storages created by the activation that is running, with their bytes; None while none runs."""
        self._traits: dict[Any, _OpTraits] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction():
            result = func(*args, **kwargs)
            if func.namespace != "prim":
                self._observe(func, args, kwargs, result)
        return result

    def _observe(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = _OpTraits(func)
        inputs: list[tuple[torch.Tensor, int, bool]] = []
        for number, value in enumerate(args):
            inputs += self.with_storages((value,), number in traits.written_positions)
        for name, value in kwargs.items():
            inputs += self.with_storages((value,), name in traits.written_names)
        keys = {key for _, key, _ in inputs}
        outputs = self.with_storages((result,), False)
        for tensor, key, _ in outputs:
            if key not in keys:
                self.created(tensor)
                if self._created_by_activation is not None:
                    storage = storage_of(tensor)
                    self._created_by_activation.append((weakref.ref(storage), storage.nbytes()))
        written = any(writes for *_, writes in inputs)
        # A view, or a `contiguous` without effect, reads no element.
        if traits.reads_only_shapes or (outputs and not written and all(key in keys for _, key, _ in outputs)):
            return
        for tensor, key, writes in inputs:
            self.accessed(func, tensor, key, writes)

    def run_activation(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """Return the result of an activation, and the bytes that it keeps for backward in addition to its result."""
        self._created_by_activation = []
        try:
            result = run()
            own = storage_of(result) if isinstance(result, torch.Tensor) else None
            created = self._created_by_activation
            alive = {id(storage): size for ref, size in created if (storage := ref()) is not None}
            return result, sum(alive.values()) - alive.get(id(own), 0)
        finally:
            self._created_by_activation = None

    @staticmethod
    def with_storages(values: Any, writes: bool) -> list[tuple[torch.Tensor, int, bool]]:
        """Return the tensors among values with the identifier of their storage, and `writes`."""
        return [
            (tensor, storage_key(storage), writes)
            for tensor in _tensors(values)
            if (storage := storage_of(tensor)) is not None
        ]

    def created(self, tensor: torch.Tensor) -> None:
        """Handle a storage that an op created."""

    def accessed(self, func: Any, tensor: torch.Tensor, key: int, written: bool) -> None:
        """Handle a read or a write of a tensor's memory by an op."""


def label_nodes(node: Any, first: int, label: Any) -> None:
    """Write a label on the autograd nodes of an activation: all that lead to `node`, from a sequence number on.

    In a checkpoint the nodes of the first forward read what the second forward saved, so the label names the call.
    """
    last, open_nodes, seen = next_sequence_number(), [node], set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen or not first <= sequence_number_of(node) < last:
            continue
        seen.add(node)
        node.metadata[LABEL] = label
        open_nodes += [following for following, _ in node.next_functions]


def user_line() -> tuple[CodeType | None, int]:
    """Return the innermost line that belongs neither to torch nor to memexplore."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back  # type: ignore[assignment]
    return (frame.f_code, frame.f_lineno) if frame is not None else (None, 0)


def running_lines() -> Iterator[tuple[str, int]]:
    """Yield file and line of every frame of this thread."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def op_text(func: Any, code: CodeType | None, line: int) -> str:
    """Return an op and the line that called it, such as "aten::add at model.py:12"."""
    name = str(schema_or_none(func) or func).split("(")[0].split(".")[0]
    return f"{name} at {Path(code.co_filename).name}:{line}" if code is not None else name
