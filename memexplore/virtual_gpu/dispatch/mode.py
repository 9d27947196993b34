"""Receive every op of user code, and run it for real (CPU), by other ops, or by its plan.

Plans are cached by the metadata of the arguments.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from threading import get_ident
from typing import Any

import torch

from memexplore.torch_internals.dispatch import (
    FLATTEN,
    DisableTorchFunction,
    FakeTensor,
    TorchDispatchMode,
)
from memexplore.torch_internals.state import counting_writes, recorded_by_trace, tracing_state, without_tracing
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.dispatch import (
    argument_checks,
    assumed_values,
    autograd_engine,
    cpu_ops,
    fake_kernels,
    inference,
    planning,
    plans,
    runner,
    shrunk_storages,
    unsupported,
)
from memexplore.virtual_gpu.dispatch.op_traits import OpTraits
from memexplore.virtual_gpu.dispatch.runner import PlanRunner
from memexplore.virtual_gpu.dispatch.value_lane import ValueLane
from memexplore.virtual_gpu.frame_variables import variables
from memexplore.virtual_gpu.kernels import data_dependent, sparse
from memexplore.virtual_gpu.kernels.plan import NewTensor, Plan, PlannedOutput
from memexplore.virtual_gpu.patches.device_names import renamed
from memexplore.virtual_gpu.tensors import pinned_memory
from memexplore.virtual_gpu.tensors.live_storages import StorageRef, live_storages
from memexplore.virtual_gpu.tensors.sparse_contents import SparseContents
from memexplore.virtual_gpu.tensors.tensor import (
    HOST,
    DeviceState,
    fake_cpu_tensor,
    inherits_dispatch,
    is_on_gpu,
    is_virtual,
)
from memexplore.virtual_gpu.user_traceback import hide_own_frames
from memexplore.virtual_gpu.values import known_values, notes
from memexplore.virtual_gpu.values.setting import Values

_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_PRIM_DEVICE = torch.ops.prim.device.default
_COPY = torch.ops.aten.copy_.default
_ADD = torch.ops.aten.add.Tensor
_ALIAS = torch.ops.aten.alias.default
_DETACH = torch.ops.aten.detach.default
_CONVOLUTION = torch.ops.aten.convolution.default
_TRACED_CONVOLUTION = torch.ops.aten._convolution.default
_SUBCLASSES = "torch._subclasses."
"""Module of torch's own tensors without memory."""
_inference_is_on = torch.is_inference_mode_enabled
_default_dtype = torch.get_default_dtype

FAKE_FROM = 1 << 20
"""Bytes from which a tensor that a module's constructor makes on the CPU takes no memory; smaller ones are real."""


class VirtualMode(TorchDispatchMode):
    """Runs ops on the virtual device by a `PlanRunner`; ops on CPU tensors only run for real."""

    def __init__(
        self, plan_runner: PlanRunner, cached_plans: dict[tuple[Any, ...], Plan], lane: ValueLane | None
    ) -> None:
        super().__init__()
        self.plan_runner = plan_runner
        self._plans = cached_plans
        self.lane = lane
        """Computes known values; None: every value counts as 1."""
        self._fakes_modules = lane is None or lane.setting is not Values.REAL
        """Whether large CPU tensors that a module's constructor makes take no memory and have no values."""
        self.is_beside_real_gpu = False
        """Whether the process has used a real GPU, whose tensors code may have."""
        self._zeros: dict[int, StorageRef | None] = {}
        """Thread -> the storage that its last such op made and filled with zeros."""
        autograd_engine.prepare()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap __torch_dispatch__ in two more calls for every op.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.plan_runner.on:
            # Another thread has turned the virtual GPU off: torch's own fake tensors come here too.
            return func(*args, **(kwargs or {}))
        if func is _PRIM_DEVICE:
            return HOST
        for kind in types:
            if kind is not _Tensor and kind is not _Parameter and _is_wrapper(kind):
                # Its own code runs, and calls ops on the tensors inside.
                return NotImplemented
        if tracing_state() is not None:
            return self._run_while_tracing(func, types, args, kwargs)
        if SparseContents.exist and sparse.among(args, kwargs):
            with self, DisableTorchFunction():
                return sparse.run(func, args, kwargs or {})
        try:
            with DisableTorchFunction():
                shrunk = shrunk_storages.among(func, args, kwargs) if self.plan_runner.has_shrunk_storages else None
                result = self._run(func, types, args, kwargs)
                if shrunk:
                    shrunk_storages.keep_size(shrunk)
                return result
        except torch.OutOfMemoryError as error:
            hide_own_frames(error)
            raise

    def _run_while_tracing(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that `torch.jit.trace` has not recorded: of convolutions it records the op that they call."""
        if func is _CONVOLUTION:
            with recorded_by_trace(), self:
                return _TRACED_CONVOLUTION(*args, False, False, True, True)
        with without_tracing():
            return self.__torch_dispatch__(func, types, args, kwargs)

    def run_plan(self, plan: Plan, func: Any, args: Any, tensors: list[torch.Tensor]) -> Any:
        """Carry out a plan that a rule has made (`OpRunner`)."""
        return self.plan_runner.run_plan(plan, func, args, tensors)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is _TRACED_CONVOLUTION:
            func, args = _CONVOLUTION, args[:9]
        traits = _traits_of(func)
        host = not _has_virtual(func, types, args)
        device = _device_of(traits, args, kwargs)
        if device is not None and device.type != "cpu":
            if device.type == "meta" and DeviceState.calls.meta:
                return func(*fake_kernels.with_meta_tensors(args), **(kwargs or {}))
            is_meta = device.type == "meta" and not DeviceState.calls.cuda_on_meta
            host = host and is_meta and _has_meta_tensor(args)
            kwargs = _with_renamed_device(kwargs)
        elif host and traits.factory and self._fakes_modules and _builds_module(args, kwargs or {}):
            return fake_cpu_tensor(args[0], kwargs.get("dtype") if kwargs else None)
        if kwargs and kwargs.get("pin_memory"):
            # torch's own allocator of pinned memory needs a device.
            return pinned_memory.mark(self._run(func, types, args, {**kwargs, "pin_memory": False}))
        if self.is_beside_real_gpu:
            unsupported.refuse_real_gpu(func, (*args, *(kwargs or {}).values()))
        if host:
            return func(*_with_tensors(args, traits.tensors_only), **(kwargs or {}))
        if func is _COPY:
            args = (args[0], _tensor_of_number(args[1]), *args[2:])  # tensor.copy_(5)
        with runner.lock:
            if runner.frees:
                runner.free_waiting()
            return self._run_on_gpu(traits, func, types, args, kwargs)

    def _run_on_gpu(self, traits: OpTraits, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op by its handler, by its plan, or anew where the plan depends on more than the metadata."""
        if _inference_is_on() or (traits.composite is not None and inference.among(args)):
            return self._run_in_inference_mode(traits, func, types, args, kwargs or {})
        if traits.reads_engine and autograd_engine.called_from_engine(3):
            if func is _ADD and autograd_engine.accumulates(args):
                return self._add_in_place(args[0], args[1])
            func, args = self._in_place_of_engine(traits, func, args)
            traits = _traits_of(func)
        key, tensors = _key_and_tensors(traits, args, kwargs)
        plan_runner = self.plan_runner
        if plan_runner.observer is not None:
            plan_runner.observer.op(func, (*args, *kwargs.values()) if kwargs else args)
        if plan_runner.has_earlier_tensors:
            plan_runner.reallocate_all(tensors)
        lane = None if traits.lane.ignored else self.lane
        inputs = None if lane is None else lane.inputs(traits.lane, args, kwargs, tensors)
        if traits.handler is not None:
            result = self._run_handler(traits, func, args, kwargs or {}, tensors, inputs)
            if result is not NotImplemented:
                return result
        if traits.cached:
            result = self._run_cached(traits, key, func, types, args, kwargs or {}, tensors, inputs is not None)
        else:
            repeated = key if traits.writes_out else None
            result = self._run_uncached(func, types, args, kwargs or {}, tensors, inputs is not None, repeated)
        if func is _DETACH and result.is_inference():
            result = inference.detached(result)
        if lane is None:
            return result
        return lane.finish(func, traits.lane, args, kwargs or {}, tensors, inputs, result)

    def _in_place_of_engine(self, traits: OpTraits, func: Any, args: Any) -> tuple[Any, Any]:
        """Return the op and the arguments with which the autograd engine of a real GPU does what `func` does here."""
        if traits.in_place is None:
            return func, args
        if traits.in_place.nodes:
            return autograd_engine.in_place_op(func, traits.in_place, args), args
        if _is_storage_of(self._zeros.get(get_ident()), args[0]):
            return traits.in_place.op, (*args, *traits.in_place.arguments)
        return func, args

    def _add_in_place(self, target: torch.Tensor, addend: torch.Tensor) -> torch.Tensor:
        if self.lane is not None:
            self.lane.add_in_place(target, addend)
        return target

    def _run_cached(
        self,
        traits: OpTraits,
        key: tuple[Any, ...],
        func: Any,
        types: Any,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        values_known: bool,
    ) -> Any:
        """Run an op by the plan that all calls of the same key have."""
        plan = self._plans.get(key)
        if plan is None:
            notes.recent_notes.clear()
            plan = planning.make_plan(func, types, args, kwargs, tensors, self.plan_runner.workspaces)
            plan.notes = tuple(notes.recent_notes)
            self._plans[key] = plan
        elif plan.notes:
            for note in plan.notes:
                notes.add(note)
        result = self.plan_runner.run_plan(plan, func, args, tensors, values_known)
        if traits.lane.makes_empty and self.lane is not None:
            known_values.mark_uninitialized(result)
        if traits.makes_zeros:
            self._zeros[get_ident()] = live_storages.get(storage_key(untyped_storage(result)))
        return result

    def _run_in_inference_mode(self, traits: OpTraits, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of inference mode, or a composite op on tensors of inference mode, which arrives whole."""
        makes_inference_tensors = _inference_is_on()
        if traits.composite is not None:
            with contextlib.nullcontext() if makes_inference_tensors else counting_writes(), self:
                return traits.composite(*args, **kwargs)
        if func is _DETACH:
            # What is detached in inference mode counts no writes either.
            func = _ALIAS
        with torch.inference_mode(False), torch.no_grad():
            result = self._run(func, types, args, kwargs)
        return inference.marked(result, args, kwargs) if makes_inference_tensors else result

    def _run_handler(
        self,
        traits: OpTraits,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        inputs: list[torch.Tensor] | None,
    ) -> Any:
        """Run an op by its handler, or on known values if its result's shape depends on them."""
        if traits.refusal is not None:
            traits.refusal(*args, **kwargs)
        lane = self.lane
        if lane is None or inputs is None:
            return traits.handler(self, func, args, kwargs)
        if traits.data_dependent:
            result = self._run_on_known_values(lane, traits, func, args, kwargs, tensors, inputs)
            if result is not NotImplemented:
                return result
        result = traits.handler(self, func, args, kwargs)
        if result is not NotImplemented and func in cpu_ops.OPS:
            result = lane.follow(func, traits.lane, args, kwargs, tensors, inputs, result)
        return result

    def _run_on_known_values(
        self,
        lane: ValueLane,
        traits: OpTraits,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> Any:
        """Run an op whose result's shape depends on known values; NotImplemented if the CPU cannot compute it."""
        if func in data_dependent.WITHOUT_KNOWN_VALUES:
            return NotImplemented
        computed = lane.compute(func, traits.lane, args, kwargs, tensors, inputs)
        if computed is NotImplemented:
            return NotImplemented
        if known_values.assumed:
            assumed_values.read(tensors)
        flat = computed if isinstance(computed, list | tuple) else (computed,)
        if not any(isinstance(value, torch.Tensor) for value in flat):
            if func in data_dependent.COMPARISONS:
                traits.handler(self, func, args, kwargs)
            return computed
        on_host = data_dependent.HOST_RESULTS.get(func, ())
        host = all(tensor.is_cpu for tensor in tensors)
        outputs: list[PlannedOutput] = [
            NewTensor(tuple(value.shape), value.stride(), 0, value.dtype, untyped_storage(value).nbytes(), host)
            for number, value in enumerate(flat)
            if number not in on_host
        ]
        requests = data_dependent.requests(func, args, kwargs, outputs)
        results = self.plan_runner.run_plan(Plan(outputs, list, requests), func, args, tensors)
        for number in on_host:
            results.insert(number, flat[number])
        for result, value in zip(results, flat, strict=True):
            if result is not value and lane.fits(result):
                known_values.put(result, value)
        if known_values.assumed:
            assumed_values.pass_on(func, tensors, [], False, results)
        return type(computed)(results) if flat is computed else results[0]

    def _run_uncached(
        self,
        func: Any,
        types: Any,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        values_known: bool,
        repeated: tuple[Any, ...] | None,
    ) -> Any:
        """Run an op that changes the metadata or storage of its arguments, such as `resize_`.

        `repeated` is the key of an op with an `out` argument: one that has the right shape is not resized, and then
        the same plan serves every call of this key, such as those of the buckets of DistributedDataParallel.
        """
        plan = self._plans.get(repeated) if repeated is not None else None
        if plan is None:
            argument_checks.check_devices(func, tensors)
            argument_checks.check_values(func, args, kwargs)
            before = [_extent(tensor) for tensor in tensors]
            result, stand_ins = fake_kernels.run(func, types, args, kwargs, tensors, fake_kernels.in_place)
            for tensor, (size, *_) in zip(tensors, before, strict=True):
                if is_on_gpu(tensor):
                    self.plan_runner.resize(tensor, size, func, args)
            outputs, returns = plans.describe(result, stand_ins)
            plan = Plan(outputs, returns, real_targets=plans.real_targets(func, args, kwargs, tensors))
            if repeated is not None and before == [_extent(tensor) for tensor in tensors]:
                self._plans[repeated] = plan
        return self.plan_runner.run_plan(plan, func, args, tensors, values_known)


_traits: dict[int, OpTraits] = {}
"""`id` of an op -> its traits, which keep it alive: an op computes its hash in Python."""


def _traits_of(func: Any) -> OpTraits:
    traits = _traits.get(id(func))
    if traits is None:
        traits = _traits[id(func)] = OpTraits(func)
    return traits


def _key_and_tensors(traits: OpTraits, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Return the key of a call's plan, and the tensors among its arguments."""
    key: list[Any] = [traits, _default_dtype()]
    tensors: list[torch.Tensor] = []
    try:
        if traits.scalars_last and len(args) == traits.scalars_last:
            plans.extend_key(key, tensors, args[:-1])
            scalars = args[-1]
            key.append(tuple(map(type, scalars)) if isinstance(scalars, list | tuple) else type(scalars))
        else:
            plans.extend_key(key, tensors, args)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                plans.extend_key(key, tensors, (value,))
    except RuntimeError as error:
        # Some layouts have neither sizes nor strides.
        raise unsupported.not_simulated(traits.op, error) from error
    if traits.settings is not None:
        key.append(traits.settings())
    return tuple(key), tensors


def _extent(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the bytes of a tensor's storage, its shape and its strides."""
    return untyped_storage(tensor).nbytes(), tuple(tensor.shape), tensor.stride()


def _has_virtual(func: Any, types: Any, args: Any) -> bool:
    """Return whether an op has a virtual tensor among its arguments; `types` are those that C++ names for it."""
    if func is _DETACH:
        # C++ names the class of a tensor that it detaches for itself, also of a real one.
        return is_virtual(args[0])
    return _Tensor in types or _Parameter in types or any(map(inherits_dispatch, types))


@functools.cache
def _is_wrapper(kind: type) -> bool:
    """Return whether a class wraps tensors by a `__torch_dispatch__` of its own, such as DTensor or a user's class."""
    if issubclass(kind, FakeTensor) or kind.__module__.startswith(_SUBCLASSES):
        return hasattr(kind, FLATTEN)
    return not inherits_dispatch(kind)


_DTYPE_OF = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""Kind of a number -> dtype of the tensor that C++ makes of it."""


def _device_of(traits: OpTraits, args: Any, kwargs: Any) -> torch.device | None:
    """Return the device that a call names."""
    if traits.device_place and len(args) > traits.device_place:
        return args[traits.device_place]  # type: ignore[no-any-return]
    return kwargs.get("device") if kwargs else None


def _with_renamed_device(kwargs: Any) -> Any:
    """Return keyword arguments with the virtual GPU by the name that C++ knows it by."""
    device = kwargs.get("device") if kwargs else None
    if device is None or device.type in ("cpu", "meta"):
        return kwargs
    return {**kwargs, "device": renamed(device)}


def _with_tensors(args: Any, count: int) -> Any:
    """Return the arguments of an op in which the first `count`, which must be tensors, are no numbers."""
    if any(type(value) in _DTYPE_OF for value in args[:count]):
        return (*map(_tensor_of_number, args[:count]), *args[count:])
    return args


def _tensor_of_number(number: Any) -> Any:
    """Return the tensor that C++ made of a number, which a dispatch mode gets as the number.

    It does so for the constants of a graph of `torch.jit.trace` that it prints.
    """
    dtype = _DTYPE_OF.get(type(number))
    return number if dtype is None else torch.tensor(number, dtype=dtype)


def _is_storage_of(ref: StorageRef | None, tensor: torch.Tensor) -> bool:
    """Return whether a storage, which may have died, is that of a tensor: a later one may have its C++ address."""
    return ref is not None and live_storages.get(storage_key(untyped_storage(tensor))) is ref


def _builds_module(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a factory op makes a CPU tensor of at least FAKE_FROM bytes inside the constructor of a module."""
    shape = args[0] if args else ()
    count = 1
    for extent in shape:
        count *= extent
    if count * (kwargs.get("dtype") or _default_dtype()).itemsize < FAKE_FROM:
        return False
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_varnames:
            instance = variables(frame).get(code.co_varnames[0])
            if isinstance(instance, torch.nn.Module):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _has_meta_tensor(args: Any) -> bool:
    """Return whether an op works on meta tensors of the user."""
    return any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in args)
