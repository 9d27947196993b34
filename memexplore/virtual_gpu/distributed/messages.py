"""Bring objects and files from one rank to another: the one writes them to a folder, the other reads them there.

A rank that has not sent yet is run in a process of its own, a *helper*, which stops at each optimizer step until a
further object or file of its rank is needed. So a pipeline stage learns the shapes of its inputs from the stage before
it, which learns them from the stage before that.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = "MEMEXPLORE_MESSAGES"
"""Environment variable with the folder of a helper's messages; unset in other processes."""
_POLL = 0.02
"""Seconds between two looks for a message."""
_MESSAGE, _COPY, _REQUEST = ".pickle", ".copy", ".needed"
"""Endings of the files of a message, of a copy of a file, and of a receiver that waits for either."""
_PARENT = os.getppid()
"""The process that has started this one: another one as soon as it has ended."""

CommandOf = Callable[[int], Sequence[str]]
"""Returns the command line that runs a rank, given its number."""
CopyFile = Callable[[str, str], bool]
"""Copies the file that this rank sees at a path to another path; returns whether there is one."""

OnDisk = Callable[[], contextlib.AbstractContextManager[Any]]
"""Lets a block write to the disk, although a library that saves the files of the program may be running."""


def _no_file(path: str, target: str) -> bool:
    return False


class _State:
    command: CommandOf | None = None
    folder: Path | None = None
    copy_file: CopyFile = staticmethod(_no_file)
    on_disk: OnDisk = staticmethod(contextlib.nullcontext)


_numbers: dict[tuple[int, int | str], int] = {}
"""Sender and receiver, a rank or the name of a group -> number of messages that this process has sent or received."""
_helpers: dict[int, subprocess.Popen[bytes]] = {}
"""Rank -> its process, started here."""


@contextlib.contextmanager
def between_ranks(
    command: CommandOf, copy_file: CopyFile = _no_file, on_disk: OnDisk = contextlib.nullcontext
) -> Iterator[None]:
    """Let the ranks that the block needs objects or files of run by a command; their processes end with the block."""
    before = os.environ.get(FOLDER)
    folder = Path(before or tempfile.mkdtemp(prefix="memexplore-messages-"))
    _State.command, _State.folder, _State.copy_file = command, folder, staticmethod(copy_file)
    _State.on_disk = staticmethod(on_disk)
    try:
        yield
    finally:
        for helper in _helpers.values():
            if helper.poll() is None:
                _end(helper)
        _State.command, _State.folder, _State.copy_file = None, None, staticmethod(_no_file)
        _State.on_disk = staticmethod(contextlib.nullcontext)
        _numbers.clear()
        _helpers.clear()
        if before is None:
            shutil.rmtree(folder, ignore_errors=True)


def is_helper() -> bool:
    """Return whether this process runs only for the objects and files that others need of it."""
    return FOLDER in os.environ


def wait_until_needed(rank: int) -> bool:
    """Wait, in the helper of a rank, until another rank needs what it has not sent; False: its parent has ended."""
    assert _State.folder is not None
    while True:
        if not give_files(rank):
            return True
        requests = _State.folder.glob(f"from-{rank}-to-*{_REQUEST}")
        if any(not request.with_suffix(_MESSAGE).exists() for request in requests):
            return True
        if os.getppid() != _PARENT:
            return False
        time.sleep(_POLL)


def send(objects: list[Any], sender: int, receiver: int | str) -> None:
    """Keep objects for another rank, or for those of a group by its name; outside of `between_ranks` nothing."""
    if _State.folder is None:
        return
    path = _next_path(sender, receiver)
    partial = path.with_suffix(f".{os.getpid()}")
    pickled = pickle.dumps(objects)
    with _State.on_disk():
        partial.write_bytes(pickled)
        partial.replace(path)


def skip(sender: int, receiver: int | str) -> None:
    """Leave out the next objects from another rank."""
    if _State.folder is not None:
        _next_path(sender, receiver)


def receive(sender: int, receiver: int, group: str = "") -> list[Any] | None:
    """Return the next objects from another rank, which is run for them; None outside of `between_ranks`.

    They are those for this rank, `receiver`, or for the ranks of a group. Raises RuntimeError if that rank ends without
    sending them.
    """
    if _State.folder is None or _State.command is None:
        return None
    path = _next_path(sender, group or receiver)
    if not _arrives(path, sender, receiver):
        raise RuntimeError(
            f"rank {receiver} receives an object from rank {sender}, which ended before it sent it: run "
            f"--rank {sender} to see why. Its last lines: {_last_lines(_State.folder / f'rank-{sender}.log')}"
        )
    objects: list[Any] = pickle.loads(path.read_bytes())
    return objects


def fetch_file(path: str, sender: int, receiver: int) -> Path | None:
    """Return a copy of the file that another rank has at a path, for which it is run; None if it ends without it."""
    if _State.folder is None or _State.command is None:
        return None
    copy = _copy_of(path, sender)
    return copy if _arrives(copy, sender, receiver, path) else None


def sender_of(path: str, rank: int, world: int, has_file: Callable[[str], bool]) -> int:
    """Return the rank that is asked for a missing file, given the rank of this process and the files that it has.

    Where each rank writes a file with its number in the name, it is the rank of that number, else rank 0.

    >>> sender_of("part-03-of-8.pt", 1, 8, {"part-01-of-8.pt"}.__contains__)
    3
    """
    for match in re.finditer(r"\d+", path):
        number = int(match[0])
        own = {str(rank), f"{rank:0{len(match[0])}}"}
        if rank != number < world and any(
            has_file(path[: match.start()] + digits + path[match.end() :]) for digits in own
        ):
            return number
    return 0


def give_files(rank: int, others: Iterable[str] = ()) -> bool:
    """Copy the files of a rank, that of this process, that other ranks need; return whether it has all of them.

    Called where no file is being written; at the end of the rank with the paths of `others`, which may be needed later.
    """
    if _State.folder is None:
        return True
    needed = [request.read_text() for request in _State.folder.glob(f"file-*-of-{rank}{_REQUEST}")]
    # All of them, although one is missing.
    had = {
        path: (copy := _copy_of(path, rank)).exists() or _State.copy_file(path, str(copy))
        for path in (*needed, *others)
    }
    return all(had[path] for path in needed)


def _copy_of(path: str, rank: int) -> Path:
    assert _State.folder is not None
    return _State.folder / f"file-{zlib.crc32(os.fsencode(path)):08x}-of-{rank}{_COPY}"


def _arrives(path: Path, sender: int, receiver: int, request: str = "") -> bool:
    """Wait for a message or a copy from another rank, which is started where it does not run; False: it has ended."""
    with _State.on_disk():
        return _waited(path, sender, receiver, request)


def _waited(path: Path, sender: int, receiver: int, request: str) -> bool:
    assert _State.folder is not None
    (_State.folder / f"rank-{receiver}.runs").write_text(str(os.getpid()))
    if not path.exists():
        path.with_suffix(_REQUEST).write_text(request)
        if _claims(sender):
            _helpers[sender] = _start(sender)
    while not path.exists():
        # Polled, a process that has ended has no number any more.
        for helper in _helpers.values():
            helper.poll()
        if not _runs(sender) and not path.exists():
            return False
        give_files(receiver)
        time.sleep(_POLL)
    return True


def _next_path(sender: int, receiver: int | str) -> Path:
    assert _State.folder is not None
    number = _numbers.get((sender, receiver), 0)
    _numbers[sender, receiver] = number + 1
    return _State.folder / f"from-{sender}-to-{receiver}-{number}{_MESSAGE}"


def _claims(rank: int) -> bool:
    """Return whether this process is the first that needs the helper of a rank, and no process runs the rank."""
    assert _State.folder is not None
    try:
        with open(_State.folder / f"rank-{rank}.runs", "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def _runs(rank: int) -> bool:
    """Return whether the process of a rank, or the one that is about to start it, still runs."""
    assert _State.folder is not None
    try:
        text = (_State.folder / f"rank-{rank}.runs").read_text()
    except FileNotFoundError:
        # The rank that this process is a helper of has ended.
        return False
    try:
        # A file that was just made is empty for a moment.
        os.kill(int(text or os.getpid()), 0)
    except ProcessLookupError:
        return False
    return True


def _start(rank: int) -> subprocess.Popen[bytes]:
    assert _State.command is not None
    assert _State.folder is not None
    environment = {**os.environ, FOLDER: str(_State.folder)}
    with open(_State.folder / f"rank-{rank}.log", "wb") as log:
        started = subprocess.Popen(
            list(_State.command(rank)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # A group of its own and of its helpers, which end together.
            start_new_session=not is_helper(),
        )
    (_State.folder / f"rank-{rank}.runs").write_text(str(started.pid))
    return started


def _end(helper: subprocess.Popen[bytes]) -> None:
    if is_helper() or not hasattr(os, "killpg"):
        helper.kill()
    else:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(helper.pid, signal.SIGKILL)
    helper.wait()


def _last_lines(path: Path) -> str:
    lines = path.read_text(errors="replace").split("\n") if path.exists() else []
    return " | ".join(line.strip() for line in lines if line.strip())[-400:] if lines else "none"
