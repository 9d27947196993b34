"""`TCPStore` and `FileStore` of one rank: stores of this process, which wait for no other process.

Torch's own wait for the other ranks, or leave a file behind. In: the arguments of torch's classes. Out: a store with
the same methods, whose keys this process alone has set.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from memexplore.torch_internals.distributed import c10d
from memexplore.virtual_gpu.patches.install import Patch, Replace


def patches() -> list[Patch]:
    """Return the patches of both classes, in the modules where programs find them."""
    made = {"TCPStore": _tcp_store(), "FileStore": _file_store()}
    modules = (torch.distributed, c10d)
    return [Replace(module, name, store) for name, store in made.items() for module in modules if hasattr(module, name)]


def _tcp_store() -> type:
    class TCPStore(torch.distributed.HashStore):
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
    class FileStore(torch.distributed.HashStore):
        """A store that is named as one in a file."""

        def __init__(self, file_name: str, world_size: int = -1) -> None:
            super().__init__()
            self.path = file_name

    return FileStore
