"""Progress of a sweep or a search: a value after every run, an estimate of the time left, and a line that shows it."""

from __future__ import annotations

import sys
from typing import NamedTuple


class Progress(NamedTuple):
    """Settings run so far; `seconds` since the start, `left` an estimate of the seconds to come, None before one."""

    done: int
    failed: int
    total: int
    seconds: float
    left: float | None


def estimate_seconds_left(finished: list[float], total: int) -> float | None:
    """Return the seconds left, from the times at which settings were finished so far; None before the second setting.

    The time of the first setting is not counted, as it includes the start of the processes.

    >>> estimate_seconds_left([5.0, 6.0, 7.0], total=10)  # one a second, seven to come
    7.0
    """
    if len(finished) >= total:
        return 0.0
    if len(finished) < 2:
        return None
    return (finished[-1] - finished[0]) / (len(finished) - 1) * (total - len(finished))


def print_progress(progress: Progress) -> None:
    """Write the progress to one line of standard error, in a terminal and in a notebook; elsewhere only its end."""
    stream = sys.stderr
    ended = progress.done == progress.total
    redraws = stream.isatty() or "ipykernel" in type(stream).__module__
    if not (redraws or ended):
        return
    text = f"{progress.done} of {progress.total} settings run"
    text += f", {progress.failed} failed" if progress.failed else ""
    text += f" in {progress.seconds:.0f} s" if ended else ""
    text += f", about {progress.left:.0f} s left" if progress.left else ""
    stream.write(("\r" if redraws else "") + text.ljust(70 if redraws else 0) + ("\n" if ended else ""))
    stream.flush()
