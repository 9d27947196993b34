"""Sentences on how a setting trains differently from the step as written."""

from __future__ import annotations

from memexplore.run.knobs.knobs import KNOBS, Knobs


def training_text(knobs: Knobs, altered: frozenset[str]) -> str:
    """Return how a setting trains differently, one sentence for each of its `altered` knobs (`candidates.altered`).

    >>> training_text(Knobs(batch=20), frozenset({"batch"}))
    'A step of 20 samples has a noisier gradient, and often needs another learning rate.'
    >>> training_text(Knobs(checkpoint="sqrt"), frozenset())
    ''
    """
    return " ".join(
        KNOBS[name].training_text(value, knobs) for name, value in knobs.changed().items() if name in altered
    )
