"""Report child processes of the program, whose memory is on no tape: the virtual GPU measures its own process.

A spawned process has no virtual GPU. A forked one has a copy, and marks memory that it shares with this process when it
allocates there. Workers of a DataLoader, which load samples on the CPU, are reported only if they allocate there. A
program that makes samples on the GPU has to spawn its workers, as CUDA does not survive a fork; here they are forked.
"""

from __future__ import annotations

import functools
import mmap
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import popen_fork
from multiprocessing.process import BaseProcess
from typing import Any

from memexplore.virtual_gpu.dispatch import runner
from memexplore.virtual_gpu.patches.install import Call, Patch, Replace

_LOADERS = "torch.utils.data."
"""Beginning of the modules of functions that run in workers of a DataLoader."""
_HELPERS = (_LOADERS, "multiprocessing.managers", "multiprocessing.resource_sharer", "memexplore.")
"""Beginnings of the modules of functions that run in processes without work for a GPU."""
_NAMED = 5
"""Exit statuses that the sentence names."""
_started: list[Any] = []
"""Processes that the program started since `begin`, without helpers."""
_mark = mmap.mmap(-1, 1)
"""1 if a forked child allocated on the virtual GPU since `begin`; shared with all forked children."""


def patches() -> list[Patch]:
    """Return the patches that watch the program start processes."""
    return [Replace(BaseProcess, "start", _starting(BaseProcess.start)), Call(begin)]


def begin() -> None:
    """Forget the processes of an earlier recording."""
    _started.clear()
    _mark[0] = 0


def report() -> str:
    """Return a sentence on the processes that were not measured, and what to do; "" if all were.

    Processes that ended with an exit status other than 0 are among them: what they would have allocated is not known.
    """
    apart = sum(_start_method(process) in ("spawn", "forkserver") for process in _started)
    failures = list(filter(None, map(_failure, _started)))
    owner = "its" if not _mark[0] and (apart or len(failures)) == 1 else "their"
    if apart:
        text = f"{_processes(apart)} ran without the virtual GPU"
    elif _mark[0]:
        text = "forked child processes used the GPU"
    elif failures:
        text = f"{_processes(len(failures))} failed"
    else:
        return ""
    if failures:
        more = f" and {len(failures) - _NAMED} more" if len(failures) > _NAMED else ""
        text += f" ({', '.join(failures[:_NAMED])}{more})"
    return f"{text}, and {owner} memory was not measured: run {owner} work in the main process, or on a real GPU"


def _processes(count: int) -> str:
    return f"{count} child process{'' if count == 1 else 'es'}"


def _starting(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def start(process: Any) -> None:
        # Python deletes the target when the process has started.
        target = getattr(process, "_target", None)
        modules = (getattr(target, "__module__", None) or "", type(process).__module__)
        if modules[0].startswith(_LOADERS) and sys.platform == "linux":
            process._Popen = popen_fork.Popen
        original(process)
        if not any(module.startswith(_HELPERS) for module in modules):
            _started.append(process)

    return start


def _start_method(process: Any) -> str:
    return getattr(getattr(process, "_popen", None), "method", "")


def _failure(process: Any) -> str:
    """Return how a process failed, "" for one that runs, did its work, or was ended by `terminate`."""
    try:
        code = process.exitcode
    except ValueError:
        # `close` was called, which needs a process that has ended.
        return ""
    if not code or code == -signal.SIGTERM:
        return ""
    return f"exit status {code}" if code > 0 else f"signal {-code}"


class _Marking:
    """Observer of the copy of the virtual GPU in a forked child (`observer.Observer`)."""

    def alloc(self, *request: Any) -> None:
        """Mark that the child allocated."""
        _mark[0] = 1

    reallocated = out_of_memory = alloc

    def free(self, address: int, size: int) -> None:
        """Ignore a free."""

    def op(self, func: Any, args: Any) -> None:
        """Ignore an op."""

    def used_on(self, *use: Any) -> None:
        """Ignore what streams, collectives and libraries use, and what the program waits for."""

    ordered = finished = may_be_free = possible_workspace = used_on

    def position(self) -> int:
        """Return that nothing was observed."""
        return 0

    def tag_at(self, address: int) -> None:
        """Return that nothing is known about a block."""

    def tag_block(self, address: int, tag: Any) -> None:
        """Ignore a tag."""


def _watch_child() -> None:
    running = runner.active()
    if running is not None:
        running.observer = _Marking()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watch_child)
