"""A search in a process of its own. In: a step and a GPU. Out: the advice so far after every run, then all of it.

The caller goes on meanwhile: the virtual GPU is process-wide, so that a thread of this process could not search.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import torch

from memexplore.knobs.knobs import Knobs
from memexplore.search import workers
from memexplore.search.advice import Advice
from memexplore.search.advise import advise
from memexplore.search.progress import Progress
from memexplore.steps.step import Step
from memexplore.tape import Os

_NICENESS = 5
"""Lower priority of the search than that of the process that started it, in whose notebook cells run."""


class Found(NamedTuple):
    """The state of a search after a run."""

    progress: Progress
    advice: Advice | None
    """None before the step as written was run."""


class Ended(NamedTuple):
    """The end of a search: its advice, or the error that ended it."""

    advice: Advice | None
    error: BaseException | None


Report = Callable[[Found | Ended], object]


class SearchProcess:
    """A search that runs in a process of its own, and in worker processes of that one.

    `report` is called in a thread with each `Found`, and once with `Ended`. For the other arguments see `advise`.

    Raises `workers.UnsendableStepError` for a step that cannot be sent to another process.
    """

    def __init__(
        self,
        step: Step,
        gpu: str,
        report: Report,
        *,
        release: str | None,
        os: str = Os.LINUX,
        base: Knobs | None = None,
    ) -> None:
        packed = workers.pack_step(step)
        request = cloudpickle.dumps((gpu, base, workers.process_settings(release, os)))
        self._report = report
        self._is_stopped = False
        self._connection, sending = multiprocessing.Pipe(duplex=False)
        self._process = workers.new_process(_search, (sending, packed, request))
        self._process.start()
        # The end of the process then ends `_receive`.
        sending.close()
        _running.add(self)
        threading.Thread(target=self._receive, name="memexplore-search", daemon=True).start()

    def stop(self) -> None:
        """End the search without a further report."""
        self._is_stopped = True
        self._process.terminate()

    def _receive(self) -> None:
        event: Found | Ended = Ended(None, RuntimeError("the process of the search died"))
        with contextlib.suppress(EOFError, OSError):
            while True:
                event = pickle.loads(self._connection.recv_bytes())
                if self._is_stopped or isinstance(event, Ended):
                    break
                self._report(event)
                event = Ended(None, RuntimeError("the process of the search died"))
        if not self._is_stopped:
            self._report(event)
        self._connection.close()
        self._process.join()
        _running.discard(self)


_running: weakref.WeakSet[SearchProcess] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    # Python waits at its exit for processes that are no daemons; a daemon could not start the workers of a search.
    for search in list(_running):
        search.stop()


# --- in the process -------------------------------------------------------------------------------------------------


def _search(connection: Any, packed_step: bytes, request: bytes) -> None:
    # An interrupt of a notebook reaches the whole process group; the parent stops the search itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # As an exception, which ends the workers on its way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    torch.set_num_threads(1)
    latest: Advice | None = None

    def found(advice: Advice) -> None:
        nonlocal latest
        latest = advice

    def report(progress: Progress) -> None:
        connection.send_bytes(_packed(Found(progress, latest)))

    try:
        gpu, base, settings = pickle.loads(request)
        workers.set_process_settings(settings)
        step = pickle.loads(packed_step)
        advice = advise(step, gpu, release=settings.release, os=settings.os, progress=report, found=found, base=base)
        ended = Ended(advice, None)
    except Exception as error:
        ended = Ended(None, workers.sendable(workers.without_frames(error)))
    connection.send_bytes(_packed(ended))


def _packed(event: Found | Ended) -> bytes:
    advice = event.advice
    if advice is not None:
        errors = {knobs: workers.sendable(error) for knobs, error in advice.errors.items()}
        event = event._replace(advice=dataclasses.replace(advice, errors=errors))
    return cloudpickle.dumps(event)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
