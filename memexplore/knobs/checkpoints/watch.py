"""Observation of pieces while a model runs: which were called, with gradients or without, and what they wrote to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from memexplore.knobs.checkpoints.recompute import InputGuard, norms_with_statistics, versions
from memexplore.knobs.facts import Change, Note, NoteKind, Skipped
from memexplore.knobs.report import ApplyReport


class Watch:
    """Observations of the pieces of one applied checkpoint knob; `change` has the number of candidates."""

    def __init__(self, change: Change, names: tuple[str, ...]) -> None:
        self.change = change
        self.names = names
        self.guard = InputGuard()
        self._notes: dict[Note, None] = {}
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
            self.note(NoteKind.BUFFERS_WRITTEN_TWICE, name)

    def note(self, kind: NoteKind, *details: str) -> None:
        """Add a note to the report, once."""
        self._notes[Note(kind, details)] = None

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
        notes = (Note(NoteKind.STATISTICS_ONCE),) if statistics else ()
        return ApplyReport((self._counted(len(self.names)),), (), notes, (self._observed,))

    def _observed(self) -> ApplyReport:
        skipped = self.skipped()
        if self._segment_starts:
            self.note(NoteKind.SEPARATE_SEGMENTS, *self._segment_starts)
        return ApplyReport((self._counted(len(self.names) - len(skipped)),), skipped, tuple(self._notes))

    def _counted(self, number: int) -> Change:
        count, *others = self.change.counts
        return self.change._replace(counts=(count._replace(number=number), *others))
