"""`TCPStore` and `FileStore` of one rank: stores of this process, which wait for no other process.

Torch's own wait for the other ranks, or leave a file behind. In: the arguments of torch's classes. Out: a store with
the same methods, whose keys this process alone has set. So does a `PrefixStore` around one, such as that of the
default group.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from memexplore.torch_internals.distributed import c10d
from memexplore.virtual_gpu.patches.install import Patch, Replace


def _check_can_be_set(store: torch.distributed.Store, key: str) -> None:
    """Raise `DistStoreError` for a key that is not set and that only another rank could set."""
    # Those of a notebook's kernel are daemons.
    may_set = any(not each.daemon for each in threading.enumerate() if each is not threading.current_thread())
    if not may_set and not store.check([key]):
        raise torch.distributed.DistStoreError(
            f"the store has no key {key!r}, and no other rank runs on a virtual GPU that could set it: "
            "set the key on this rank before it is read"
        )


class _OneRank(torch.distributed.HashStore):
    """A store whose keys this process alone sets: no other one is waited for."""

    def get(self, key: str) -> bytes:
        """Return the value of a key. Raises `DistStoreError` for one that only another rank could set."""
        _check_can_be_set(self, key)
        return super().get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Count keys that this process has not set as set by the ranks that are waited for."""


def _is_in_process(store: torch.distributed.Store) -> bool:
    """Return whether a store is one of this process only, also where its keys get a prefix."""
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    # The Python object of a `_OneRank` may be gone while the prefix keeps its C++ part.
    return isinstance(store, torch.distributed.HashStore)


def _prefix_get(self: torch.distributed.PrefixStore, key: str) -> bytes:
    # In C++ a PrefixStore calls the methods of HashStore, which wait.
    if _is_in_process(self):
        _check_can_be_set(self, key)
    return torch.distributed.Store.get(self, key)


def _prefix_wait(self: torch.distributed.PrefixStore, keys: Sequence[str], timeout: timedelta | None = None) -> None:
    if not _is_in_process(self):
        timeouts = () if timeout is None else (timeout,)
        torch.distributed.Store.wait(self, list(keys), *timeouts)


def patches() -> list[Patch]:
    """Return the patches of the classes, in the modules where programs find them."""
    made = {"TCPStore": _tcp_store(), "FileStore": _file_store()}
    modules = (torch.distributed, c10d)
    prefixed = torch.distributed.PrefixStore
    return [
        *(Replace(module, name, store) for name, store in made.items() for module in modules if hasattr(module, name)),
        Replace(prefixed, "get", _prefix_get),
        Replace(prefixed, "wait", _prefix_wait),
    ]


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
