"""Results of the settings of an explorer."""

from __future__ import annotations

from collections.abc import Collection

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.run import Run

_MAX_OTHERS = 64
"""Results kept of settings that are not in the history, the latest: positions of drags, and runs ahead of a request."""


def forget_old(results: dict[Knobs, Run], kept: Collection[Knobs]) -> None:
    """Remove the oldest results beyond a number, except the results of the settings in `kept`."""
    others = [knobs for knobs in results if knobs not in kept]
    for knobs in others[: max(len(others) - _MAX_OTHERS, 0)]:
        del results[knobs]
