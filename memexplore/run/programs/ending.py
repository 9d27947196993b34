"""End a program as its process would end: its threads come to their end, and its exit handlers run.

memexplore goes on after the program, in the same process. What the program leaves to the end of the process belongs to
the run all the same, and has the GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from memexplore.analysis.tables import is_users
from memexplore.text.package import FOLDER


@contextlib.contextmanager
def ending_as_process() -> Iterator[None]:
    """Run a program in the block to the end of what its process would do.

    `os._exit` in the main thread raises SystemExit, so that its run is reported. A child that the program has forked
    and that comes out of the block ends there, with its own exit status. The functions of `os` that replace the process
    raise RuntimeError.
    """
    process, threads, handlers, pools = os.getpid(), set(threading.enumerate()), _ExitHandlers(), _Pools()
    with handlers.collecting(), pools.collecting(), _without_other_ends(process):
        try:
            yield
        except BaseException as error:
            if os.getpid() != process:
                _end_child(error)
            if isinstance(error, Exception | SystemExit):  # others end the run from outside, such as Ctrl-C
                _end(threads, pools, handlers)
            raise
        if os.getpid() != process:
            _end_child(None)
        _end(threads, pools, handlers)


def _end(threads: set[threading.Thread], pools: _Pools, handlers: _ExitHandlers) -> None:
    """Wait for threads that are no daemons, as `threading._shutdown` does, and run the exit handlers, last first."""
    pools.shut_down()
    for thread in threading.enumerate():
        if thread not in threads and not thread.daemon and thread is not threading.current_thread():
            thread.join()
    handlers.run()


def _end_child(error: BaseException | None) -> None:
    """End a forked child as the interpreter does."""
    status = 0
    if isinstance(error, SystemExit):
        status = exit_status(error)
    elif error is not None:
        print_traceback(error)
        status = 1
    flush()
    _exit(status)


def exit_status(error: SystemExit) -> int:
    """Return the exit status of `sys.exit`, after printing its message as the interpreter does."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def print_traceback(error: BaseException) -> None:
    """Print an exception with its causes like the interpreter, without the frames of this package."""
    root = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    waiting: list[traceback.TracebackException | None] = [root]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.stack[:] = [frame for frame in link.stack if not frame.filename.startswith(str(FOLDER) + os.sep)]
        waiting += [link.__cause__, link.__context__, *(getattr(link, "exceptions", None) or ())]
    print("".join(root.format()), end="", file=sys.stderr)


def flush() -> None:
    """Write what the program has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()


class _Pools:
    """Pools of threads that work for the program. Idle ones wait for ever, until they are shut down."""

    def __init__(self) -> None:
        self._used: weakref.WeakSet[ThreadPoolExecutor] = weakref.WeakSet()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the pools that get work in the block."""
        used, submit = self._used, ThreadPoolExecutor.submit

        def noted(pool: ThreadPoolExecutor, /, *args: Any, **kwargs: Any) -> Any:
            used.add(pool)
            return submit(pool, *args, **kwargs)

        with mock.patch.object(ThreadPoolExecutor, "submit", noted):
            yield

    def shut_down(self) -> None:
        """Wait for the work of the pools, and end their threads."""
        for pool in list(self._used):
            pool.shutdown()


class _ExitHandlers:
    """What the program registers with `atexit`; what a library registers is left to the end of the process."""

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the handlers that the program itself registers in the block."""
        with mock.patch.multiple(atexit, register=self._register, unregister=self._unregister):
            yield

    def _register(self, function: Callable[..., object], /, *args: Any, **kwargs: Any) -> Callable[..., object]:
        if not is_users(sys._getframe(1).f_code.co_filename):
            return _register(function, *args, **kwargs)
        self._calls.append((function, args, kwargs))
        return function

    def _unregister(self, function: Callable[..., object]) -> None:
        self._calls = [call for call in self._calls if call[0] != function]
        _unregister(function)

    def run(self) -> None:
        """Run the handlers, last first; print the errors that they raise."""
        while self._calls:
            function, args, kwargs = self._calls.pop()
            try:
                function(*args, **kwargs)
            except Exception:
                print(f"Exception ignored in atexit callback: {function!r}", file=sys.stderr)
                traceback.print_exc()


_register, _unregister, _exit = atexit.register, atexit.unregister, os._exit
_REPLACING = {name: getattr(os, name) for name in ("execv", "execve") if hasattr(os, name)}
"""Functions that replace the process; the others of the family call them."""


@contextlib.contextmanager
def _without_other_ends(program: int) -> Iterator[None]:
    """End the process of a program by no other way in the block. Forked children, and memexplore itself, may."""

    def exit_of_program(status: int) -> None:
        is_main = threading.current_thread() is threading.main_thread() and os.getpid() == program
        if is_main and not sys._getframe(1).f_code.co_filename.startswith(str(FOLDER)):
            raise SystemExit(status)
        _exit(status)

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any, *args: Any) -> Any:
            if os.getpid() != program:
                return function(path, *args)
            raise RuntimeError(
                f"the program replaces its process by {path}, whose memory would not be reported: run that program "
                "under memexplore instead"
            )

        return refuse

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(os, "_exit", exit_of_program))
        for name, function in _REPLACING.items():
            stack.enter_context(mock.patch.object(os, name, refusing(function)))
        yield
