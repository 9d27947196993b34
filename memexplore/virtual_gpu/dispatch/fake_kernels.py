"""Find shapes and dtypes of an op's results without computing them, by torch's fake kernels.

Where there is none, one clear error names the line of the user's code.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    fake_dispatch,
)
from memexplore.torch_internals.memory_access import allowed
from memexplore.torch_internals.tensors import untyped_storage
from memexplore.virtual_gpu.dispatch import argument_checks, shape_rules, unsupported
from memexplore.virtual_gpu.kernels import table
from memexplore.virtual_gpu.tensors.fake_tensors import (
    fake_mode,
    stand_in,
    stand_in_of_real,
    standing_in_for_themselves,
)
from memexplore.virtual_gpu.tensors.tensor import META, is_virtual, plain_alias
from memexplore.virtual_gpu.values import real_tensors

# torch prints the traceback of each error of a fake kernel, also of one that the program catches.
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: not _is_of_failed_kernel(record))

_VIEW = torch.ops.aten.view.default
NOT_VIEWABLE = (
    "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
    "contiguous subspaces). Use .reshape(...) instead."
)
"""torch's message where its fake kernel has another: aten/src/ATen/native/TensorShape.cpp."""


class _Kernel:
    thread = 0
    """Identifier of the thread in which a fake kernel runs for a virtual tensor, 0 for none."""


def _is_of_failed_kernel(record: logging.LogRecord) -> bool:
    """Return whether a record of torch's log is of an error in a fake kernel that runs for a virtual tensor."""
    return _Kernel.thread == threading.get_ident() and "failed while attempting to run" in str(record.msg)


Execute = Callable[[Any, Any, Any, Any, list[torch.Tensor]], tuple[Any, list[torch.Tensor]]]
"""Runs an op in torch's fake mode; returns its result, and the tensor that stood in for each tensor argument."""


def on_stand_ins(
    func: Any, types: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
) -> tuple[Any, list[torch.Tensor]]:
    """Run an op in torch's fake mode on fake tensors that stand in for its own (`Execute`).

    torch's own conversion would keep weak references to the real tensors, and a parameter with a weak reference cannot
    be moved any more.
    """
    made = {id(tensor): _stand_in(tensor) for tensor in tensors}
    stand_ins = [made[id(tensor)] for tensor in tensors]
    args, kwargs = replace_tensors(args, kwargs, tensors, stand_ins)
    before, _Kernel.thread = _Kernel.thread, threading.get_ident()
    try:
        return fake_dispatch(fake_mode(), func, types, args, kwargs), stand_ins
    finally:
        _Kernel.thread = before


def in_place(
    func: Any, types: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
) -> tuple[Any, list[torch.Tensor]]:
    """Run an op in torch's fake mode that changes the metadata of its tensors, such as `resize_` (`Execute`)."""
    with standing_in_for_themselves([tensor for tensor in tensors if is_virtual(tensor)]):
        return on_stand_ins(func, types, args, kwargs, tensors)


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    if is_real(tensor):
        return stand_in_of_real(tensor)
    return stand_in(tensor) if is_virtual(tensor) else tensor


def run(
    func: Any, types: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], execute: Execute = on_stand_ins
) -> tuple[Any, list[torch.Tensor]]:
    """Return the fake result of an op, and the tensor that stood in for each tensor argument.

    Raises NotSimulated for ops and layouts that cannot be simulated, RuntimeError as torch does for wrong arguments.
    """
    replacement = table.find(func, table.Kind.FAKE)
    try:
        with real_tensors.original_functions(), allowed(_storages(args, tensors)):
            if replacement is not None:
                result, stand_ins = replacement(*args, **kwargs), tensors
            elif shape_rules.runs_on_meta(func, tensors):
                stand_ins = [plain_alias(tensor, META) for tensor in tensors]
                args, kwargs = replace_tensors(args, kwargs, tensors, stand_ins)
                result = func(*args, **kwargs)
            else:
                result, stand_ins = execute(func, types, args, kwargs, tensors)
        _refuse_layouts(result)
    except (
        NotImplementedError,
        DynamicOutputShapeException,
        DataDependentOutputException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    ) as error:
        raise unsupported.not_simulated(func, error) from error
    except ValueError as error:
        if func is _VIEW:
            raise RuntimeError(NOT_VIEWABLE) from error
        raise
    except RuntimeError as error:
        # FakeTensorDeviceMismatchError has a class of its own only from torch 2.12 on.
        if "found two different devices" in str(error) or "on the same device" in str(error):
            raise argument_checks.device_error(func, tensors) from error
        if "Attempting to broadcast" in str(error):
            raise argument_checks.broadcast_error(tensors) or error from None
        if unsupported.kind_of(func) is not None:
            raise unsupported.not_simulated(func, error) from error
        raise
    if result is NotImplemented:
        raise unsupported.not_simulated(func, TypeError("a tensor class that the virtual GPU does not support"))
    return result, stand_ins


def _storages(args: Any, tensors: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages among an op's arguments (`set_`), and those of its virtual tensors."""
    virtual = [tensor for tensor in tensors if is_virtual(tensor) and tensor.layout is torch.strided]
    return [*(value for value in args if isinstance(value, torch.UntypedStorage)), *map(untyped_storage, virtual)]


def is_real(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a dense CPU tensor with values."""
    return (
        not (isinstance(tensor, FakeTensor) or is_virtual(tensor))
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
    )


def replace_tensors(
    args: Any, kwargs: Any, tensors: list[torch.Tensor], stand_ins: list[torch.Tensor]
) -> tuple[Any, Any]:
    """Return an op's arguments with each of its tensors replaced by the stand-in at the same position."""
    replacements = {id(tensor): stand_in for tensor, stand_in in zip(tensors, stand_ins, strict=True)}
    return _replaced(args, replacements), {name: _replaced(value, replacements) for name, value in kwargs.items()}


def _replaced(value: Any, replacements: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return replacements.get(id(value), value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(entry, replacements) for entry in value)
    return value


def with_meta_tensors(args: Any) -> Any:
    """Return arguments with plain meta tensors in place of the virtual tensors among them, at the top level."""
    replacements: dict[int, torch.Tensor] = {
        id(value): torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        for value in args
        if is_virtual(value)
    }
    return _replaced(args, replacements) if replacements else args


def _refuse_layouts(result: Any) -> None:
    """Raise NotImplementedError for tensors of other layouts than strided, such as sparse ones, or quantized dtypes."""
    for value in result if isinstance(result, list | tuple) else (result,):
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise NotImplementedError(f"a tensor of layout {value.layout}")
        if isinstance(value, torch.Tensor) and value.dtype in unsupported.QUANTIZED:
            raise NotImplementedError("a quantized tensor")
