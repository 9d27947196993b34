"""Observation of pieces while a model runs: which were called, with gradients or without, and what they wrote to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from memexplore.run.knobs.applying.report import ApplyReport, Change, Skipped
from memexplore.run.knobs.checkpoints.recompute import InputGuard, norms_with_statistics, versions

STATISTICS_ONCE = (
    "Batch norm's running statistics move once a step, as without checkpoints; plain torch.utils.checkpoint moves them "
    "twice."
)
NO_KEY_VALUE_CACHE = "Recomputed blocks get no key-value cache, as in transformers."


class Watch:
    """Observations of the pieces of one applied checkpoint knob; `phrase` says how many of them are recomputed."""

    def __init__(self, phrase: Callable[[int], str], names: tuple[str, ...]) -> None:
        self._phrase = phrase
        self.names = names
        self.guard = InputGuard()
        self._notes: dict[str, None] = {}
        self._segment_starts: dict[str, None] = {}
        self._inspected: set[str] = set()
        self._recomputed: set[str] = set()
        self._without_gradients: set[str] = set()

    def computes_gradients(self, *names: str) -> bool:
        """Observe a call of pieces, and return whether gradients are enabled, so that it saves tensors for backward."""
        (self._recomputed if torch.is_grad_enabled() else self._without_gradients).update(names)
        return torch.is_grad_enabled()

    @contextlib.contextmanager
    def buffers_of(self, name: str, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Observe, in the first call of a piece, whether its modules write to buffers."""
        if name in self._inspected:
            yield
            return
        self._inspected.add(name)
        before = versions(modules)
        yield
        if before != versions(modules):
            self.add_note(
                f"{name} writes to its buffers in forward and again in the recomputation: gradients may differ, as "
                "with plain torch.utils.checkpoint."
            )

    def add_note(self, sentence: str) -> None:
        """Add a note to the report, once."""
        self._notes[sentence] = None

    def starts_segment(self, name: str) -> None:
        """Observe that a block opened a segment of its own."""
        self._segment_starts[name] = None

    def skipped(self) -> tuple[Skipped, ...]:
        """Return the pieces that were not recomputed, and why."""
        return tuple(
            Skipped(
                name,
                "it ran without gradients, so it saved nothing for backward"
                if name in self._without_gradients
                else "it was not called",
            )
            for name in self.names
            if name not in self._recomputed
        )

    def report(self, modules: Iterable[nn.Module]) -> ApplyReport:
        """Return the report before the run: all pieces, and a note if their modules keep running statistics."""
        statistics = any(norm.track_running_stats for norm in norms_with_statistics(modules))
        notes = (STATISTICS_ONCE,) if statistics else ()
        return ApplyReport((self._change(len(self.names)),), (), notes, (self._observed,))

    def _observed(self) -> ApplyReport:
        skipped = self.skipped()
        if self._segment_starts:
            first = ", ".join([*self._segment_starts][:3]) + ", …" * (len(self._segment_starts) > 3)
            self.add_note(
                f"Blocks not called with the result of the block before begin a segment of their own: {first}."
            )
        return ApplyReport((self._change(len(self.names) - len(skipped)),), skipped, tuple(self._notes))

    def _change(self, number: int) -> Change:
        return Change("checkpoint", self._phrase(number))
