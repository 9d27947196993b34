"""Carry out plans on the allocator of one virtual GPU, and report what they request and free to an observer.

A storage that dies frees its block (`StorageRef`).
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from memexplore.allocator import Allocator, OutOfMemory
from memexplore.tape import Category
from memexplore.text.tensor_text import tensor_text
from memexplore.torch_internals.tensors import current_autograd_node, storage_key, untyped_storage
from memexplore.virtual_gpu.dispatch import plans, streams
from memexplore.virtual_gpu.dispatch.interrupts import uninterrupted
from memexplore.virtual_gpu.dispatch.work import Work, of_handled
from memexplore.virtual_gpu.kernels import traffic
from memexplore.virtual_gpu.kernels.cublas_workspace import BACKWARD, Key, Library, Workspaces
from memexplore.virtual_gpu.kernels.plan import (
    Argument,
    Kept,
    NewTensor,
    OptionalScratch,
    Output,
    Plan,
    PossibleWorkspace,
    Scratch,
    View,
)
from memexplore.virtual_gpu.tensors.live_storages import (
    StorageRef,
    bytes_of_text,
    forget,
    keep_dead,
    live_storages,
    storage_ref,
)
from memexplore.virtual_gpu.values import notes

lock = threading.RLock()
"""Held by the thread whose op runs on the virtual GPU, or which asks its allocator."""


frees: collections.deque[StorageRef] = collections.deque()
"""Storages that died while another thread had the lock, or while the allocator was at work: their blocks are not free.

The garbage collector may run at any line of Python, and so may the callback of a weak reference.
"""


def _renew_lock() -> None:
    global lock
    lock = threading.RLock()


# Another thread may hold the lock while a process forks, such as a DataLoader's; in the child that thread is gone.
os.register_at_fork(after_in_child=_renew_lock)


class Observer(Protocol):
    """Receiver of memory events: a recorder. `func` and `args` are the op that runs, `index` the output."""

    def alloc(
        self, address: int, size: int, func: Any, args: Any, index: int, category: Category, tensor: str, stream: int
    ) -> None:
        """A block was allocated for a tensor of a shape and dtype (`tensor_text`), empty for another purpose."""

    def possible_workspace(self, address: int, sizes: tuple[int, ...]) -> None:
        """A workspace of one of these sizes may follow a block that was just allocated (`plan.PossibleWorkspace`)."""

    def free(self, address: int, size: int) -> None:
        """A block was freed."""

    def reallocated(self, address: int, size: int, origin: Any, tensor: str) -> None:
        """A storage of an earlier virtual GPU was allocated on this one."""

    def op(self, func: Any, args: Any) -> None:
        """An op of the forward or backward pass is about to run."""

    def out_of_memory(self, size: int, func: Any, args: Any, tensor: str, stream: int) -> None:
        """A request did not fit."""

    def used_on(self, address: int, stream: int) -> None:
        """A stream uses a block, as `Tensor.record_stream` says."""

    def position(self) -> int:
        """Return how much has been observed, for `ordered` and `finished`."""

    def ordered(self, stream: int, other: int, until: int | None) -> None:
        """A stream waits for another one's work up to a position, None for all so far."""

    def finished(self, stream: int | None, until: int | None) -> None:
        """The program waits for a stream's work up to a position; None: for all streams, for all so far."""

    def may_be_free(self, address: int) -> None:
        """A block is free from now on if the GPU does not lag: only a collective that has begun holds it."""

    def tag_at(self, address: int) -> Any:
        """Return what the observer knows about the contents of a block, or None."""

    def tag_block(self, address: int, tag: Any) -> None:
        """A block has the contents that another had, whose `tag_at` was `tag`."""


class PlanRunner:
    """Carries out plans on one allocator; `observer` and `work_log` get events and work where they are set."""

    on = False
    """Whether the GPU is on: a thread that outlives its block still has the dispatch mode."""
    busy = False
    """Whether the allocator or the observer is at work on a request or a free."""

    def __init__(self, allocator: Allocator, workspaces: Workspaces) -> None:
        self.allocator = allocator
        self.workspaces = workspaces
        self.observer: Observer | None = None
        self.work_log: list[Work] | None = None
        """Gets the work of every op, `traffic_log` what every collective sends."""
        self.traffic_log: list[traffic.Traffic] | None = None
        self.seconds_of: Callable[[Work], float] = lambda work: 0.0
        self._sizes: dict[int, int] = {}
        """Address -> bytes of the blocks that belong to no tensor."""
        self._held: list[StorageRef] = []
        """Storages that died while a collective holds them, since the latest collective began."""
        self._clock: float | None = None
        """Seconds of all ops since somebody asked for the time; None before."""
        self.has_earlier_tensors = False
        """Whether storages of an earlier virtual GPU are alive, which are allocated here when they are used."""
        self.has_shrunk_storages = any(not ref.size for ref in list(live_storages.values()))
        """Whether `resize_` has made a storage smaller than its tensors (shrunk_storages.py)."""
        self.keeps_real_targets = False
        """Whether a copy into a CPU tensor leaves its values, because the GPU has the same ones."""

    def time(self) -> float:
        """Return the seconds that the GPU needs for all ops since the first call, by the roofline model."""
        if self._clock is None:
            self._clock = 0.0
        return self._clock

    def allocate(self, size: int, name: str) -> int:
        """Allocate a block that belongs to no tensor, for a function of a name, and return its address."""
        address = self._allocate(size, name, (), 0, Category.UNKNOWN)
        self._sizes[address] = size
        return address

    def free(self, address: int) -> None:
        """Free a block that `allocate` returned. Raises ValueError for any other address."""
        if address not in self._sizes:
            raise ValueError(f"invalid device pointer: {address:#x}")
        self._free(address, self._sizes.pop(address))

    def collective_begins(self) -> None:
        """Report the blocks that only earlier collectives hold, which end before this one if the GPU does not lag."""
        kept, self._held = self._held, []
        for ref in kept:
            if ref.holds and ref.address and self.observer is not None:
                self.observer.may_be_free(ref.address)

    def free_held(self, ref: StorageRef) -> None:
        """Free the block of a dead storage that no collective holds any more."""
        _free_dead_storage(ref)

    def free_workspaces(self) -> None:
        """Free the workspaces of cuBLAS and cuBLASLt, which the next matrix product of each thread allocates again."""
        kept = self.workspaces.kept
        for key in [key for key in kept if key.library is not Library.DROPOUT]:
            self._free(kept.pop(key), self.workspaces.sizes[key.library])

    @uninterrupted
    def run_plan(
        self, plan: Plan, func: Any, args: Any, tensors: list[torch.Tensor], values_known: bool = False
    ) -> Any:
        """Allocate the memory of a plan and return its outputs, uninterrupted: a block without a tensor is never freed.

        Real tensors that the op writes to get the value 1, unless the values that it writes are known.
        Raises torch.OutOfMemoryError where a request does not fit; then none of the outputs stays allocated.
        """
        if self.work_log is not None or self._clock is not None or self.traffic_log is not None:
            self._count_work(plan, func, args)
        addresses = self._allocate_outputs(plan, func, args) if plan.allocates else {}
        results = self._results(plan, addresses, tensors)
        if plan.set_hints is not None:
            plan.set_hints(tensors, results)
        if plan.waits and self.observer is not None:
            self.observer.finished(streams.current(), None)
        if plan.real_targets and not (values_known or self.keeps_real_targets):
            notes.assume("what is copied from the virtual GPU into a tensor on the CPU counts as 1")
            for position in plan.real_targets:
                tensors[position].fill_(1)
        return results[0] if plan.returns is None else plan.returns(results)

    def _count_work(self, plan: Plan, func: Any, args: Any) -> None:
        """Add the work of an op to the logs and to the clock that somebody has asked for."""
        if self.traffic_log is not None and traffic.is_functional(func):
            self.traffic_log.append(traffic.of_functional(func, args))
        if plan.work is None:
            plan.work = of_handled(func, args, plan.outputs)
        if plan.work is not None:
            if self.work_log is not None:
                self.work_log.append(plan.work)
            if self._clock is not None:
                self._clock += self.seconds_of(plan.work)

    def _allocate_outputs(self, plan: Plan, func: Any, args: Any) -> dict[int, int]:
        """Carry out the requests of a plan and return the addresses of its outputs, by their numbers."""
        outputs = plan.outputs
        addresses: dict[int, int] = {}
        try:
            if plan.requests is None:
                for index, output in enumerate(outputs):
                    if type(output) is NewTensor and output.size and not output.host:
                        addresses[index] = self._allocate(
                            output.size, func, args, index, Category.UNKNOWN, plan.texts[index]
                        )
                if plan.libraries:
                    self._keep_workspaces(plan.libraries, func, args)
            else:
                self._run_requests(plan, addresses, func, args)
        except torch.OutOfMemoryError:
            for index, address in reversed(addresses.items()):
                self._free(address, outputs[index].size)  # type: ignore[union-attr]
            raise
        return addresses

    def _results(self, plan: Plan, addresses: dict[int, int], tensors: list[torch.Tensor]) -> list[Any]:
        """Return the outputs of a plan; the blocks of new tensors are freed when their storages die."""
        results: list[Any] = []
        for index, output in enumerate(plan.outputs):
            kind = type(output)
            if kind is NewTensor:
                result: Any = plans.build(output)  # type: ignore[arg-type]
                if index in addresses:
                    self._watch(untyped_storage(result), addresses[index], output.size, plan.texts[index])  # type: ignore[union-attr]
            elif kind is Argument:
                result = tensors[output.source]  # type: ignore[union-attr]
            elif kind is View:
                source = output.source  # type: ignore[union-attr]
                result = plans.build_view(output, results[~source] if source < 0 else tensors[source])  # type: ignore[arg-type]
            else:
                result = output.value  # type: ignore[union-attr]
            results.append(result)
        return results

    def reallocate(self, tensor: torch.Tensor) -> StorageRef | None:
        """Allocate the storage of a tensor of an earlier virtual GPU here, if it has no memory; return its reference.

        Raises torch.OutOfMemoryError where it does not fit.
        """
        ref = live_storages.get(storage_key(untyped_storage(tensor)))
        if ref is not None and not ref.address and ref.size:
            failure = ""
            try:
                ref.address = self.allocator.malloc(ref.size)
            except OutOfMemory as error:
                failure = str(error)
            if failure:
                raise torch.OutOfMemoryError(failure)
            if self.observer is not None:
                self.observer.reallocated(ref.address, ref.size, ref.origin, ref.tensor)
        return ref

    def reallocate_all(self, tensors: list[torch.Tensor]) -> None:
        """Allocate the storages here that an earlier virtual GPU has left without memory."""
        for tensor in tensors:
            self.reallocate(tensor)

    def resize(self, tensor: torch.Tensor, size_before: int, func: Any, args: Any) -> None:
        """Allocate a storage again whose size an op such as `resize_` changed."""
        storage = untyped_storage(tensor)
        size = storage.nbytes()
        ref = live_storages.get(storage_key(storage))
        if size != size_before and (ref is None or ref.size != size):
            self.resize_storage(storage, size, func, args, tensor_text(tuple(tensor.shape), tensor.dtype))

    @uninterrupted
    def resize_storage(
        self, storage: torch.UntypedStorage, size: int, func: Any, args: Any, tensor: str | None = None
    ) -> None:
        """Give a storage a block of `size` bytes and free its old one; size 0 frees only.

        `tensor` is the text of the resized tensor; None keeps that of the storage, if its tensor has `size` bytes.

        The new block is allocated first, also where it is smaller or of the same size: resize_bytes_cuda in
        aten/src/ATen/native/cuda/Resize.cpp. Raises torch.OutOfMemoryError, and then the old block stays.
        """
        observer = self.observer
        ref = live_storages.get(storage_key(storage))
        known = ref.tensor if tensor is None and ref is not None else tensor or ""
        text = known if tensor or bytes_of_text(known) == size else ""
        address = self._allocate(size, func, args, 0, Category.UNKNOWN, text) if size else 0
        ref = live_storages.get(storage_key(storage))
        tag = None
        if ref is not None:
            tag = ref.tag if observer is None or not ref.address else observer.tag_at(ref.address)
            self.has_shrunk_storages |= size < ref.size
            ref.holds = 0  # who holds the storage has none of its memory
            _free_dead_storage(ref)
        if size:
            self._watch(storage, address, size, text)
            if observer is not None and tag is not None:
                observer.tag_block(address, tag)
        else:
            self._watch(storage, 0, 0, known).tag = tag

    def _run_requests(self, plan: Plan, addresses: dict[int, int], func: Any, args: Any) -> None:
        """Carry out requests in order, writing the addresses of outputs; scratch memory is freed at the end."""
        scratch: list[tuple[int, int]] = []
        number = -1
        try:
            for request in plan.requests or ():
                kind = type(request)
                if kind is Output:
                    output: Any = plan.outputs[request.number]  # type: ignore[union-attr]
                    number = request.number  # type: ignore[union-attr]
                    if output.size and not output.host:
                        addresses[number] = self._allocate(
                            output.size, func, args, number, Category.UNKNOWN, plan.texts[number]
                        )
                elif kind is Scratch:
                    size, category = request  # type: ignore[misc]
                    scratch.append((self._allocate(size, func, args, 0, category), size))
                elif kind is Kept:
                    self._keep_workspaces((request.library,), func, args)  # type: ignore[union-attr]
                elif kind is OptionalScratch:
                    scratch.append(self._allocate_if_it_fits(request, func, args))  # type: ignore[arg-type]
                elif kind is PossibleWorkspace:
                    self._report_possible(request, addresses.get(number))  # type: ignore[arg-type]
                elif scratch[request.number][0] >= 0:  # type: ignore[union-attr]
                    self._free(*scratch[request.number])  # type: ignore[union-attr]
                    scratch[request.number] = (-1, 0)  # type: ignore[union-attr]
            if plan.libraries:
                self._keep_workspaces(plan.libraries, func, args)
        finally:
            for address, size in reversed(scratch):
                if address >= 0:
                    self._free(address, size)

    @uninterrupted
    def _allocate_if_it_fits(self, request: OptionalScratch, func: Any, args: Any) -> tuple[int, int]:
        """Return address and size, (-1, 0) where the request does not fit."""
        stream = streams.current()
        self.busy = True
        try:
            address = self.allocator.malloc(request.size, stream)
            if self.observer is not None:
                self.observer.alloc(address, request.size, func, args, 0, request.category, "", stream)
        except OutOfMemory:
            return -1, 0
        finally:
            self.busy = False
        return address, request.size

    def _report_possible(self, request: PossibleWorkspace, address: int | None) -> None:
        """Report what may follow an output, None for one that has no block."""
        if self.observer is not None and address is not None:
            self.observer.possible_workspace(address, request.sizes)

    def _keep_workspaces(self, libraries: tuple[Library, ...], func: Any, args: Any) -> None:
        # A real GPU's backward runs in a thread of its own, with a cuBLAS handle of its own.
        handle = self.workspaces.handle() if current_autograd_node() is None else BACKWARD
        for library in libraries:
            key = Key(library) if library is Library.DROPOUT else Key(library, handle, streams.current())
            size = self.workspaces.needed(key)
            if size:
                self.workspaces.keep(key, self._allocate(size, func, args, 0, Category.WORKSPACE))

    @uninterrupted
    def _allocate(self, size: int, func: Any, args: Any, index: int, category: Category, tensor: str = "") -> int:
        observer, stream = self.observer, streams.current()
        failure = ""
        self.busy = True
        try:
            address = self.allocator.malloc(size, stream)
            if observer is not None:
                observer.alloc(address, size, func, args, index, category, tensor, stream)
        except OutOfMemory as error:
            failure = str(error)
            if observer is not None:
                observer.out_of_memory(size, func, args, tensor, stream)
        finally:
            self.busy = False
        if failure:
            # Outside of the block: as its context, the allocator's error would keep the frames of all callers alive.
            raise torch.OutOfMemoryError(failure)
        if frees:
            free_waiting()
        return address

    @uninterrupted
    def _free(self, address: int, size: int) -> None:
        self.busy = True
        try:
            self.allocator.free(address)
            if self.observer is not None:
                self.observer.free(address, size)
        finally:
            self.busy = False

    def _watch(self, storage: Any, address: int, size: int, tensor: str) -> StorageRef:
        """Free a block when the storage that has it dies."""
        return storage_ref(storage, address, size, _free_dead_storage, tensor)


_active: PlanRunner | None = None


def active() -> PlanRunner | None:
    """Return the runner of the virtual GPU that is on, or None."""
    return _active


def set_active(runner: PlanRunner | None) -> None:
    """Make a runner the one whose allocator gets back the blocks of storages that die; None for no runner."""
    global _active
    if _active is not None:
        _active.on = False
    frees.clear()
    _active = runner
    if runner is not None:
        runner.on = True


@uninterrupted
def free_waiting() -> None:
    """Free the blocks of the storages that died while they could not be freed. The caller has the lock."""
    while frees:
        _free_block(frees.popleft())


@uninterrupted
def _free_dead_storage(ref: StorageRef) -> None:
    forget(ref)
    runner = _active
    if runner is None:
        return
    if ref.holds:
        keep_dead(ref)
        runner._held.append(ref)
        return
    present_lock = lock  # a fork may replace it
    # Never wait for the lock here: the thread that has it may wait for a lock of this thread, such as an import's.
    if runner.busy or not present_lock.acquire(blocking=False):
        frees.append(ref)
        return
    try:
        _free_block(ref)
        if frees:
            free_waiting()
    finally:
        present_lock.release()


def _free_block(ref: StorageRef) -> None:
    runner = _active
    if runner is not None and ref.address:
        address, ref.address = ref.address, 0
        runner._free(address, ref.size)
