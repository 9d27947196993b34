"""Check of a step with activations in place: which of them overwrite values that the backward pass needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from memexplore.run.knobs.inplace_sites.activations import CallSite, Form
from memexplore.run.knobs.inplace_sites.byte_ranges import ByteRange, byte_range, overlap
from memexplore.run.knobs.inplace_sites.memory_access import (
    LABEL,
    MemoryAccessMode,
    label_nodes,
    storage_of,
)
from memexplore.torch_internals.tensors import current_autograd_node, next_sequence_number, storage_key, version_of


class _Write(NamedTuple):
    """A write to memory in the forward pass."""

    sequence: int
    """Autograd nodes with a lower number were made before the write."""
    covered: ByteRange
    site: CallSite | None
    """None for a write by another op of the model."""


class Check(MemoryAccessMode):
    """Runs a step with activations in place, and finds activations that overwrite values needed by the backward pass.

    An overwritten saved tensor is recognised by its version counter, for which `pack` and `unpack` are saved-tensor
    hooks. Tensors that a checkpoint holds pass no hooks: they are recognised when an autograd node reads them.
    """

    def __init__(
        self, forward_runs: Callable[[], bool], new: frozenset[CallSite], kept_bytes: dict[CallSite, list[int]]
    ) -> None:
        super().__init__(forward_runs)
        self._kept_bytes = {site: list(reversed(sizes)) for site, sizes in kept_bytes.items()}
        self.refused: dict[CallSite, str] = {}
        """Call sites that cannot be in place, and why."""
        self._new = new
        self._running: CallSite | None = None
        self._input = 0
        self._first = 0
        self._windows: list[tuple[int, int, CallSite]] = []
        self._writes: dict[int, list[_Write]] = {}
        self._alive: dict[int, Any] = {}

    def run(self, site: CallSite, tensor: torch.Tensor, run: Callable[[Form], Any]) -> Any:
        """Run an activation in place, or out of place if torch raises."""
        storage = storage_of(tensor)
        if site in self.refused or storage is None:
            return run(Form.OUT_OF_PLACE)
        self._running, self._input, self._first = site, storage_key(storage), next_sequence_number()
        try:
            result, kept = self.run_activation(lambda: run(Form.IN_PLACE))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The exception that ends the recomputation of a checkpoint is not a RuntimeError.
            self._refuse(site, f"torch refuses: {str(error).splitlines()[0].rstrip('.')}")
            self._running = None
            return run(Form.OUT_OF_PLACE)
        except Exception:
            self._write_of(site, tensor, storage)
            raise
        finally:
            self._running = None
        self._windows.append((self._first, next_sequence_number(), site))
        sizes = self._kept_bytes.get(site)
        if sizes and kept > sizes.pop():
            self._refuse(
                site, "in place it keeps more for its backward pass than it saves: a mask or a copy of its input"
            )
        if not isinstance(result, torch.Tensor) or storage_key(storage_of(result)) != storage_key(storage):
            self._refuse(site, "it allocates memory in place too")
        else:
            number = self._write_of(site, tensor, storage)
            label_nodes(result.grad_fn, self._first, (site, number))
        return result

    def _write_of(self, site: CallSite, tensor: torch.Tensor, storage: Any) -> int:
        """Record that an activation overwrote its input; return how often it did so before."""
        covered = byte_range(tensor)
        if covered is None:
            return 0
        writes = self._written(tensor, storage_key(storage), _Write(self._first, covered, site))
        return sum(write.site == site for write in writes) - 1

    def _refuse(self, site: CallSite, reason: str) -> bool:
        """Refuse a call site; return False if it is written in place, so that the cause must be another site."""
        if site in self._new:
            self.refused.setdefault(site, reason)
        return site in self._new

    def accessed(self, func: Any, tensor: torch.Tensor, key: int, written: bool) -> None:
        """Record a write of the forward pass; refuse writes to memory that the backward pass reads later."""
        node = current_autograd_node()
        if self._running is not None:
            if key == self._input and func is torch.ops.aten.clone.default:
                self._refuse(
                    self._running, "its backward pass needs its input: autograd would copy it, nothing is saved"
                )
        elif node is None or torch.is_grad_enabled():
            covered = byte_range(tensor) if written else None
            if covered is not None:
                self._written(tensor, key, _Write(next_sequence_number() - 1, covered, None))
        elif key in self._writes and (label := node.metadata.get(LABEL)) is not None:
            site, number = label
            writes, covered = self._writes[key], byte_range(tensor)
            own = [index for index, write in enumerate(writes) if write.site == site]
            if number < len(own) and covered is not None:
                later = [write for write in writes[own[number] + 1 :] if overlap(covered, write.covered)]
                self._overwritten(later, site)

    def _written(self, tensor: torch.Tensor, key: int, write: _Write) -> list[_Write]:
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage_of(tensor), lambda _: self._forget(key))
        writes = self._writes.setdefault(key, [])
        writes.append(write)
        return writes

    def _forget(self, key: int) -> None:
        self._alive.pop(key, None)
        self._writes.pop(key, None)

    def _overwritten(self, later: list[_Write], keeper: CallSite | None) -> None:
        """Refuse the last write to a tensor that an activation, or another op (None), keeps for backward."""
        for write in reversed(later):
            if write.site is not None:
                whose = f"what {keeper} keeps" if keeper is not None else "kept"
                if self._refuse(write.site, f"its input is {whose} for the backward pass"):
                    return
        if later and keeper is not None:
            self._refuse(keeper, "its output is overwritten, and would be kept for its backward pass")

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd keeps for a saved tensor: the tensor, its version, and when it was saved."""
        return tensor, version_of(tensor), self._first if self._running is not None else next_sequence_number() - 1

    def unpack(self, kept: Any) -> torch.Tensor:
        """Return a saved tensor; refuse the writes since it was saved."""
        tensor, version, number = kept
        storage = storage_of(tensor)
        if version_of(tensor) != version and storage is not None:
            later = [write for write in self._writes.get(storage_key(storage), ()) if write.sequence > number]
            keeper = next((site for first, last, site in self._windows if first <= number < last), None)
            self._overwritten(later, keeper)
        return tensor
