"""Progress of a sweep or a search: a value after every run, the time left, and a bar or a line that shows both."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from memexplore.figures.palette import FITS
from memexplore.text import ipython_shell


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


def progress_of(finished: list[float], failed: int, total: int) -> Progress:
    """Return the progress after runs that have ended at some times, in seconds since the start."""
    return Progress(len(finished), failed, total, finished[-1], estimate_seconds_left(finished, total))


class ProgressBar(NamedTuple):
    """The progress as an output of a notebook: a bar and a line of text."""

    progress: Progress

    def __repr__(self) -> str:
        return progress_text(self.progress)

    def _repr_html_(self) -> str:
        done, _, total, *_ = self.progress
        share, text = done / max(total, 1), html.escape(progress_text(self.progress))
        return (
            f'<div role="progressbar" aria-valuemin="0" aria-valuemax="{total}" aria-valuenow="{done}" '
            f'aria-valuetext="{text}" style="display:flex;align-items:center;gap:0.8em">'
            '<div style="width:16em;height:0.8em;border:1px solid currentColor">'
            f'<div style="width:{share:.1%};height:100%;background:{FITS}"></div></div><span>{text}</span></div>'
        )


def progress_text(progress: Progress) -> str:
    """Return the progress as one line.

    >>> progress_text(Progress(3, 1, 10, 6.0, 14.0)), progress_text(Progress(2, 0, 2, 3.0, 0.0))
    ('3 of 10 runs, 1 failed, about 14 s left', '2 of 2 runs in 3 s')
    """
    ended = progress.done == progress.total
    text = f"{progress.done} of {progress.total} runs"
    text += f", {progress.failed} failed" if progress.failed else ""
    text += f" in {progress.seconds:.0f} s" if ended else ""
    return text + (f", about {progress.left:.0f} s left" if progress.left else "")


Report = Callable[[Progress], object]
"""A function that is called after every setting."""
Reporting = Report | Literal["shown"] | None
"""How a search reports its progress: it shows it, calls a function, or is silent."""


def report_of(reporting: Reporting) -> Report | None:
    """Return the function that one search calls after every setting."""
    return shown_progress() if reporting == "shown" else reporting


def shown_progress() -> Report:
    """Return a function that shows the progress of one search.

    In a notebook it shows a bar in an output of its own, else a line on standard error. The line is redrawn in a
    terminal; elsewhere only its end is written.
    """
    if not ipython_shell.is_notebook():
        return _write_line
    output: Any = None

    def show_bar(progress: Progress) -> None:
        nonlocal output
        if output is None:
            output = ipython_shell.display_in_place(ProgressBar(progress))
        else:
            output.update(ProgressBar(progress))

    return show_bar


class _InPlace(NamedTuple):
    """A value that is shown for a while; None shows nothing."""

    value: Any

    def __repr__(self) -> str:
        return "" if self.value is None else repr(self.value)

    def _repr_html_(self) -> str:
        return "" if self.value is None else str(self.value._repr_html_())


def shown_in_place() -> Callable[[Any], object] | None:
    """Return a function that shows a value in a notebook in place of the one before, None for nothing; None elsewhere.

    The value has `_repr_html_`. It is shown again only where it has changed.
    """
    if not ipython_shell.is_notebook():
        return None
    output: Any = None
    latest = ""

    def show(value: Any) -> None:
        nonlocal output, latest
        shown = _InPlace(value)
        html_text = shown._repr_html_()
        if html_text == latest:
            return
        latest = html_text
        if output is None:
            output = ipython_shell.display_in_place(shown)
        else:
            output.update(shown)

    return show


def _write_line(progress: Progress) -> None:
    stream, ended = sys.stderr, progress.done == progress.total
    redraws = stream.isatty()
    if redraws or ended:
        text = progress_text(progress)
        stream.write(("\r" if redraws else "") + text.ljust(70 if redraws else 0) + ("\n" if ended else ""))
        stream.flush()
