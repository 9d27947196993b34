"""Pack a step, or the names of a cell, as bytes for another process, and unpack it there.

The bytes are made by cloudpickle, so functions and models of a notebook cell can be sent whatever the executor's own
pickling supports. Of weights only shapes are sent: a virtual run never reads their values. Of a cell only the names
that it reads are sent, also those that functions of the notebook read; of tensors on a GPU, and of large ones, only
shapes.
"""

from __future__ import annotations

import copyreg
import hashlib
import importlib
import io
import pickle
import sys
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import torch

from memexplore.run.code.variables import names_made, names_read
from memexplore.run.programs import batches
from memexplore.torch_internals.dispatch import pytree
from memexplore.torch_internals.state import calls_optimizer_hooks
from memexplore.virtual_gpu.tensors.tensor import fake_cpu_tensor, is_virtual

if TYPE_CHECKING:
    from memexplore.run.programs.step import Step

_MIN_WEIGHT = 1 << 12
"""Weights of the model from 4 KiB on are sent as shapes: they are on the virtual GPU before anything reads them."""
_MIN_LARGE = 1 << 20
"""So are batches from 1 MiB on, as in `Step.batch_of`, and parameters outside the model."""
_MOST_VALUES = 16 << 20
"""So are tensors of a cell on the CPU from 16 MiB on."""
_MOST_BYTES = 256 << 20
"""Most bytes of the names of a cell."""
_MOST_UNPACKED = 4
"""Programs that a process keeps, the most recent."""
WATCHED_CALL = "memexplore_watched_call"
"""Attribute of a function that stands for another one while a run is watched: the other one, which is packed."""


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
            parameter = isinstance(obj, torch.nn.Parameter)
            # Some optimizers read attributes that users set on weights.
            return _fake_tensor, (_shape_of(obj, parameter), dict(vars(obj)))
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
        if is_virtual(tensor):
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


def _shape_of(tensor: torch.Tensor, is_parameter: bool) -> _Shape:
    return _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad, is_parameter)


def _fake_tensor(shape: _Shape, attributes: dict[str, Any]) -> torch.Tensor:
    fake = fake_cpu_tensor(shape.shape, shape.dtype, shape.stride)
    # As `torch.nn.Parameter(fake)`, without its detach, which needs a running virtual GPU.
    fake.requires_grad_(shape.gradient)
    vars(fake).update(attributes)
    if shape.parameter:
        fake.__class__ = torch.nn.Parameter
    return fake


class UnsendableStepError(TypeError):
    """A step cannot be sent to another process."""


def pack_step(step: Step, pickler: type[StepPickler]) -> bytes:
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


# --- the names of a cell --------------------------------------------------------------------------------------------


class CellPickler(StepPickler):
    """Pickles tensors on a GPU as their shapes on the virtual GPU that is on where they are unpickled.

    Models are pickled as they were before they were watched.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return how an object is rebuilt, NotImplemented for the way of cloudpickle."""
        if isinstance(obj, types.FunctionType) and WATCHED_CALL in vars(obj):
            return _same, (vars(obj)[WATCHED_CALL],)
        if isinstance(obj, torch.Tensor) and obj.is_cuda and obj.layout is torch.strided and not obj.is_quantized:
            return _on_gpu, (_shape_of(obj, isinstance(obj, torch.nn.Parameter)),)
        return super().reducer_override(obj)

    def _by_shape(self, tensor: torch.Tensor) -> bool:
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized
        return is_plain and tensor.nbytes > _MOST_VALUES


def _same(value: Any) -> Any:
    return value


def _on_gpu(shape: _Shape) -> torch.Tensor:
    """Return a tensor on the virtual GPU; numbers that may be indices are 0, and masks keep everything."""
    made = torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device="cuda")
    if not shape.dtype.is_floating_point and not shape.dtype.is_complex and 0 not in shape.stride:
        made.fill_(shape.dtype is torch.bool)
    return torch.nn.Parameter(made, shape.gradient) if shape.parameter else made.requires_grad_(shape.gradient)


class UnsendableCellError(TypeError):
    """The reason why a cell cannot be sent to another process."""


class _Bounded(io.BytesIO):
    """A file in memory that refuses more than some bytes."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(memoryview(data).cast("B")) > _MOST_BYTES:
            raise UnsendableCellError(f"its names hold more than {_MOST_BYTES >> 20} MiB")
        return super().write(data)


class _Names:
    """Unpickled as the names, in the dictionary that the functions among them have as globals."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return _joined, self._parts


def _joined(anchor: types.FunctionType, names: dict[str, Any], made: list[str]) -> dict[str, Any]:
    joined = anchor.__globals__
    for name in made:
        # Which functions use.
        joined.pop(name, None)
    joined.update(names)
    return joined


def pack_names(source: str, namespace: dict[str, Any], before: Mapping[str, Any] | None = None) -> bytes:
    """Return the names that a cell reads as bytes. They are unpickled while a virtual GPU is on.

    `before` has the values of names that the cell has changed since.

    Raises UnsendableCellError with the name that cannot be copied.
    """
    names = names_read(source, namespace)
    names |= {name: value for name, value in (before or {}).items() if name in names}
    # Functions of one dictionary have one dictionary again.
    anchor = types.FunctionType((lambda: None).__code__, namespace)
    try:
        return _dumped(_Names(anchor, names, names_made(source)))
    except UnsendableCellError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    for name, value in names.items():
        try:
            _dumped(value)
        except UnsendableCellError:
            raise
        except Exception as error:
            reason = f"{name}, a {type(value).__name__}, cannot be copied ({error})"
            break
    raise UnsendableCellError(reason)


def _dumped(value: Any) -> bytes:
    file = _Bounded()
    CellPickler(file, {}).dump(value)
    return file.getvalue()


# --- in the other process -------------------------------------------------------------------------------------------

_unpacked: dict[str, Any] = {}


def unpacked(program: Any) -> Any:
    """Return a program that may be packed: the same object for the same bytes, and what is not packed as it is."""
    if not isinstance(program, bytes):
        return program
    digest = hashlib.sha256(program).hexdigest()
    if digest not in _unpacked:
        while len(_unpacked) >= _MOST_UNPACKED:
            del _unpacked[next(iter(_unpacked))]
        _unpacked[digest] = pickle.loads(program)
    return _unpacked[digest]
