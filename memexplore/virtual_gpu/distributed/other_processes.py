"""Replace functions of torch that start other processes, call them or wait for them: this process is alone.

`torch.multiprocessing.spawn` and `start_processes` run one process here, where the virtual GPU is; a new process would
have none. `TCPStore` and `FileStore` are stores of this process, also where their keys get a prefix, such as that of
the default group; torch's own wait for the other ranks, or leave a file behind. `torch.distributed.rpc` ends in one
sentence.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from memexplore.torch_internals.distributed import c10d
from memexplore.virtual_gpu.distributed import ranks
from memexplore.virtual_gpu.patches.install import Patch, Replace
from memexplore.virtual_gpu.tensors.tensor import DeviceState
from memexplore.virtual_gpu.values import notes
from memexplore.virtual_gpu.values.value_reads import NotSimulated


def patches() -> list[Patch]:
    """Return the patches of starting processes and of stores, in the modules where programs find them."""
    stores = {"TCPStore": _tcp_store(), "FileStore": _file_store()}
    modules = (torch.distributed, c10d)
    prefixed = torch.distributed.PrefixStore
    return [
        *(Replace(multiprocessing, name, _run_one) for name in ("spawn", "start_processes")),
        *(
            Replace(module, name, store)
            for name, store in stores.items()
            for module in modules
            if hasattr(module, name)
        ),
        Replace(prefixed, "get", _prefix_get),
        Replace(prefixed, "wait", _prefix_wait),
    ]


# --- started processes ------------------------------------------------------------------------------------------------


class _Ended:
    """The processes of `spawn(join=False)`, which have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *timeouts: Any) -> bool:
        """Return that all processes have ended."""
        return True

    def pids(self) -> list[int]:
        """Return the process ids: none was started."""
        return []


def _run_one(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, *rest: Any, **options: Any
) -> _Ended | None:
    number = DeviceState.cuda.index if DeviceState.cuda.index < nprocs else 0
    if nprocs > 1:
        name = f"number {number}" if number else "the first one"
        notes.assume(f"of {nprocs} processes {name} ran, in the process of the virtual GPU")
    fn(number, *args)
    return None if join else _Ended()


# --- stores -----------------------------------------------------------------------------------------------------------


def _check_can_be_set(store: torch.distributed.Store, key: str) -> None:
    """Raise `DistStoreError` for a key that is not set and that only another rank could set."""
    # Those of a notebook's kernel are daemons.
    may_set = any(not thread.daemon for thread in threading.enumerate() if thread is not threading.current_thread())
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


# --- calls of functions on other processes ----------------------------------------------------------------------------


def patches_of_remote_calls() -> list[Patch]:
    """Return the patch of `torch.distributed.rpc`, none where this build of torch has no remote calls."""
    rpc = torch.distributed.rpc
    return [Replace(rpc, "init_rpc", _of_one(rpc.init_rpc))] if rpc.is_available() else []


def _of_one(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `init_rpc` for a process that is alone; torch waits for the others without an end."""

    @functools.wraps(original)
    def init_rpc(
        name: str, backend: Any = None, rank: int = -1, world_size: int | None = None, *rest: Any, **options: Any
    ) -> Any:
        world = world_size or ranks.of_rendezvous("").world
        if world > 1:
            raise NotSimulated(
                f"torch.distributed.rpc calls functions on {world - 1} other processes, which do not run beside a "
                "virtual GPU: run the work of one of them without rpc, send tensors by torch.distributed, or profile "
                "on real GPUs"
            )
        return original(name, backend, rank, world_size, *rest, **options)

    return init_rpc
