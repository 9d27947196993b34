"""Runs of a step in worker processes: a step and a setting go there as bytes, a `Result` comes back as bytes.

The bytes are made by cloudpickle, so functions and models of a notebook cell can be sent whatever the executor's own
pickling supports. Of weights only shapes are sent: a virtual run never reads their values.
"""

from __future__ import annotations

import contextlib
import copyreg
import hashlib
import importlib
import io
import multiprocessing
import multiprocessing.context
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import cloudpickle
import torch

from memexplore.codegen.lines import recorded_sites
from memexplore.knobs.inplace.sites import Sites
from memexplore.knobs.knobs import Knobs
from memexplore.steps import batches
from memexplore.steps.outcome import Outcome
from memexplore.steps.step import Step
from memexplore.steps.trial import Trial
from memexplore.tape import Os
from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.state import calls_optimizer_hooks
from memexplore.torch_internals.tensors import PARAMETER_MARK
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor, fake_cpu_tensor

_MIN_WEIGHT = 1 << 12
"""Weights of the model from 4 KiB on are sent as shapes: they are on the virtual GPU before anything reads them."""
_MIN_LARGE = 1 << 20
"""So are batches from 1 MiB on, as in `Step.batch_of`, and parameters outside the model."""
_MAX_STEPS = 4
"""Steps that a worker keeps, the most recent."""


class Done(NamedTuple):
    """The result of a setting that ran."""

    trial: Trial
    outcome: Outcome
    sites: Sites | None = None
    """The legal in-place sites that a run in another process has found, for the code of the setting."""


class Failed(NamedTuple):
    """The result of a setting that raised."""

    knobs: Knobs
    error: BaseException


Result = Done | Failed


# --- packing steps --------------------------------------------------------------------------------------------------


class StepPickler(cloudpickle.Pickler):
    """Pickles large tensors as their shapes."""

    def __init__(self, file: io.BytesIO, min_bytes: dict[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._min_bytes = min_bytes
        self._probes = False
        """Whether this finds out whether an attribute of an optimizer can be pickled."""

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is rebuilt, NotImplemented for the way of cloudpickle."""
        if isinstance(obj, torch.Tensor) and self._by_shape(obj):
            parameter = isinstance(obj, torch.nn.Parameter) or bool(getattr(obj, PARAMETER_MARK, False))
            shape = _Shape(tuple(obj.shape), obj.stride(), obj.dtype, obj.requires_grad, parameter)
            # Some optimizers read attributes that users set on weights; those of virtual tensors are their own fields.
            return _fake_tensor, (shape, {} if isinstance(obj, VirtualTensor) else dict(vars(obj)))
        # cloudpickle cannot pickle modules of other classes, such as `torch.backends.cudnn`, which a loss may read.
        special = isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType
        if special and sys.modules.get(name := obj.__name__) is obj:
            return importlib.import_module, (name,)
        if isinstance(obj, types.FunctionType) and _is_step_without_name(obj):
            # Among its globals are the hooks of all optimizers, which belong to this process.
            return calls_optimizer_hooks, (obj.__wrapped__,), {_HOOKED: True}  # type: ignore[attr-defined]
        if isinstance(obj, types.CodeType) and obj.co_filename != _DYNAMIC:
            # cloudpickle replaces the name of the file, which the lines of advice need.
            return _code_of_file, (obj.replace(co_filename=_DYNAMIC), obj.co_filename)
        if isinstance(obj, torch.optim.Optimizer) and not self._probes and _has_usual_state(type(obj)):
            # `Optimizer.__getstate__` leaves out what the constructor of a user's class has set besides.
            kept = {name: value for name, value in vars(obj).items() if name in _KEPT or self._is_own(name, value)}
            return copyreg.__newobj__, (type(obj),), kept  # type: ignore[attr-defined]
        return super().reducer_override(obj)

    def _is_own(self, name: str, value: object) -> bool:
        """Return whether an attribute of an optimizer is one of the user's class, and can be sent."""
        if name.startswith(_OF_OPTIMIZERS) or name == "step":
            return False
        try:
            # Of optimizers that the value leads to, the attributes are not tried again: it may lead back to this one.
            pickler = type(self)(io.BytesIO(), self._min_bytes)
            pickler._probes = True
            pickler.dump(value)
        except Exception:
            return False
        return True

    def _by_shape(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, VirtualTensor):
            return True
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            return False
        least = self._min_bytes.get(id(tensor), _MIN_LARGE if isinstance(tensor, torch.nn.Parameter) else None)
        return least is not None and (tensor.device.type != "cpu" or tensor.nbytes >= least)


_HOOKED = "hooked"
_KEPT = ("defaults", "state", "param_groups")
_OF_OPTIMIZERS = ("_optimizer_", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_patch")
"""Attributes that `Optimizer` itself sets; schedulers replace `step`."""


def _has_usual_state(kind: type[torch.optim.Optimizer]) -> bool:
    usual = kind.__getstate__ is torch.optim.Optimizer.__getstate__  # type: ignore[attr-defined]
    return usual and not kind.__module__.startswith("torch.optim.")


_DYNAMIC = "<dynamic-code>"
"""The file of code that cloudpickle has sent."""


def _code_of_file(code: types.CodeType, filename: str) -> types.CodeType:
    return code.replace(co_filename=filename)


def _is_step_without_name(function: types.FunctionType) -> bool:
    """Return whether a function is the `step` of an optimizer's class that another process cannot import."""
    by_value = function.__module__ == "__main__" or "<locals>" in function.__qualname__
    return by_value and vars(function).get(_HOOKED) is True and hasattr(function, "__wrapped__")


class _Shape(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    parameter: bool


def _fake_tensor(shape: _Shape, attributes: dict[str, Any]) -> torch.Tensor:
    fake = fake_cpu_tensor(shape.shape, shape.dtype, shape.stride)
    # As `torch.nn.Parameter(fake)`, without its detach, which needs a running virtual GPU.
    fake.requires_grad_(shape.gradient)
    vars(fake).update(attributes, **({PARAMETER_MARK: True} if shape.parameter else {}))
    return fake


class UnsendableStepError(TypeError):
    """A step cannot be sent to another process."""


def pack_step(step: Step, pickler: type[StepPickler] = StepPickler) -> bytes:
    """Return a step as bytes for another process; weights and large batches are packed as shapes.

    Raises UnsendableStepError for a step that cannot be pickled.
    """
    min_bytes: dict[int, int] = {}
    if isinstance(step.model, torch.nn.Module):
        min_bytes |= {id(weight): _MIN_WEIGHT for weight in (*step.model.parameters(), *step.model.buffers())}
    state = step.optimizer.state if isinstance(step.optimizer, torch.optim.Optimizer) else {}
    min_bytes |= {id(leaf): _MIN_WEIGHT for leaf in pytree.tree_leaves(list(state.values()))}
    min_bytes |= {id(leaf): _MIN_LARGE for leaf in batches.tensors(step.batch)}
    file = io.BytesIO()
    try:
        pickler(file, min_bytes).dump(step)
    except Exception as error:
        raise UnsendableStepError(
            f"this step cannot be sent to another process ({type(error).__name__}: {error}): let its model be a "
            "function that builds it, and its loss a function that holds no file, lock or connection"
        ) from error
    return file.getvalue()


ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that hold the settings of the allocator."""


class ProcessSettings(NamedTuple):
    """Global settings of torch and of the environment that change a run, to be repeated in a worker."""

    release: str
    os: str
    dtype: torch.dtype
    deterministic: bool
    cudnn: tuple[bool, bool, bool, bool]
    tf32: bool
    attention: tuple[bool, bool, bool, bool]
    environment: tuple[tuple[str, str | None], ...]
    path: tuple[str, ...] = ()
    """Folders of modules that the process searches after its own."""


def process_settings(release: str | None, os_of_driver: str = Os.LINUX) -> ProcessSettings:
    """Return the settings of this process; `release` is the torch release of the run, None for the installed one."""
    cudnn = torch.backends.cudnn
    return ProcessSettings(
        release or torch.__version__.partition("+")[0],
        os_of_driver,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        (cudnn.enabled, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark),
        torch.backends.cuda.matmul.allow_tf32,
        (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        tuple((name, os.environ.get(name)) for name in ALLOCATOR_VARIABLES),
    )


def set_process_settings(wanted: ProcessSettings) -> None:
    """Give this process the settings of another one."""
    torch.set_default_dtype(wanted.dtype)
    torch.use_deterministic_algorithms(wanted.deterministic)
    enabled, allow_tf32, deterministic, benchmark = wanted.cudnn
    # Assignments to `torch.backends.cudnn` raise as soon as any module has imported torch's own test utilities.
    torch.backends.cudnn.set_flags(enabled, benchmark, None, deterministic, allow_tf32, None)
    torch.backends.cuda.matmul.allow_tf32 = wanted.tf32
    flash, efficient, of_cudnn, math = wanted.attention
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_cudnn_sdp(of_cudnn)
    torch.backends.cuda.enable_math_sdp(math)
    sys.path += [folder for folder in wanted.path if folder not in sys.path]
    for name, value in wanted.environment:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _with_process_settings(wanted: ProcessSettings) -> Iterator[None]:
    before = process_settings(None)
    try:
        set_process_settings(wanted)
        yield
    finally:
        set_process_settings(before)


class ThreadId(NamedTuple):
    """One thread of one process of one machine."""

    host: str
    process: int
    thread: int


def this_thread() -> ThreadId:
    """Return the id of the running thread."""
    return ThreadId(socket.gethostname(), os.getpid(), threading.get_ident())


# --- in the worker --------------------------------------------------------------------------------------------------

_steps: dict[str, Step] = {}
_one_at_a_time = threading.Lock()
"""Dask gives a worker several threads, and the virtual GPU is process-wide."""


def run_packed(packed_step: bytes | Step, request: bytes) -> bytes:
    """Run one setting of a step, packed or not, and return the `Result` as bytes.

    The result is a TypeError in another thread of the requesting process, as the virtual GPU is process-wide.
    """
    knobs, gpu, run_setting, settings, requester = pickle.loads(request)
    thread = this_thread()
    if thread[:2] == requester[:2] and thread.thread != requester.thread:
        refusal = TypeError(
            "this executor runs threads of the calling process, and the virtual GPU is process-wide: use one with "
            "processes of its own (ProcessPoolExecutor; Dask with processes=True)"
        )
        return pickle.dumps(refusal)
    with _one_at_a_time:
        try:
            with _with_process_settings(settings):
                step = packed_step if isinstance(packed_step, Step) else unpack_step(packed_step)
                trial, outcome = run_setting(step, knobs, gpu=gpu, release=settings.release, os=settings.os)
                result: Result = Done(trial, outcome, recorded_sites(step, knobs))
        except (Exception, SystemExit) as error:
            result = Failed(knobs, without_frames(error))
    return _pack_result(result)


def unpack_step(packed_step: bytes) -> Step:
    """Return a packed step, the same object for the same bytes."""
    digest = hashlib.sha256(packed_step).hexdigest()
    if digest not in _steps:
        while len(_steps) >= _MAX_STEPS:
            del _steps[next(iter(_steps))]
        _steps[digest] = pickle.loads(packed_step)
    return _steps[digest]


def _pack_result(result: Result) -> bytes:
    return cloudpickle.dumps(result._replace(error=sendable(result.error)) if isinstance(result, Failed) else result)


def sendable(error: BaseException) -> BaseException:
    """Return an exception that can be sent to another process: the same one, else a RuntimeError with its text."""
    try:
        pickle.loads(cloudpickle.dumps(error))  # many exceptions can be pickled but not unpickled
        return error
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        for note in getattr(error, "__notes__", ()):
            plain.add_note(note)
        return plain


def error_text(error: BaseException) -> str:
    """Return an error in one line; that of a setting is a ValueError, whose message says all."""
    message = next((line for line in map(str.strip, str(error).splitlines()) if line), "")
    if isinstance(error, ValueError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def without_frames(error: BaseException) -> BaseException:
    """Drop the frames of an error, which would keep tensors alive; its traceback becomes a note, as text."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


# --- processes ------------------------------------------------------------------------------------------------------


class _Process(multiprocessing.context.SpawnProcess):
    """A spawned process that does not import the user's script again: cloudpickle sends the needed objects."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # type: ignore[override]  # noqa: N802
        return start_without_script(multiprocessing.context.SpawnProcess, process_obj)


def start_without_script(kind: Any, process: Any) -> Any:
    """Start a process as a class of multiprocessing does, where `__main__` is empty."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        return kind._Popen(process)
    finally:
        sys.modules["__main__"] = before


def new_process(target: Callable[..., object], arguments: tuple[Any, ...]) -> multiprocessing.context.SpawnProcess:
    """Return a fresh process, not started, that calls a function."""
    return _Process(target=target, args=arguments)


def initialize_worker() -> None:
    """Prepare a process that runs settings."""
    # An interrupt of a notebook or a terminal reaches the whole process group; the parent ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def processor_count() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
