"""Results of settings that were run, here or in another process, and their errors."""

from __future__ import annotations

import pickle
import traceback
from typing import NamedTuple

import cloudpickle

from memexplore.run.knobs.inplace_sites.sites import Sites
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.run import Run


class Done(NamedTuple):
    """The result of a setting that ran."""

    run: Run
    sites: Sites | None = None
    """The legal in-place sites that a run in another process has found, for the code of the setting."""

    @property
    def knobs(self) -> Knobs:
        """The setting."""
        return self.run.knobs


class Failed(NamedTuple):
    """The result of a setting that raised."""

    knobs: Knobs
    error: BaseException


Result = Done | Failed


def error_text(error: BaseException) -> str:
    """Return an error in one line; that of a setting is a ValueError, whose message says all."""
    message = next((line for line in map(str.strip, str(error).splitlines()) if line), "")
    if isinstance(error, ValueError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def without_frames(error: BaseException) -> BaseException:
    """Drop the frames of an error, which would keep tensors alive; its traceback becomes a note, as text."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def sendable(error: BaseException) -> BaseException:
    """Return an exception that can be sent to another process: the same one, else a RuntimeError with its text."""
    try:
        pickle.loads(cloudpickle.dumps(error))  # many exceptions can be pickled but not unpickled
        return error
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            plain.add_note(note)
        return plain
