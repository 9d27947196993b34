"""Mark the folders of overlays as in use, and close overlays of processes that were killed.

A process that ends closes its overlay: it deletes the files of tensors without values, and the folder if no other file
is in it. A process that was killed cannot, so the next one that makes an overlay does it. The mark is a locked file:
the system releases the lock of a process that is gone, also of one in another container.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile

from memexplore.virtual_gpu.files import paths

if sys.platform != "win32":
    import fcntl

MARK = ".memexplore-in-use"
"""Name of the file in an overlay that its process has locked."""
_PREFIX = "memexplore-files-"


def make(temporary: str, without_values: bytes | None, prefix: str = _PREFIX) -> tuple[str, int]:
    """Return the path of a new overlay in a folder ("": that of temporary files), and the file that marks it.

    The overlays that killed processes of this user left in the folder are closed: files in them that contain
    `without_values` are deleted, all files if it is None; other files stay, and their folder is not closed again.
    """
    # Without `dir`, mkdtemp waits for a lock that `tempfile` holds while it tries folders with os.open.
    root = os.path.realpath(tempfile.mkdtemp(prefix=prefix, dir=temporary or None))
    owner = _claim(root)
    if sys.platform != "win32":
        folder = os.path.dirname(root)
        for name in os.listdir(folder):
            if name.startswith(prefix):
                # Without a mark, in use, of another user, or closed by another process at this moment.
                with contextlib.suppress(OSError):
                    _close_abandoned(os.path.join(folder, name), without_values)
    return root, owner


def _claim(root: str) -> int:
    """Mark an overlay as in use by this process, and return the open file that holds the lock; -1 on Windows."""
    if sys.platform == "win32":
        return -1
    # Under another name until it is locked: a file without a lock is that of a process that was killed.
    unlocked = os.path.join(root, MARK + "-")
    owner = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(unlocked, os.path.join(root, MARK))
    return owner


def release(root: str, owner: int) -> int:
    """Remove the mark of an overlay, and return that of one without a mark."""
    if owner >= 0:
        with contextlib.suppress(OSError):
            os.remove(os.path.join(root, MARK))
        os.close(owner)
    return -1


def _close_abandoned(root: str, without_values: bytes | None) -> None:
    if os.path.islink(root) or os.stat(root).st_uid != os.getuid():
        return
    owner = os.open(os.path.join(root, MARK), os.O_RDWR)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if without_values is None:
            shutil.rmtree(root)
            return
        for folder, _, names in os.walk(root):
            for path in (os.path.join(folder, name) for name in names):
                if not os.path.islink(path) and paths.holds_mark(path, without_values):
                    os.remove(path)
        os.remove(os.path.join(root, MARK))
        if not any(names for _, _, names in os.walk(root)):
            shutil.rmtree(root)
    finally:
        os.close(owner)


__all__ = ["MARK", "make", "release"]
