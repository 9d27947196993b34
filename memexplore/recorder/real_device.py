"""Record on a real device: the CPU by a dispatch mode, a CUDA GPU also by the history of its allocator."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from memexplore.recorder import cuda, earlier_blocks, isolation
from memexplore.recorder.allocator_history import AllocatorHistory, History
from memexplore.recorder.annotation import annotate
from memexplore.recorder.events import LISTS
from memexplore.recorder.isolation import Unrelated
from memexplore.recorder.matching import Numbers
from memexplore.recorder.op_numbers import OpNumbers
from memexplore.recorder.recorder import Recorder, tells_about_arguments
from memexplore.tape import Category, Meta, Source, Tape
from memexplore.tape.process_limit import beside
from memexplore.text.tensor_text import tensor_text
from memexplore.text.units import size_text
from memexplore.torch_internals.dispatch import (
    FLATTEN,
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
    function_modes,
    runs_of,
)
from memexplore.torch_internals.tensors import (
    base_of,
    next_sequence_number,
    storage_key,
    storage_use_count,
    untyped_storage,
)
from memexplore.virtual_gpu.dispatch.interrupts import Deferral
from memexplore.virtual_gpu.patches.install import Replace
from memexplore.virtual_gpu.tensors.live_storages import StorageRef
from memexplore.virtual_gpu.user_traceback import hide_own_frames

_UNKNOWN = Category.UNKNOWN
_Storage = torch.UntypedStorage
# `torch.tensor` passes in memory that it has filled by the first. The second returns memory with its arguments in it.
_MAKES_STORAGES = (torch.ops.aten.lift_fresh.default, torch.ops.aten._cudnn_rnn_flatten_weight.default)
_RETURNS_VIEWS = torch.ops.aten._cudnn_rnn_backward.default
"""Returns the gradients of all weights of an RNN as views of one tensor."""
_STORAGE = torch.UntypedStorage(1)
_ALONE = storage_use_count(storage_key(_STORAGE)) + 1
"""Use count of a storage with one tensor, while Python has the storage: no other tensor is in it."""
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_PLAIN = (_Tensor,)  # with which the ops of AccumulateGrad come
_STRIDED = torch.strided
_OPS: dict[int, tuple[Callable[..., Any], bool, Any]] = {}
"""Id of an op -> what runs it, whether it tells what its arguments are, and the op, whose own hash takes longer."""
_MOST_OPS = 10_000
_MOST_EVENTS = 4_000_000
"""Events that the allocator keeps of a recording; of a longer one the first are lost."""
_FEW = 4
"""Outputs up to which the arguments of an op are searched for each."""


class RealMode(TorchDispatchMode):
    """Runs every op unchanged and records the storages that appear on one device, and when they are freed."""

    numbers: OpNumbers | None = None
    """Of a GPU, whose allocator has a history."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.live: dict[int, StorageRef] = {}
        self.recorder = recorder = Recorder(self.live, self.adopt)
        if device.type == "cpu":
            recorder.training = None
        # Bound once: each op needs them.
        self._local, self._dead, self._settle = recorder.local, recorder.dead, recorder.settle
        self._alloc: Callable[..., None] = recorder.alloc
        self._out_of_memory: Callable[..., None] = recorder.out_of_memory
        self._died = recorder.dead.append

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap __torch_dispatch__ in two more calls for every op.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and types != _PLAIN and any(hasattr(kind, FLATTEN) for kind in types):
            # A tensor around others, such as DTensor: its own code runs, and calls ops on the tensors inside.
            return NotImplemented
        if self._dead:
            self._settle()
        # What `Recorder.op` does, without its call.
        here = self._local.state
        here.stack = -2
        sequence = next_sequence_number()
        if sequence != here.sequence:
            self.recorder.made_node(here, sequence, func, 1)
        run, is_telling, _ = _OPS.get(id(func)) or _register_op(func)
        if is_telling:
            self.recorder.tag_arguments(here, func, (*args, *kwargs.values()) if kwargs else args)
        try:
            if self.numbers is not None:
                self.record_arguments(args)
                result = self.numbers.begin(run, func, args)(args, kwargs)
            else:
                result = run(*args, **kwargs) if kwargs else run(*args)
        except torch.OutOfMemoryError as error:
            self._out_of_memory(0, func, args)
            hide_own_frames(error)
            raise
        if self._dead:
            self._settle()
        kind = type(result)
        if (kind is _Tensor or kind is _Parameter) and not function_modes():
            # As below, in a fifth of the time: most outputs are tensors of these types in known storages.
            try:
                storage = untyped_storage(result)
            except NotImplementedError:  # sparse tensors have none
                return result
            ref = self.live.get(storage_key(storage))
            if ref is None or ref.size != storage.nbytes() or ref.address != storage.data_ptr():
                self._appeared(storage, ref, result, func, args, 0, None)
        elif result is not None:
            self._record_outputs(result, func, args)
        return result

    def record_arguments(self, args: Any) -> None:
        """Record the storages of an op's arguments; a CPU tensor may be new or old, so this does nothing."""

    def _record_outputs(self, result: Any, func: Any, args: Any) -> None:
        with DisableTorchFunction():
            if isinstance(result, _Tensor):
                self._record_output(result, func, args, 0)
            elif isinstance(result, LISTS):
                arguments = _by_storage(args, {}) if len(result) > _FEW else None
                for index, output in enumerate(result):
                    if isinstance(output, _Tensor):
                        self._record_output(output, func, args, index, arguments)
                    elif isinstance(output, LISTS):
                        # Such as the gradients of the weights of `_cudnn_rnn_backward`.
                        for inner in output:
                            if isinstance(inner, _Tensor):
                                self._record_output(inner, func, args, index, arguments)

    def _record_output(
        self, output: torch.Tensor, func: Any, args: Any, index: int, arguments: dict[int, torch.Tensor] | None = None
    ) -> None:
        if hasattr(output, FLATTEN):
            # A tensor around others, such as a result that a collective of DTensor has not received yet.
            return
        try:
            storage = untyped_storage(output)
        except NotImplementedError:  # sparse tensors and wrappers have none
            return
        ref = self.live.get(storage_key(storage))
        if ref is None or ref.size != storage.nbytes() or ref.address != storage.data_ptr():
            self._appeared(storage, ref, output, func, args, index, arguments)

    def _appeared(
        self,
        storage: torch.UntypedStorage,
        ref: StorageRef | None,
        output: torch.Tensor,
        func: Any,
        args: Any,
        index: int,
        arguments: dict[int, torch.Tensor] | None,
    ) -> None:
        """Record the storage of an output that was not recorded, or has another size or address than its `ref`."""
        if output.device != self.device or output.layout is not _STRIDED:
            return
        if type(output) is not _Tensor and isinstance(output, FakeTensor) and self.device.type == "cpu":
            # Code such as DTensor's runs ops on tensors without memory to learn shapes.
            return
        key = storage_key(storage)
        if ref is not None:
            self._release(ref)
        elif func not in _MAKES_STORAGES:
            if arguments is not None:
                argument = arguments.get(key)
            elif storage_use_count(key) > _ALONE:
                argument = _argument_in(storage, args)
            else:
                argument = None
                for value in args:
                    if value is output or (isinstance(value, LISTS) and _is_among(value, output)):
                        argument = output
                        break
            if argument is not None:
                self.adopt(argument)
                return
        size = storage.nbytes()
        if size:
            # A storage that was resized may have been seen first through a view of its tensor.
            text = tensor_text(output.shape, output.dtype) if ref is None else _text_of_base(output, size)
            if func is _RETURNS_VIEWS and output.nbytes != size:
                text = tensor_text((size // output.itemsize,), output.dtype)
            address = storage.data_ptr()
            self._alloc(address, size, func, args, index, _UNKNOWN, text)
            self._keep(storage, key, address, size)

    def adopt(self, tensor: torch.Tensor) -> StorageRef | None:
        """Record a storage older than the recording."""
        if self._dead:
            self._settle()
        if tensor.device != self.device or tensor.layout is not _STRIDED:
            return None
        storage = untyped_storage(tensor)
        size = storage.nbytes()
        if not size:
            return None
        address = storage.data_ptr()
        origin = earlier_blocks.origin_of(storage)
        self.recorder.preexisting(address, size, origin, _UNKNOWN, _text_of_base(tensor, size))
        return self._keep(storage, storage_key(storage), address, size)

    def resized(self, storage: torch.UntypedStorage, address: int, size: int) -> None:
        """Record that a storage, which had `size` bytes at an address, got another size without an op.

        FSDP frees gathered parameters by `resize_(0)`, and gives them memory again: category and module stay.
        """
        key, now = storage_key(storage), storage.nbytes()
        if now == size:
            return
        self._settle()
        ref = self.live.get(key)
        if ref is None and size:
            self.recorder.preexisting(address, size, None)
            ref = self._keep(storage, key, address, size)
        tag = None
        if ref is not None:
            tag = self.recorder.tag_at(ref.address) if ref.size else ref.tag
            self._release(ref)
        if not now:
            self._keep(storage, key, 0, 0).tag = tag
            return
        self._alloc(storage.data_ptr(), now, "UntypedStorage.resize_", (), 0, _UNKNOWN)
        self._keep(storage, key, storage.data_ptr(), now)
        if tag is not None:
            self.recorder.tag_block(storage.data_ptr(), tag)

    def _keep(self, storage: Any, key: int, address: int, size: int) -> StorageRef:
        ref = StorageRef(storage, self._died)
        ref.key, ref.address, ref.size, ref.origin, ref.tag = key, address, size, None, None
        self.live[key] = ref
        return ref

    def numbers_in(self, history: History) -> Numbers | None:
        """Return the numbers of the ops and those in a history of their run; None if neither has any."""
        if self.numbers is None or not (history.op_numbers >= 0).any():
            return None
        return Numbers(self.numbers, history.op_numbers)

    def _release(self, ref: StorageRef) -> None:
        if self.live.get(ref.key) is ref:
            del self.live[ref.key]
            if ref.size:
                self.recorder.free(ref.address, ref.size)


def _text_of_base(tensor: torch.Tensor, size: int) -> str:
    """Return shape and dtype of the tensor that a storage of `size` bytes was made for, empty if `tensor` is a part.

    The tensor is the base of a view. A view without a base, such as `x.t().detach()`, is recognised by its gaps or by
    the order of its dimensions in memory.
    """
    base = base_of(tensor)
    base = tensor if base is None else base
    if base.nbytes != size:
        return ""
    is_in_order = base.is_contiguous() or base.is_contiguous(memory_format=torch.channels_last)
    return tensor_text(base.shape, base.dtype) if is_in_order else ""


def _is_among(args: Any, output: torch.Tensor) -> bool:
    """Return whether an op's output is one of its arguments itself, arguments in lists included."""
    for value in args:  # noqa: SIM110 - a generator takes three times as long
        if value is output or (isinstance(value, LISTS) and _is_among(value, output)):
            return True
    return False


def _argument_in(storage: torch.UntypedStorage, args: Any) -> torch.Tensor | None:
    """Return the first of an op's tensor arguments in a storage, also inside lists; None without one."""
    for value in args:
        if isinstance(value, torch.Tensor):
            # A storage has one Python object while that is alive.
            if value.layout is torch.strided and untyped_storage(value) is storage:
                return value
        elif isinstance(value, LISTS):
            inner = _argument_in(storage, value)
            if inner is not None:
                return inner
    return None


def _by_storage(args: Any, tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the first of an op's tensor arguments in each storage, by the key of the storage."""
    for value in args:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                tensors.setdefault(storage_key(untyped_storage(value)), value)
        elif isinstance(value, LISTS):
            _by_storage(value, tensors)
    return tensors


def _register_op(func: Any) -> tuple[Callable[..., Any], bool, Any]:
    if len(_OPS) >= _MOST_OPS:
        _OPS.clear()
    entry = _OPS[id(func)] = runs_of(func), tells_about_arguments(func), func
    return entry


def noting_resizes(resize: Callable[..., Any], running: Callable[[], RealMode | None]) -> Callable[..., Any]:
    """Return `UntypedStorage.resize_`, which also notes the storage in the running mode: no mode sees it."""

    @functools.wraps(resize)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = running()
        if mode is None or self.device != mode.device:
            return resize(self, *args, **kwargs)
        address, size = self.data_ptr(), self.nbytes()
        result = resize(self, *args, **kwargs)
        mode.resized(self, address, size)
        return result

    return noting


class CudaMode(RealMode):
    """A `RealMode` that records arguments too: the allocator's history has the time at which each was made.

    Each op has a number, which the history's stacks have as well.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        numbers = self.numbers = OpNumbers(self.recorder)
        self._alloc, self._out_of_memory = map(numbers.noting, (self._alloc, self._out_of_memory))

    def record_arguments(self, args: Any) -> None:
        """Record the storages of an op's arguments that are older than the recording."""
        for value in args:
            if isinstance(value, torch.Tensor):
                if value.layout is torch.strided and value.device == self.device:
                    with DisableTorchFunction():
                        if storage_key(untyped_storage(value)) not in self.live:
                            self.adopt(value)
            elif isinstance(value, LISTS):
                self.record_arguments(value)


@contextlib.contextmanager
def note_failure(error: BaseException, beginning: str) -> Iterator[None]:
    """Add an exception of the block to `error` as a note that begins with `beginning`, instead of raising it."""
    try:
        yield
    except Exception as failure:
        error.add_note(f"{beginning} ({type(failure).__name__}: {failure}).")


class RealDevice:
    """A recording on a device, by default the current CUDA device, or the CPU if there is none."""

    def __init__(
        self, versions: Mapping[str, str], device: torch.device | None = None, unrelated: Unrelated = Unrelated.KEPT
    ) -> None:
        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = device.type == "cuda"
        if on_gpu and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.mode = (CudaMode if on_gpu else RealMode)(device)
        self.history: History | None = None
        self.meta = cuda.meta(device, versions) if on_gpu else Meta(Source.MEASURED, "cpu", versions=dict(versions))
        self._unrelated = unrelated

    @property
    def recorder(self) -> Recorder:
        """The recorder of the dispatch mode."""
        return self.mode.recorder

    def limit(self) -> int | None:
        """Return the bytes that this process may reserve on the device now, None without a limit."""
        return cuda.memory_limit(self.device) if self.device.type == "cuda" else None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record the block; on a GPU the history of the allocator is recorded as well."""
        interrupts = Deferral()
        undo = interrupts.undo()
        try:
            interrupts.install()
            with self._watch():
                yield
        finally:
            undo()

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        if self.device.type == "cpu":
            resize = Replace(_Storage, "resize_", noting_resizes(_Storage.resize_, lambda: self.mode))
            undo = resize.undo()
            try:
                resize.install()
                with self.mode:
                    yield
            finally:
                undo()
            return
        history = AllocatorHistory(self.device, _MOST_EVENTS)
        try:
            history.begin()
            try:
                with self.mode:
                    yield
            except BaseException as error:
                with note_failure(error, "memexplore could not read the allocator's history"):
                    self.history = history.read()
                raise
            else:
                self.history = history.read()
        finally:
            history.end()

    def finish(self, recorded: Tape) -> Tape:
        """Return the tape of the recording: on a GPU the allocator's rows, annotated with the recorded ones."""
        earlier = None if self.history is None else earlier_blocks.earlier(self.device)
        earlier_blocks.keep_storages(self.mode.live.values())
        self.mode.live.clear()
        if self.history is None or earlier is None:
            return recorded
        tape = annotate(self.history.tape, recorded, self.mode.numbers_in(self.history), earlier)
        earlier_blocks.keep_workspaces(self.device, tape)
        if self._unrelated is Unrelated.KEPT:
            return tape
        tape, held = isolation.drop_unrelated(tape, recorded)
        if not held:
            return tape
        note = f"{size_text(held)} of the GPU were reserved for other tensors of this process: the run had the rest."
        meta = tape.meta
        return tape.replace(meta=beside(meta._replace(notes=(*meta.notes, note)), held))
