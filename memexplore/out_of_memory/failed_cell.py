"""The cell that failed, for a run in another process: its source and names go in, a packed `CellCopy` comes out.

Only the names that the cell uses are copied, also those that functions of the notebook use. Of tensors on a GPU, and of
large ones, only shapes are.
"""

from __future__ import annotations

import builtins
import dis
import io
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import cloudpickle
import torch

from memexplore.live import step_copy
from memexplore.out_of_memory.failed_step import FailedStep, Model, hidden_settings
from memexplore.run.search.cell_copy import CellCopy

_RUN_AGAIN = (
    "The cell was run again in a copy of its names, from its first line and without gradients of earlier cells; files "
    "that it writes may be written again."
)
_ADVANCED = "{} is where the failed cell has left it: the copy goes on from there."
_CHANGED = "{} has the value that the failed cell has given it."
_MOST_VALUES = 16 << 20
"""Size from which a tensor on the CPU is copied as its shape."""
_MOST_BYTES = 256 << 20
"""Most bytes of the copy."""
_OF_IPYTHON = ("get_ipython",)
_OF_STDIN = ("input", "getpass", "breakpoint")


class _CannotCopyError(Exception):
    """A sentence that says why a cell cannot be copied."""


def failed_cell(code: str, namespace: dict[str, Any], models: list[torch.nn.Module], reason: str) -> FailedStep | str:
    """Return a failed cell, or a sentence that says why it cannot be run again.

    `models` are those that the cell has called, `reason` is why its step cannot be rebuilt.
    """
    try:
        program = _compiled(code)
        made = _made(program)
        names = {name: namespace[name] for name in _used(program, namespace) if name not in made}
        cell = CellCopy(code, "<cell>", _packed(names, namespace, made))
    except _CannotCopyError as failure:
        return str(failure)
    except Exception as failure:
        return f"The cell cannot be run again: {type(failure).__name__}: {failure}".splitlines()[0]
    assumed = (reason, _RUN_AGAIN, *_assumed(program, names))
    live: list[Model] = [*map(weakref.ref, models)]
    first = live[0] if live else lambda: None
    return FailedStep(cloudpickle.dumps(cell), assumed, hidden_settings(), first, tuple(live[1:]))


def _compiled(code: str) -> types.CodeType:
    try:
        program = compile(code, "<cell>", "exec", dont_inherit=True)
    except SyntaxError as error:
        what = "it awaits" if "await" in code else str(error)
        raise _CannotCopyError(f"The cell cannot be run again: {what}.") from None
    called = set(_names_in(program))
    if called.intersection(_OF_IPYTHON):
        raise _CannotCopyError("The cell cannot be run again: it has a magic or a shell command.")
    if called.intersection(_OF_STDIN):
        raise _CannotCopyError("The cell cannot be run again: it reads from the keyboard.")
    return program


def _made(program: types.CodeType) -> list[str]:
    """Return the names that a cell assigns before it reads them: what they have been is not needed."""
    first: dict[str, str] = {}
    for instruction in dis.get_instructions(program):
        if instruction.opname.endswith(("_NAME", "_GLOBAL")):
            first.setdefault(instruction.argval, instruction.opname)
    return [name for name, operation in first.items() if operation.startswith("STORE")]


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield all names of variables and attributes in code, those of inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _used(program: types.CodeType, namespace: Mapping[str, Any]) -> list[str]:
    """Return the names of the notebook that code uses, also through functions of the notebook."""
    found: dict[str, None] = {}
    waiting = [program]
    while waiting:
        for name in _names_in(waiting.pop()):
            if name in found or name not in namespace or hasattr(builtins, name):
                continue
            found[name] = None
            value = namespace[name]
            if isinstance(value, types.FunctionType) and value.__globals__ is namespace:
                waiting.append(value.__code__)
    return list(found)


def _assumed(program: types.CodeType, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the failed run of the cell has changed, as sentences."""
    read: set[str] = set()
    changed: dict[str, None] = {}
    for instruction in dis.get_instructions(program):
        if instruction.opname == "LOAD_NAME":
            read.add(instruction.argval)
        elif instruction.opname in ("STORE_NAME", "STORE_GLOBAL") and instruction.argval in read & names.keys():
            changed[instruction.argval] = None
    for name in changed:
        yield _CHANGED.format(name)
    for name, value in names.items():
        if name not in changed and hasattr(type(value), "__next__"):
            yield _ADVANCED.format(name)


# --- packing --------------------------------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """A tensor on the GPU without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_parameter: bool


def _on_gpu(shape: _Shape) -> torch.Tensor:
    """Return a tensor on the virtual GPU; numbers that may be indices are 0, and masks keep everything."""
    made = torch.empty_strided(shape.shape, shape.stride, dtype=shape.dtype, device="cuda")
    if not shape.dtype.is_floating_point and not shape.dtype.is_complex and 0 not in shape.stride:
        made.fill_(shape.dtype is torch.bool)
    return (
        torch.nn.Parameter(made, shape.requires_grad)
        if shape.is_parameter
        else made.requires_grad_(shape.requires_grad)
    )


class _Pickler(step_copy.ModelPickler):
    """Pickles tensors on a GPU as such."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.is_cuda and obj.layout is torch.strided and not obj.is_quantized:
            shape = tuple(obj.shape), obj.stride(), obj.dtype, obj.requires_grad
            return _on_gpu, (_Shape(*shape, isinstance(obj, torch.nn.Parameter)),)
        return super().reducer_override(obj)

    def _by_shape(self, tensor: torch.Tensor) -> bool:
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized
        return is_plain and tensor.nbytes > _MOST_VALUES


class _Bounded(io.BytesIO):
    """A file in memory that refuses more than some bytes."""

    def write(self, data: Any, /) -> int:
        if self.tell() + len(memoryview(data).cast("B")) > _MOST_BYTES:
            raise _CannotCopyError(f"The cell cannot be run again: its names hold more than {_MOST_BYTES >> 20} MiB.")
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


def _packed(names: dict[str, Any], namespace: dict[str, Any], made: list[str]) -> bytes:
    """Return names as bytes. Raises _CannotCopyError with the name that cannot be copied."""
    # Functions of one dictionary have one dictionary again.
    anchor = types.FunctionType((lambda: None).__code__, namespace)
    try:
        return _dumped(_Names(anchor, names, made))
    except _CannotCopyError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    for name, value in names.items():
        try:
            _dumped(value)
        except _CannotCopyError:
            raise
        except Exception as error:
            reason = f"{name}, a {type(value).__name__}, cannot be copied ({error})"
            break
    raise _CannotCopyError(f"The cell cannot be run again: {reason}.")


def _dumped(value: Any) -> bytes:
    file = _Bounded()
    _Pickler(file, {}).dump(value)
    return file.getvalue()
