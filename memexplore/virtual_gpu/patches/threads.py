"""Give every thread the modes of the virtual GPU, which in torch belong to one thread each.

These threads have them while the GPU is on: those that start meanwhile, those of thread pools, and those that wait for
a queue or an event when the GPU is turned on. An op of any other thread on a virtual tensor runs too; only `cuda` as a
name raises there, with one sentence.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import thread as thread_pools
from types import FrameType
from typing import Any

from memexplore.torch_internals.cuda import LAZY_INIT
from memexplore.torch_internals.dispatch import TorchDispatchMode, function_mode_stack
from memexplore.torch_internals.state import dispatch_mode_stack
from memexplore.virtual_gpu.patches.device_names import DeviceRenaming
from memexplore.virtual_gpu.patches.install import Call, Patch, Replace
from memexplore.virtual_gpu.patches.modes import set_dispatch_modes, set_function_modes
from memexplore.virtual_gpu.tensors.tensor import DeviceState
from memexplore.virtual_gpu.values.value_reads import NotSimulated


class Threads:
    """The threads that have the modes of one virtual GPU; `join` and `leave` are called in the thread itself."""

    def __init__(self, mode: TorchDispatchMode, renaming: DeviceRenaming) -> None:
        self._mode, self._renaming = mode, renaming
        self._threads = {threading.get_ident()}
        """Threads that have the modes; the thread that calls this gets them by itself."""
        self._waiting: set[int] = set()
        """Threads that have the modes until they wait again."""

    def join(self) -> bool:
        """Give the calling thread the modes, below all others; return False if it has them or the GPU is off."""
        if not self._renaming.on or threading.get_ident() in self._threads:
            return False
        # A thread of an earlier virtual GPU still has that one's modes.
        functions = [mode for mode in function_mode_stack() if not isinstance(mode, DeviceRenaming)]
        dispatch = [mode for mode in dispatch_mode_stack() if not isinstance(mode, type(self._mode))]
        set_function_modes([self._renaming, *functions])
        set_dispatch_modes([self._mode, *dispatch])
        self._threads.add(threading.get_ident())
        return True

    def leave(self) -> None:
        """Take the modes from the calling thread."""
        self._threads.discard(threading.get_ident())
        set_dispatch_modes([mode for mode in dispatch_mode_stack() if mode is not self._mode])
        set_function_modes([mode for mode in function_mode_stack() if mode is not self._renaming])

    def _forget(self) -> None:
        """Forget an ended thread that had the number of the calling one, which has just started."""
        self._threads.discard(threading.get_ident())
        self._waiting.discard(threading.get_ident())

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Give the calling thread the modes for a block."""
        joined = self.join()
        try:
            yield
        finally:
            if joined:
                self.leave()

    def patches(self) -> list[Patch]:
        """Return the patches."""
        return [
            Replace(DeviceState, "threads", self._threads),
            Replace(DeviceState, "run_without_mode", self._run_without_mode),
            Replace(LAZY_INIT.owner, LAZY_INIT.name, self._initialise),
            Replace(threading.Thread, "start", self._starting(threading.Thread.start)),
            *(Replace(owner, name, wrap(self, vars(owner)[name])) for owner, name, wrap in _OF_PYTHON),
            Call(unmake=self._end),
        ]

    def _end(self) -> None:
        self._renaming.on = False

    def _run_without_mode(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._mode.__torch_dispatch__(func, types, args, kwargs)

    def _initialise(self) -> None:
        """Stand in for `torch.cuda._lazy_init`, which C++ calls before it makes a tensor on `cuda`."""
        if threading.get_ident() not in self._threads:
            raise NotSimulated(
                f"the thread {threading.current_thread().name} was started before the virtual {DeviceState.gpu_name} "
                "was turned on, and uses cuda: start the thread afterwards"
            )

    def _starting(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        @functools.wraps(start)
        def start_joined(thread: threading.Thread) -> None:
            run = thread.run

            def run_joined() -> None:
                restore_run()
                self._forget()
                with self.joined():
                    run()

            replacement = Replace(thread, "run", run_joined)
            restore_run = replacement.undo()
            replacement.install()
            try:
                start(thread)
            except BaseException:
                # A thread starts once only: `run` is as before if it has started already.
                restore_run()
                raise

        return start_joined

    def _in_joined_thread(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run`, which a worker of a thread pool calls for each task, in a thread with the modes."""

        @functools.wraps(run)
        def run_joined(*args: Any, **kwargs: Any) -> Any:
            with self.joined():
                return run(*args, **kwargs)

        return run_joined

    def _waking(self, acquire: Callable[..., Any]) -> Callable[..., Any]:
        """Return the end of `Condition.wait`, by which queues and events wait, with the modes for what follows."""

        @functools.wraps(acquire)
        def acquire_and_join(*args: Any) -> None:
            acquire(*args)
            # Callers are `Condition.wait`, `Event.wait` and maybe `Thread.start`: the virtual GPU of a new thread does
            # not change the thread that starts it, where it would depend on which of both is faster.
            if not _is_starting(sys._getframe(1)) and self.join():
                self._waiting.add(threading.get_ident())

        return acquire_and_join

    def _falling_asleep(self, release: Callable[..., Any]) -> Callable[..., Any]:
        """Return the beginning of `Condition.wait`, without the modes that the last one's end gave the thread."""

        @functools.wraps(release)
        def leave_and_release(*args: Any) -> Any:
            if threading.get_ident() in self._waiting:
                self._waiting.discard(threading.get_ident())
                self.leave()
            return release(*args)

        return leave_and_release


_file = threading.current_thread.__code__.co_filename


def _is_starting(wait: FrameType) -> bool:
    caller = wait.f_back and wait.f_back.f_back
    # By name: other libraries replace the function, and call it.
    return caller is not None and caller.f_code.co_name == "start" and caller.f_code.co_filename == _file


def _of_python() -> list[tuple[type, str, Callable[[Threads, Callable[..., Any]], Callable[..., Any]]]]:
    """Return private methods of Python's own threads, the same from 3.11 to 3.14, and what wraps them.

    With them threads that run already can use a virtual GPU that is turned on later.
    """
    condition: Any = threading.Condition
    methods = [
        (getattr(thread_pools, "_WorkItem", None), "run", Threads._in_joined_thread),
        (condition, "_acquire_restore", Threads._waking),
        (condition, "_release_save", Threads._falling_asleep),
    ]
    return [(owner, name, wrap) for owner, name, wrap in methods if owner is not None and name in vars(owner)]


_OF_PYTHON = _of_python()
__all__ = ["Threads"]
