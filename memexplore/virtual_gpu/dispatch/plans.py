"""Make cache keys of calls, describe fake results as planned outputs, and build planned outputs.

torch's fake mode takes 60 to 160 us to find an op's outputs. A training step repeats the same op on the same shapes
many times, so its plan is kept under a key of the arguments' metadata and carried out again in a few us.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.dispatch import FakeTensor, schema_of
from memexplore.torch_internals.memory_access import refuse_memory_access, set_storage
from memexplore.torch_internals.tensors import (
    has_python_key,
    set_conj,
    set_neg,
    storage_key,
    untyped_storage,
)
from memexplore.virtual_gpu.dispatch.argument_checks import is_managed
from memexplore.virtual_gpu.dispatch.fake_kernels import is_real
from memexplore.virtual_gpu.kernels.plan import Argument, Constant, NewTensor, PlannedOutput, View
from memexplore.virtual_gpu.tensors.tensor import is_virtual, wrap, wrap_new

_empty_strided = torch.empty_strided
_META = "meta"
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


class _Negated:
    exist = False
    """Whether a negated view was ever made: asking each tensor takes a tenth of the time that its key takes."""


def extend_key(key: list[Any], tensors: list[torch.Tensor], arguments: Any) -> None:
    """Append to `key` the metadata of arguments, on which the plan depends, and to `tensors` the tensors among them."""
    for argument in arguments:
        kind = type(argument)
        if (kind is _Tensor or kind is _Parameter) and has_python_key(argument):
            tensors.append(argument)
            key += (argument.shape, argument.stride(), argument.storage_offset(), argument.dtype, argument.is_cpu)
            if argument.dtype.is_complex:
                key.append(argument.is_conj())
            if _Negated.exist and argument.is_neg():
                key.append("negated")
        elif kind is int or argument is None or kind is torch.dtype:
            key.append(argument)
        elif kind is list or kind is tuple:
            key.append(-len(argument) - 1)
            extend_key(key, tensors, argument)
        elif isinstance(argument, torch.Tensor):
            tensors.append(argument)
            key += (argument.shape, argument.stride(), argument.storage_offset(), argument.dtype)
            virtual = is_virtual(argument)  # of a user's class
            key.append(argument.is_cpu if virtual else "real")
            if virtual and argument.dtype.is_complex:
                key.append(argument.is_conj())
            if _Negated.exist and virtual and argument.is_neg():
                key.append("negated")
        elif isinstance(argument, torch.Generator):
            key.append(kind)
        else:
            # 1, 1.0 and True are equal and give outputs of different dtypes.
            key += (kind, argument)


def real_targets(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Return the positions in `tensors` of real tensors that the op writes to."""
    real = {
        id(tensor): position for position, tensor in enumerate(tensors) if is_real(tensor) and not is_managed(tensor)
    }
    if not real:
        return ()
    targets: list[int] = []
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            entries = value if isinstance(value, list | tuple) else [value]
            targets += [real[id(entry)] for entry in entries if id(entry) in real]
    return tuple(targets)


def describe(result: Any, tensors: list[torch.Tensor]) -> tuple[list[PlannedOutput], type | None]:
    """Return the planned outputs of a fake result, and the container that the op returns (None: a single output)."""
    returns = type(result) if isinstance(result, list | tuple) else None
    if returns is not None and returns not in (list, tuple):
        returns = tuple
    arguments = {id(tensor): position for position, tensor in enumerate(tensors)}
    storages: dict[int, int] = {}
    for position, tensor in enumerate(tensors):
        if isinstance(tensor, FakeTensor) or is_virtual(tensor) or tensor.is_meta:
            storages.setdefault(storage_key(untyped_storage(tensor)), position)
    outputs: list[PlannedOutput] = []
    flat = result if returns is not None else (result,)
    for index, value in enumerate(flat):
        if not isinstance(value, torch.Tensor):
            outputs.append(Constant(value))
        elif id(value) in arguments:
            outputs.append(Argument(arguments[id(value)]))
        else:
            host = (isinstance(value, FakeTensor) or is_virtual(value)) and value.is_cpu
            storage = untyped_storage(value)
            shape, stride, offset = tuple(value.shape), value.stride(), int(value.storage_offset())
            source = storages.get(storage_key(storage))
            if source is None:
                outputs.append(NewTensor(shape, stride, offset, value.dtype, storage.nbytes(), host))
                storages[storage_key(storage)] = ~index
            else:
                conjugated = value.dtype.is_complex and value.is_conj()
                outputs.append(View(source, shape, stride, offset, value.dtype, host, conjugated, value.is_neg()))
    return outputs, returns


def build(output: NewTensor) -> torch.Tensor:
    """Make the virtual tensor of an output with a storage of its own; the caller gives it its block on the GPU."""
    elem = _empty_strided(output.shape, output.stride, dtype=output.dtype, device=_META)
    if output.offset:
        elem = elem.set_(untyped_storage(elem), output.offset, output.shape, output.stride)
    if output.host or not output.size:
        return wrap_new(elem, output.host)
    refuse_memory_access(elem)
    return wrap(elem, False)


def build_view(output: View, source: torch.Tensor) -> torch.Tensor:
    """Make the virtual tensor of an output in the storage of another tensor; that of an inference tensor is one too."""
    if source.is_inference():
        with torch.inference_mode():
            return _build_view(output, source)
    return _build_view(output, source)


def _build_view(output: View, source: torch.Tensor) -> torch.Tensor:
    elem = torch.empty(0, dtype=output.dtype, device=_META)
    set_storage(elem, untyped_storage(source), output.offset, output.shape, output.stride)
    if output.conjugated:
        set_conj(elem, True)
    if output.negated:
        _Negated.exist = True
        set_neg(elem, True)
    return wrap(elem, output.host)
