"""Trace of a step with all activations out of place: which of them may overwrite their input."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from memexplore.run.knobs.inplace_sites.activations import CallSite, Form
from memexplore.run.knobs.inplace_sites.byte_ranges import ByteRange, byte_range, overlap, overlaps_itself
from memexplore.run.knobs.inplace_sites.memory_access import (
    LABEL,
    MemoryAccessMode,
    label_nodes,
    op_text,
    running_lines,
    storage_of,
    user_line,
)
from memexplore.torch_internals.tensors import (
    current_autograd_node,
    next_sequence_number,
    sequence_number_of,
    storage_key,
)


class _Call:
    """One call of an activation function, and why its input must not be overwritten (empty if it may)."""

    def __init__(self, site: CallSite, reason: str = "") -> None:
        self.site = site
        self.reason = reason
        self.kept = 0
        """Bytes that autograd keeps for it out of place, without its output."""
        self.size = 0
        self.covered: ByteRange | None = None
        self.storage: Callable[[], Any] = lambda: None


class Trace(MemoryAccessMode):
    """Runs activations out of place, and finds the activations whose input is not needed afterwards."""

    def __init__(self, forward_runs: Callable[[], bool]) -> None:
        super().__init__(forward_runs)
        self.calls: list[_Call] = []
        self.outside: set[tuple[str, int]] = set()
        """Lines that a checkpoint ran again outside the forward of every observed module."""
        self._watched: dict[int, list[_Call]] = {}
        self._created: dict[int, Any] = {}
        self._lines: dict[int, tuple[Any, CodeType | None, int]] = {}

    def created(self, tensor: torch.Tensor) -> None:
        """Remember a storage that the model's own forward created."""
        if self.forward_runs():
            storage = storage_of(tensor)
            key = storage_key(storage)
            self._created[key] = weakref.ref(storage, lambda _: self._created.pop(key, None))

    def run(self, site: CallSite, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
        """Run an activation out of place, and watch the accesses to its input from then on."""
        first, storage = next_sequence_number(), storage_of(tensor)
        try:
            result, kept = self.run_activation(lambda: run(Form.OUT_OF_PLACE))
        except Exception:
            # A checkpoint ends its recomputation by an exception, inside the last call that it needs.
            self._watch(_Call(site), tensor, storage)
            raise
        if (
            storage is None
            or not isinstance(result, torch.Tensor)
            or storage_key(storage_of(result)) == storage_key(storage)
        ):
            return result  # dropout in eval mode returns its input
        call = _Call(site, self._refusal(tensor, storage_key(storage), result))
        call.kept, call.size = kept, tensor.nbytes
        if not call.reason:
            label_nodes(result.grad_fn, first, site)
        self._watch(call, tensor, storage)
        return result

    def _watch(self, call: _Call, tensor: torch.Tensor, storage: Any) -> None:
        self.calls.append(call)
        if not call.reason and storage is not None:
            key = storage_key(storage)
            call.covered = byte_range(tensor)
            call.storage = weakref.ref(storage, lambda _: self._watched.pop(key, None))
            self._watched.setdefault(key, []).append(call)

    def _refusal(self, tensor: torch.Tensor, key: int, result: torch.Tensor) -> str:
        covered = byte_range(tensor)
        if key not in self._created:
            return "its input existed before the model ran: the batch, a weight, a buffer or a stored tensor"
        if tensor.is_leaf and tensor.requires_grad:
            return "its input is a leaf that needs a gradient"
        if covered is None:
            return "its input is empty"
        if overlaps_itself(covered):
            return "its input is expanded: several of its elements share memory"
        if result.dtype is not tensor.dtype:
            return f"its output is {result.dtype}, its input {tensor.dtype}"
        if result.shape != tensor.shape or result.stride() != tensor.stride():
            return "its output has another memory layout than its input"
        return ""

    def accessed(self, func: Any, tensor: torch.Tensor, key: int, written: bool) -> None:
        """Refuse the calls whose input is accessed."""
        node = current_autograd_node()
        forward = node is None or torch.is_grad_enabled()
        if forward and node is not None and not self.forward_runs():
            self.outside.update(running_lines())
        if forward and torch.is_grad_enabled():
            self._lines.setdefault(next_sequence_number() - 1, (func, *user_line()))
        watched = self._watched.get(key)
        if not watched:
            return
        covered = byte_range(tensor)
        for call in watched:
            if call.reason or covered is None or call.covered is None or not overlap(call.covered, covered):
                continue
            if not forward and node.metadata.get(LABEL) == call.site:
                call.kept, call.size = call.kept + call.size, 0
                continue  # the in-place form keeps its output instead
            if forward:
                verb = "overwritten" if written else "read"
                call.reason = f"its input is {verb} again by {op_text(func, *user_line())}"
            else:
                made_by = self._lines.get(sequence_number_of(node))
                op = op_text(*made_by) if made_by is not None else node.name()
                call.reason = f"its input is kept for the backward pass of {op}"

    def returned(self, values: list[Any]) -> None:
        """Refuse the calls whose input the step returned: it may be read."""
        for tensor, key, _ in self.with_storages(values, False):
            covered = byte_range(tensor)
            for call in self._watched.get(key, ()):
                if not call.reason and covered and call.covered and overlap(call.covered, covered):
                    call.reason = "its input is what the step returns"

    def exposed(self, tensor: torch.Tensor, method: str) -> None:
        """Refuse the calls whose input a method exposed: its memory can be read without an op from now on."""
        for _, key, _ in self.with_storages((tensor,), False):
            self._created.pop(key, None)
            for call in self._watched.get(key, ()):
                call.reason = call.reason or f"its input is read again through {method}"

    def kept_bytes(self) -> dict[CallSite, list[int]]:
        """Return the bytes that autograd keeps in addition to the output, for each call of a call site."""
        kept: dict[CallSite, list[int]] = {}
        for call in self.calls:
            kept.setdefault(call.site, []).append(call.kept)
        return kept

    def with_live_input(self) -> list[_Call]:
        """Return the calls whose input is still alive."""
        return [call for call in self.calls if not call.reason and call.storage() is not None]
