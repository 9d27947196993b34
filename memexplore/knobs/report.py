"""Report of applying knobs: changes made, sites skipped and why, notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from memexplore.knobs.facts import Change, Note, Skipped
from memexplore.knobs.report_text import change_text, note_text


class ApplyReport(NamedTuple):
    """Report of applying knobs to a model: changes made, sites skipped and why, notes.

    Reports add up:

    >>> (ApplyReport((Change("batch", 8),)) + ApplyReport((Change("input_size", 32),))).texts
    ('batch of 8', 'input size 32')
    """

    changes: tuple[Change, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[Note, ...] = ()
    pending: tuple[Callable[[], ApplyReport], ...] = ()
    """Functions that return facts known only after a run, such as that a block was never called; see `completed`."""

    def __add__(self, other: Any) -> ApplyReport:
        return ApplyReport(*(mine + its for mine, its in zip(self, other, strict=True)))

    @property
    def texts(self) -> tuple[str, ...]:
        """A phrase for each change, such as "Checkpointing 16 of 16 blocks"."""
        return tuple(map(change_text, self.changes))

    @property
    def note_texts(self) -> tuple[str, ...]:
        """The notes as sentences."""
        return tuple(map(note_text, self.notes))

    def completed(self) -> ApplyReport:
        """Return the report with the facts that the model's run has added; it holds plain values and can be pickled.

        A change that a run shows replaces the earlier change of the same field.
        """
        report = self.without_pending()
        for observe in self.pending:
            seen = observe()
            newer = {change.field: change for change in seen.changes}
            changes = tuple(newer.get(change.field, change) for change in report.changes)
            report = ApplyReport(changes, report.skipped + seen.skipped, report.notes + seen.notes)
        return report

    def without_pending(self) -> ApplyReport:
        """Return the report without the facts that only a complete run adds, for a run that ended early."""
        return self._replace(pending=())
