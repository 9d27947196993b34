"""Runs of a step in other processes: what is sent there, and what comes back.

Everything travels as bytes that cloudpickle made, so functions and models of a notebook cell arrive whatever the
executor's own pickling can do. Weights do not travel: a virtual run never reads their values, so only their shapes do.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import cloudpickle
import torch

from memexplore.knobs.knobs import Knobs
from memexplore.steps.outcome import Outcome
from memexplore.steps.step import Step
from memexplore.steps.trial import Trial
from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.tensors import PARAMETER_MARK
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor, fake_cpu_tensor

_WEIGHT = 1 << 12
"""Registered weights from 4 KiB on are sent as shapes: they are on the virtual GPU before anything reads them."""
_LARGE = 1 << 20
"""Batches from 1 MiB on, as in `Step.batch_of`, and parameters of anything but the model."""
_REMEMBERED = 4
"""Steps that a worker keeps, the latest."""


class Done(NamedTuple):
    """A setting that was run."""

    trial: Trial
    outcome: Outcome


class Failed(NamedTuple):
    """A setting that raised."""

    knobs: Knobs
    error: BaseException


Result = Done | Failed


# --- what is sent ---------------------------------------------------------------------------------------------------


class _Pickler(cloudpickle.Pickler):
    """Sends large tensors without their values."""

    def __init__(self, file: io.BytesIO, limits: dict[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._limits = limits

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and self._without_values(obj):
            parameter = isinstance(obj, torch.nn.Parameter) or bool(getattr(obj, PARAMETER_MARK, False))
            shape = _Shape(tuple(obj.shape), obj.stride(), obj.dtype, obj.requires_grad, parameter)
            # What a user has written onto a weight steers some optimizers; a virtual one has fields of its own there.
            return _stand_in, (shape, {} if isinstance(obj, VirtualTensor) else dict(vars(obj)))
        return super().reducer_override(obj)

    def _without_values(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, VirtualTensor):
            return True
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            return False
        limit = self._limits.get(id(tensor), _LARGE if isinstance(tensor, torch.nn.Parameter) else None)
        return limit is not None and (tensor.device.type != "cpu" or tensor.nbytes >= limit)


class _Shape(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    parameter: bool


def _stand_in(told: _Shape, attributes: dict[str, Any]) -> torch.Tensor:
    fake = fake_cpu_tensor(told.shape, told.dtype, told.stride)
    # What `torch.nn.Parameter(fake)` does, but for a detach that needs a virtual GPU that is on.
    fake.requires_grad_(told.gradient)
    vars(fake).update(attributes, **({PARAMETER_MARK: True} if told.parameter else {}))
    return fake


def packed(step: Step) -> bytes:
    """A step as bytes that another process can read; weights and large batches are only their shapes.

    Raises TypeError where something in it cannot be pickled.
    """
    limits: dict[int, int] = {}
    if isinstance(step.model, torch.nn.Module):
        limits |= {id(weight): _WEIGHT for weight in (*step.model.parameters(), *step.model.buffers())}
    state = step.optimizer.state if isinstance(step.optimizer, torch.optim.Optimizer) else {}
    limits |= {id(leaf): _WEIGHT for leaf in pytree.tree_leaves(list(state.values()))}
    limits |= {id(leaf): _LARGE for leaf in pytree.tree_leaves(step.batch)}
    file = io.BytesIO()
    try:
        _Pickler(file, limits).dump(step)
    except Exception as error:
        raise TypeError(
            f"this step cannot be sent to another process ({type(error).__name__}: {error}): let its model be a "
            "function that builds it, and its loss a function that holds no file, lock or connection"
        ) from error
    return file.getvalue()


ENVIRONMENT = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that settings of the allocator are read from."""


class Surroundings(NamedTuple):
    """What decides a run beside the step: torch's global settings here, which a new process has not."""

    release: str
    dtype: torch.dtype
    deterministic: bool
    cudnn: tuple[bool, bool, bool, bool]
    tf32: bool
    attention: tuple[bool, bool, bool, bool]
    environment: tuple[tuple[str, str | None], ...]


def surroundings(release: str | None) -> Surroundings:
    """Those of this process."""
    cudnn = torch.backends.cudnn
    return Surroundings(
        release or torch.__version__.partition("+")[0],
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
        tuple((name, os.environ.get(name)) for name in ENVIRONMENT),
    )


def _put(wanted: Surroundings) -> None:
    torch.set_default_dtype(wanted.dtype)
    torch.use_deterministic_algorithms(wanted.deterministic)
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = wanted.cudnn
    torch.backends.cuda.matmul.allow_tf32 = wanted.tf32
    flash, efficient, of_cudnn, plain = wanted.attention
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_cudnn_sdp(of_cudnn)
    torch.backends.cuda.enable_math_sdp(plain)
    for name, value in wanted.environment:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def _as_there(wanted: Surroundings) -> Iterator[None]:
    before = surroundings(None)
    try:
        _put(wanted)
        yield
    finally:
        _put(before)


class Place(NamedTuple):
    """One thread of one process of one machine."""

    host: str
    process: int
    thread: int


def here() -> Place:
    """Where this runs."""
    return Place(socket.gethostname(), os.getpid(), threading.get_ident())


# --- in the worker --------------------------------------------------------------------------------------------------

_steps: dict[str, Step] = {}
_one_at_a_time = threading.Lock()
"""Dask gives a worker several threads, and the virtual GPU is process-wide."""


def answer(payload: bytes, asked: bytes) -> bytes:
    """Run one setting of a step, both as bytes; the answer is a `Result`, as bytes.

    It is a TypeError in another thread of the process that asks: the virtual GPU is process-wide.
    """
    knobs, gpu, run_setting, around, asker = pickle.loads(asked)
    place = here()
    if place[:2] == asker[:2] and place.thread != asker.thread:
        refusal = TypeError(
            "this executor runs in threads of the process that asks, and the virtual GPU is process-wide: use one with "
            "processes of its own (ProcessPoolExecutor; Dask with processes=True)"
        )
        return pickle.dumps(refusal)
    with _one_at_a_time:
        try:
            with _as_there(around):
                result: Result = Done(*run_setting(_read(payload), knobs, gpu=gpu, release=around.release))
        except (Exception, SystemExit) as error:
            result = Failed(knobs, bare(error))
    return _sent(result)


def _read(payload: bytes) -> Step:
    digest = hashlib.sha256(payload).hexdigest()
    if digest not in _steps:
        while len(_steps) >= _REMEMBERED:
            del _steps[next(iter(_steps))]
        _steps[digest] = pickle.loads(payload)
    return _steps[digest]


def _sent(result: Result) -> bytes:
    try:
        blob = cloudpickle.dumps(result)
        if isinstance(result, Failed):
            pickle.loads(blob)  # many an exception can be written and not read
        return blob
    except Exception:
        if not isinstance(result, Failed):
            raise
        told = RuntimeError(f"{type(result.error).__name__}: {result.error}")
        for note in getattr(result.error, "__notes__", ()):
            told.add_note(note)
        return cloudpickle.dumps(Failed(result.knobs, told))


def bare(error: BaseException) -> BaseException:
    """An error without its frames, which would keep tensors alive; where it came from is a note at it, in words."""
    error.add_note("".join(traceback.format_exception(error)).rstrip())
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


# --- processes ------------------------------------------------------------------------------------------------------


class _Process(multiprocessing.context.SpawnProcess):
    """A spawned process that does not run the user's script again: cloudpickle sends what is needed of it."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # type: ignore[override]  # noqa: N802
        before = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            return multiprocessing.context.SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]
        finally:
            sys.modules["__main__"] = before


class _Context(multiprocessing.context.SpawnContext):
    Process = _Process


def _begin() -> None:
    # An interrupt of a notebook or a terminal reaches the whole group; the asking process ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def spawned(count: int) -> ProcessPoolExecutor:
    """An executor of that many fresh processes."""
    return ProcessPoolExecutor(count, mp_context=_Context(), initializer=_begin)


def ended(pool: ProcessPoolExecutor) -> None:
    """End an executor of ours without waiting for what it is doing."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
