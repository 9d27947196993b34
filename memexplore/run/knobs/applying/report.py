"""Report of applying knobs: changes made, sites skipped and why, notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Change(NamedTuple):
    """One applied knob: its name, and what was changed as a phrase, such as "Checkpointing 16 of 16 blocks"."""

    field: str
    text: str


class Skipped(NamedTuple):
    """A site that a knob left as written, with the reason as a clause."""

    site: str
    reason: str


class ApplyReport(NamedTuple):
    """Report of applying knobs to a model: changes made, sites skipped and why, notes as sentences.

    Reports add up:

    >>> (ApplyReport((Change("batch", "batch of 8"),)) + ApplyReport((Change("input_size", "input size 32"),))).texts
    ('batch of 8', 'input size 32')
    """

    changes: tuple[Change, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    pending: tuple[Callable[[], ApplyReport], ...] = ()
    """Functions that return what is known only after a run, such as that a block was never called; see `completed`."""

    def __add__(self, other: Any) -> ApplyReport:
        return ApplyReport(*(mine + its for mine, its in zip(self, other, strict=True)))

    @property
    def texts(self) -> tuple[str, ...]:
        """The phrase of each change."""
        return tuple(change.text for change in self.changes)

    def completed(self) -> ApplyReport:
        """Return the report with what the model's run has added; it holds plain values and can be pickled.

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
        """Return the report without what only a complete run adds, for a run that ended early."""
        return self._replace(pending=())


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural.

    >>> counted(1, "layer"), counted(2, "layer"), counted(3, "micro-batch")
    ('1 layer', '2 layers', '3 micro-batches')
    """
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"
