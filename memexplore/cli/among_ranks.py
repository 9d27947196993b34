"""The process of a rank among the other ranks of `memexplore run --world N`, which are run when it needs them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

from memexplore.cli.options import FITS


@contextlib.contextmanager
def among_ranks(rank: int, world: int | None, command: Callable[[int], Sequence[str]]) -> Iterator[None]:
    """Run the ranks too from which the block receives objects, and those that have written a file that it reads.

    `command` returns the command line of a rank; `world` is None for a program that has no ranks.
    """
    if world is None:
        yield
        return
    import torch

    from memexplore.virtual_gpu.distributed import messages
    from memexplore.virtual_gpu.files import elsewhere, session

    def fetch(path: str) -> pathlib.Path | None:
        if not torch.distributed.is_initialized():
            return None
        first = messages.sender_of(path, rank, world, session.has_file)
        copies = (messages.fetch_file(path, sender, rank) for sender in dict.fromkeys((first, 0)) if sender != rank)
        return next(filter(None, copies), None)

    if messages.is_helper():
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        # Most ranks exchange objects before the first step only, such as the shapes of a pipeline.
        def before_step(*_: object) -> None:
            if not messages.wait_until_needed(rank):
                os._exit(FITS)

        register_optimizer_step_pre_hook(before_step)
    give = (lambda path: messages.give_files(rank, [path])) if messages.is_helper() else None
    with (
        interrupted_by_sigterm(),
        messages.between_ranks(command, session.copy_file, session.on_disk),
        elsewhere.fetched_by(fetch, give),
    ):
        yield


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at SIGTERM, as a scheduler sends it: its processes and folders end with it.

    A handler that the program has set stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def give_files(rank: int, world: int | None) -> None:
    """Copy the files of this rank that others need or may need later, before those without values are deleted."""
    if world is not None:
        from memexplore.virtual_gpu.distributed import messages
        from memexplore.virtual_gpu.files import session

        if messages.is_helper():
            messages.give_files(rank, session.written_files())
