"""`TCPStore` and `FileStore` of one rank: stores of this process, which wait for no other process.

Torch's own wait for the other ranks, or leave a file behind. In: the arguments of torch's classes. Out: a store with
the same methods, whose keys this process alone has set.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from memexplore.torch_internals.distributed import c10d
from memexplore.virtual_gpu.patches.install import Patch, Replace


class _OneRank(torch.distributed.HashStore):
    """A store whose keys this process alone sets: no other one is waited for."""

    def get(self, key: str) -> bytes:
        """Return the value of a key. Raises `DistStoreError` for one that only another rank could set."""
        # Those of a notebook's kernel are daemons.
        may_set = any(not each.daemon for each in threading.enumerate() if each is not threading.current_thread())
        if not may_set and not self.check([key]):
            raise torch.distributed.DistStoreError(
                f"the store has no key {key!r}, and no other rank runs on a virtual GPU that could set it: "
                "set the key on this rank before it is read"
            )
        return super().get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Count keys that this process has not set as set by the ranks that are waited for."""


def patches() -> list[Patch]:
    """Return the patches of both classes, in the modules where programs find them."""
    made = {"TCPStore": _tcp_store(), "FileStore": _file_store()}
    modules = (torch.distributed, c10d)
    return [Replace(module, name, store) for name, store in made.items() for module in modules if hasattr(module, name)]


def _tcp_store() -> type:
    class TCPStore(_OneRank):
        """A store that is named as one of a host."""

        def __init__(
            self,
            host_name: str,
            port: int,
            world_size: int | None = None,
            is_master: bool = False,
            timeout: timedelta | None = None,
            *rest: Any,
            **options: Any,
        ) -> None:
            super().__init__()
            self.host, self.port = host_name, port
            if timeout is not None:
                self.set_timeout(timeout)

    return TCPStore


def _file_store() -> type:
    class FileStore(_OneRank):
        """A store that is named as one in a file."""

        def __init__(self, file_name: str, world_size: int = -1) -> None:
            super().__init__()
            self.path = file_name

    return FileStore
