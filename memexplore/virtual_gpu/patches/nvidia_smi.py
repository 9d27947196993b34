"""Let the processes that a program starts find a command `nvidia-smi` that shows the virtual GPU while it is on.

A folder at the front of PATH has the command. The command reads what to show from a file that is mapped into this
process, to which only a segment writes that the allocator takes or gives back: a step costs nothing.
"""

from __future__ import annotations

import atexit
import mmap
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from memexplore.hardware import nvidia_smi
from memexplore.hardware.nvidia_smi import FILE_BYTES, State, used_in_file
from memexplore.text.package import FOLDER
from memexplore.virtual_gpu.files import ownership
from memexplore.virtual_gpu.patches.install import Undo

_STATE, _COMMAND = "state", "nvidia-smi"
_PREFIX = "memexplore-nvidia-smi-"


class _Folder(NamedTuple):
    path: str
    state: mmap.mmap
    process: int
    """The process that has made it."""
    owner: int
    """The file that marks it as in use."""


class _Made:
    folder: _Folder | None = None
    """The folder of this process, or of the one that it was forked from."""


def _folder() -> _Folder | None:
    """Return the folder of this process with the command, made at the first call; None where none can be made."""
    made = _Made.folder
    if made is not None and made.process == os.getpid():
        return made
    try:
        path, owner = ownership.make("", None, _PREFIX)
        code = f"import sys; sys.path.insert(0, {str(FOLDER.parent)!r}); from {nvidia_smi.__name__} import main; "
        code += f"main({os.path.join(path, _STATE)!r}, sys.argv[1:])"
        command = os.path.join(path, _COMMAND)
        with open(command, "w") as script:
            script.write(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S -c {shlex.quote(code)} "$@"\n')
        os.chmod(command, 0o755)
        with open(os.path.join(path, _STATE), "w+b") as file:
            file.write(bytes(FILE_BYTES))
            file.flush()
            state = mmap.mmap(file.fileno(), FILE_BYTES)
    except OSError:
        return None
    _Made.folder = _Folder(path, state, os.getpid(), owner)
    atexit.register(_delete, _Made.folder)
    return _Made.folder


def _delete(folder: _Folder) -> None:
    if folder.process == os.getpid():
        shutil.rmtree(folder.path, ignore_errors=True)


class Shown(NamedTuple):
    """The patch that puts the command on PATH and shows a state by it."""

    state: Callable[[], State]

    def undo(self) -> Undo:
        """Return a function that shows nothing any more, and takes the command off PATH."""
        return partial(_hide, "PATH" in os.environ)

    def install(self) -> None:
        """Show the state, and put the command on PATH."""
        folder = _folder() if os.name == "posix" else None
        if folder is not None:
            folder.state[:] = self.state().in_file()
            os.environ["PATH"] = os.pathsep.join([folder.path, os.environ.get("PATH", os.defpath)])


def _hide(had_path: bool) -> None:
    folder = _Made.folder
    if folder is None or folder.process != os.getpid():
        return
    folder.state[:] = bytes(FILE_BYTES)
    if "PATH" in os.environ:
        # What the program has changed in PATH stays.
        others = [path for path in os.environ["PATH"].split(os.pathsep) if path != folder.path]
        os.environ["PATH"] = os.pathsep.join(others)
        if not had_path and os.environ["PATH"] == os.defpath:
            del os.environ["PATH"]


def show_used(used: int) -> None:
    """Show bytes in use from now on."""
    folder = _Made.folder
    # A forked child shares the file, and not the GPU.
    if folder is not None and folder.process == os.getpid():
        content = used_in_file(used)
        folder.state[: len(content)] = content
