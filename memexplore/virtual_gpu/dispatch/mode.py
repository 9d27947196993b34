"""The dispatch mode of the virtual GPU: runs ops on fake tensors and asks the allocator for every byte."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

import torch

from memexplore.allocator import OutOfMemory
from memexplore.tape import Category
from memexplore.torch_internals.dispatch import (
    DataDependentOutputException,
    DisableTorchFunction,
    DynamicOutputShapeException,
    TorchDispatchMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    fake_device_of,
)
from memexplore.torch_internals.tensors import current_autograd_node, storage_key, untyped_storage
from memexplore.virtual_gpu.dispatch import autograd_engine, device_mixing, plans, shape_rules, work
from memexplore.virtual_gpu.dispatch.op_traits import Known
from memexplore.virtual_gpu.kernels import table
from memexplore.virtual_gpu.kernels.cublas_workspace import Thread
from memexplore.virtual_gpu.patches.device_names import renamed
from memexplore.virtual_gpu.tensors import value_hints, values
from memexplore.virtual_gpu.tensors.tensor import DeviceState, StorageRef, VirtualTensor, fake_cpu_tensor, live_storages

if TYPE_CHECKING:
    from memexplore.allocator import Allocator
    from memexplore.virtual_gpu.dispatch.work import Work
    from memexplore.virtual_gpu.kernels.cublas_workspace import Workspaces

_PRIM_DEVICE = torch.ops.prim.device.default
_aten = torch.ops.aten
_ADD = _aten.add.Tensor
_inference_is_on = torch.is_inference_mode_enabled

FAKE_FROM = 1 << 20
"""Tensors from 1 MiB on that a module makes on the CPU while it is built take no memory; smaller ones are real."""


class Observer(Protocol):
    """Who is told of every request: a recorder."""

    def alloc(self, address: int, size: int, func: Any, args: Any, index: int, category: Category) -> None:
        """A request was placed."""

    def free(self, address: int, size: int) -> None:
        """The block at an address was given back."""

    def reallocated(self, address: int, size: int, origin: Any) -> None:
        """A block made on an earlier virtual GPU was placed on this one."""

    def op(self, func: Any, args: Any) -> None:
        """An op of the forward or backward pass ran."""

    def out_of_memory(self, size: int, func: Any, args: Any) -> None:
        """A request did not fit."""


class VirtualMode(TorchDispatchMode):
    """Runs ops on the virtual device; tensors on the CPU stay real and run for real."""

    def __init__(
        self, allocator: Allocator, workspaces: Workspaces, remembered: dict[tuple[Any, ...], plans.Plan]
    ) -> None:
        super().__init__()
        self.allocator = allocator
        self.workspaces = workspaces
        self.observer: Observer | None = None
        self.work_log: list[Work] | None = None
        """Where the work of every op is noted, if anywhere."""
        self.has_earlier_tensors = False
        """Whether tensors of an earlier virtual GPU may still be used here."""
        self._funcs: dict[Any, Known] = {}
        self._plans = remembered
        self._current: tuple[Any, Any] = (None, ())
        self._zeros = 0
        """The storage that the last op made and filled with zeros."""
        autograd_engine.alone()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap __torch_dispatch__ in two more calls for every op.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _PRIM_DEVICE:
            return fake_device_of(args[0])
        with DisableTorchFunction():
            return self._run(func, types, args, kwargs)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        known = self._known(func)
        host = VirtualTensor not in types
        device = kwargs.get("device") if kwargs else None
        if device is not None and device.type != "cpu":
            if device.type != "meta":
                kwargs = {**kwargs, "device": renamed(device)}
                host = False
            elif DeviceState.meta_calls:
                return func(*plans.on_meta(args), **(kwargs or {}))
            elif DeviceState.cuda_calls_on_meta or not (host and _on_meta(args)):
                host = False
        elif host and known.factory and _builds_module(args, kwargs or {}):
            return fake_cpu_tensor(args[0], kwargs.get("dtype") if kwargs else None)
        if kwargs and kwargs.get("pin_memory"):
            # Pinned memory is host memory, and its allocator wants a device behind it.
            kwargs = {**kwargs, "pin_memory": False}
        if host:
            return func(*args, **(kwargs or {}))
        if _inference_is_on():
            return self._in_inference(known, func, types, args, kwargs or {})
        if known.restored and autograd_engine.called_from_engine(2):
            if func is _ADD:
                if autograd_engine.accumulates(args):
                    return args[0]
            elif func in autograd_engine.INTO_ZEROS:
                if storage_key(untyped_storage(args[0])) == self._zeros:
                    func, further = autograd_engine.INTO_ZEROS[func]
                    args = (*args, *further)
                    known = self._known(func)
            else:
                func = autograd_engine.goes_on(func, args) or func
                known = self._known(func)
        key: list[Any] = [func]
        tensors: list[torch.Tensor] = []
        plans.read(key, tensors, args)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                plans.read(key, tensors, (value,))
        observer = self.observer
        if observer is not None:
            observer.op(func, args)
        if self.has_earlier_tensors:
            for tensor in tensors:
                self.reallocate(tensor)
        if known.assumed is not None:
            answer = known.assumed(self, func, args, kwargs or {})
            if answer is not NotImplemented:
                return answer
        if not known.cached:
            return self._uncached(func, types, args, kwargs or {}, tensors)
        hashable = tuple(key)
        plan = self._plans.get(hashable)
        if plan is None:
            values.noted.clear()
            plan = self._plans[hashable] = self._plan(func, types, args, kwargs or {}, tensors)
            plan.notes = tuple(values.noted)
        elif plan.notes:
            for note in plan.notes:
                values.note(note)
        result = self.carry_out(plan, func, args, tensors)
        if known.zeros:
            self._zeros = storage_key(untyped_storage(result))
        return result

    def _in_inference(self, known: Known, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of inference mode, which leaves composite ops whole: they are called again outside it."""
        with torch.inference_mode(False), torch.no_grad():
            if known.composite:
                with self:
                    return func(*args, **kwargs)
            return self._run(func, types, args, kwargs)

    def _known(self, func: Any) -> Known:
        known = self._funcs.get(func)
        if known is None:
            known = self._funcs[func] = Known(func)
        return known

    def reallocate(self, tensor: torch.Tensor) -> Any:
        """Place a tensor of an earlier virtual GPU that is used on this one; the answer is its `StorageRef`, if any."""
        ref = live_storages.get(storage_key(untyped_storage(tensor)))
        if ref is not None and not ref.address:
            try:
                ref.address = self.allocator.malloc(ref.size)
            except OutOfMemory as error:
                raise torch.OutOfMemoryError(str(error)) from None
            if self.observer is not None:
                self.observer.reallocated(ref.address, ref.size, ref.origin)
        return ref

    def _plan(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> plans.Plan:
        device_mixing.check(func, tensors)
        whole = table.PLANS.get(func)
        if whole is not None:
            plan = whole(args, kwargs)
            plan.work = work.of(func, args, kwargs, tensors, plan.outputs)
            return plan
        returns: type | None = tuple
        outputs = shape_rules.outputs(func, args, kwargs, tensors)
        if outputs is None:
            outputs, returns = plans.describe(*self._execute(func, types, args, kwargs, tensors))
        requests, gemm = table.requests(func, args, kwargs, outputs, self.workspaces)
        after = value_hints.AFTER.get(func)
        fills = plans.written(func, args, kwargs, tensors)
        plan = plans.Plan(outputs, returns, requests, gemm, after(args) if after is not None else None, fills)
        plan.work = work.of(func, args, kwargs, tensors, outputs)
        return plan

    def _execute(
        self, func: Any, types: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> tuple[Any, list[torch.Tensor]]:
        replacement = table.FAKE.get(func)
        try:
            if replacement is not None:
                result, stand_ins = replacement(*args, **kwargs), tensors
            elif shape_rules.applies(func, tensors):
                stand_ins = [shape_rules.stand_in(tensor) for tensor in tensors]
                args, kwargs = plans.exchange(args, kwargs, tensors, stand_ins)
                result = func(*args, **kwargs)
            else:
                result, stand_ins = plans.execute(func, types, args, kwargs, tensors)
            plans.refuse_layouts(result)
        except (
            NotImplementedError,
            DynamicOutputShapeException,
            DataDependentOutputException,
            UnsupportedFakeTensorException,
            UnsupportedOperatorException,
        ) as error:
            raise plans.unsupported(func, error) from error
        except ValueError as error:
            if func is _aten.view.default:
                raise RuntimeError(plans.NO_VIEW) from error
            raise
        except RuntimeError as error:
            # FakeTensorDeviceMismatchError has a class of its own only from torch 2.12 on.
            if "found two different devices" in str(error) or "on the same device" in str(error):
                raise device_mixing.mixed(func, tensors) from error
            raise
        if result is NotImplemented:
            raise plans.unsupported(func, TypeError("a tensor class that the virtual GPU does not know"))
        return result, stand_ins

    def _uncached(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        device_mixing.check(func, tensors)
        before = [untyped_storage(tensor).nbytes() for tensor in tensors]
        result, stand_ins = self._execute(func, types, args, kwargs, tensors)
        for tensor, size in zip(tensors, before, strict=True):
            if isinstance(tensor, VirtualTensor) and not tensor.host:
                self._grown(tensor, size, func, args)
        outputs, returns = plans.describe(result, stand_ins)
        fills = plans.written(func, args, kwargs, tensors)
        return self.carry_out(plans.Plan(outputs, returns, None, False, None, fills), func, args, tensors)

    def _grown(self, tensor: VirtualTensor, before: int, func: Any, args: Any) -> None:
        """Place a storage whose size changed under the op: `resize_` asks for a new block and frees the old one."""
        storage = untyped_storage(tensor)
        size = storage.nbytes()
        ref = live_storages.get(storage_key(storage))
        if size == before or (ref is not None and ref.size == size):
            return
        address = self._request(size, func, args, 0, Category.UNKNOWN) if size else 0
        if ref is not None:
            _release(ref)
        if size:
            self._keep(storage, address, size)

    def carry_out(self, plan: plans.Plan, func: Any, args: Any, tensors: list[torch.Tensor]) -> Any:
        """Ask for a plan's memory and build its outputs."""
        outputs = plan.outputs
        if self.work_log is not None and plan.work is not None:
            self.work_log.append(plan.work)
        placed: dict[int, int] = {}
        try:
            if plan.requests is None:
                for index, output in enumerate(outputs):
                    if type(output) is plans.New and output.size and not output.host:
                        placed[index] = self._request(output.size, func, args, index, Category.UNKNOWN)
                if plan.gemm:
                    self._workspace(func, args)
            else:
                self._requests(plan.requests, outputs, placed, func, args, plan.gemm)
        except torch.OutOfMemoryError:
            # The op fails as a whole: the outputs that it had already do not survive it.
            for index, address in reversed(placed.items()):
                self._give_back(address, outputs[index].size)  # type: ignore[union-attr]
            raise
        results: list[Any] = []
        for index, output in enumerate(outputs):
            kind = type(output)
            if kind is plans.New:
                result: Any = plans.build(output)  # type: ignore[arg-type]
                place = placed.get(index)
                if place is not None:
                    self._keep(untyped_storage(result), place, output.size)  # type: ignore[union-attr]
            elif kind is plans.Same:
                result = tensors[output.source]  # type: ignore[union-attr]
            elif kind is plans.View:
                number = output.source  # type: ignore[union-attr]
                result = plans.build_view(output, results[~number] if number < 0 else tensors[number])  # type: ignore[arg-type]
            else:
                result = output.value  # type: ignore[union-attr]
            results.append(result)
        if plan.after is not None:
            plan.after(tensors, results)
        if plan.fills:
            values.assume("what is copied from the virtual GPU into a tensor on the CPU counts as 1")
            for number in plan.fills:
                tensors[number].fill_(1)
        return results[0] if plan.returns is None else plan.returns(results)

    def _requests(self, requests: Any, outputs: Any, placed: dict[int, int], func: Any, args: Any, gemm: bool) -> None:
        scratch: list[tuple[int, int]] = []
        try:
            for request in requests:
                kind = type(request)
                if kind is plans.Output:
                    output = outputs[request.number]
                    if output.size and not output.host:
                        placed[request.number] = self._request(
                            output.size, func, args, request.number, Category.UNKNOWN
                        )
                elif kind is plans.Scratch:
                    address = self._request(request.size, func, args, 0, request.category)
                    scratch.append((address, request.size))
                elif kind is plans.Wanted:
                    scratch.append(self._wanted(request, func, args))
                else:
                    self._give_back(*scratch[request.number])
                    scratch[request.number] = (-1, 0)
            if gemm:
                self._workspace(func, args)
        finally:
            for address, size in reversed(scratch):
                if address >= 0:
                    self._give_back(address, size)

    def _wanted(self, request: plans.Wanted, func: Any, args: Any) -> tuple[int, int]:
        try:
            address = self.allocator.malloc(request.size)
        except OutOfMemory:
            return -1, 0
        if self.observer is not None:
            self.observer.alloc(address, request.size, func, args, 0, request.category)
        return address, request.size

    def _workspace(self, func: Any, args: Any) -> None:
        # A real GPU's backward runs in a thread of its own, with a cuBLAS handle of its own.
        thread = Thread.FORWARD if current_autograd_node() is None else Thread.BACKWARD
        size = self.workspaces.needed(thread)
        if size:
            self.workspaces.keep(thread, self._request(size, func, args, 0, Category.WORKSPACE))

    def _request(self, size: int, func: Any, args: Any, index: int, category: Category) -> int:
        observer = self.observer
        try:
            address = self.allocator.malloc(size)
        except OutOfMemory as error:
            if observer is not None:
                observer.out_of_memory(size, func, args)
            raise torch.OutOfMemoryError(str(error)) from None
        if observer is not None:
            observer.alloc(address, size, func, args, index, category)
        return address

    def _give_back(self, address: int, size: int) -> None:
        self.allocator.free(address)
        if self.observer is not None:
            self.observer.free(address, size)

    def _keep(self, storage: Any, address: int, size: int) -> None:
        ref = StorageRef(storage, _release)
        ref.key, ref.address, ref.size, ref.origin = storage_key(storage), address, size, None
        live_storages[ref.key] = ref


_active: VirtualMode | None = None


def set_active(mode: VirtualMode | None) -> None:
    """Make a mode the one whose allocator gets back the blocks of storages that die; None for no mode."""
    global _active
    _active = mode


def _release(ref: StorageRef) -> None:
    """A storage died: its block is free."""
    if live_storages.get(ref.key) is ref:
        del live_storages[ref.key]
    mode = _active
    if mode is not None and ref.address:
        mode._give_back(ref.address, ref.size)
        ref.address = 0


def _builds_module(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a factory on the CPU makes a large tensor inside the constructor of a module."""
    shape = args[0] if args else ()
    count = 1
    for extent in shape:
        count *= extent
    if count * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize < FAKE_FROM:
        return False
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_varnames:
            built = frame.f_locals.get(code.co_varnames[0])
            if isinstance(built, torch.nn.Module):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _on_meta(args: Any) -> bool:
    """Whether an op works on real meta tensors of the user."""
    return any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in args)
