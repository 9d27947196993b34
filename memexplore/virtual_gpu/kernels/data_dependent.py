"""What depends on values, and the documented assumption that stands in for them.

Masks keep everything, every value is different from every other, and a value counts as 1 (see values.py). Each use is
noted on the tape as *assumed*, with its line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memexplore.torch_internals.dispatch import schema_of
from memexplore.virtual_gpu.dispatch import plans
from memexplore.virtual_gpu.tensors import value_hints, values
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor

if TYPE_CHECKING:
    from memexplore.virtual_gpu.dispatch.mode import VirtualMode

_aten = torch.ops.aten


def _new(
    mode: VirtualMode, func: Any, args: Any, host: bool, *shapes: tuple[tuple[int, ...], torch.dtype]
) -> list[Any]:
    outputs: list[Any] = []
    for shape, dtype in shapes:
        model = torch.empty(shape, dtype=dtype, device="meta")
        outputs.append(plans.New(shape, model.stride(), 0, dtype, model.numel() * dtype.itemsize, host))
    plan = plans.Plan(outputs, list, None, False, None)
    return mode.carry_out(plan, func, args, [])


def _kept(mask: torch.Tensor, assumption: str) -> int:
    """How many elements a mask keeps."""
    share = value_hints.of(mask).share
    if share == 1:
        values.assume(assumption)
        return mask.numel()
    values.assume("routing is balanced: every choice, such as an expert, gets the same share")
    return math.ceil(mask.numel() * share)


def _nonzero(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    if not isinstance(tensor, VirtualTensor):
        return NotImplemented
    count = _kept(tensor, "nonzero and boolean masks keep every element")
    (rows,) = _new(mode, func, args, tensor.host, ((count, tensor.dim()), torch.int64))
    return rows


def _masked_select(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, mask = args
    count = _kept(mask, "masked_select keeps every element")
    # A mask is broadcast: every element that it keeps stands for as many.
    count *= math.prod(torch.broadcast_shapes(tensor.shape, mask.shape)) // max(1, mask.numel())
    return _new(mode, func, args, tensor.host, ((count,), tensor.dtype))[0]


def _unique_rows(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    """`unique_dim`, `unique_dim_consecutive` and `unique_consecutive`, which may look along one dimension."""
    tensor = args[0]
    values.assume("unique finds every value different")
    names = [argument.name for argument in schema_of(func).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    dim = given.get("dim")
    count = tensor.numel() if dim is None else tensor.shape[dim]
    shape = (count,) if dim is None else tuple(tensor.shape)
    inverse = tuple(tensor.shape) if dim is None else (count,)
    sizes = [
        (shape, tensor.dtype),
        (inverse if given.get("return_inverse") else (0,), torch.int64),
        ((count,) if given.get("return_counts") else (0,), torch.int64),
    ]
    return tuple(_new(mode, func, args, tensor.host, *sizes))


def _pack(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    """`pack_padded_sequence`: the lengths are on the CPU and real, unless they came from the virtual device."""
    tensor, lengths, batch_first = args
    longest = tensor.shape[1 if batch_first else 0]
    if isinstance(lengths, VirtualTensor):
        values.assume("every sequence has full length")
        lengths = torch.full((lengths.numel(),), longest)
    sizes = (lengths[None] > torch.arange(int(lengths.max()))[:, None]).sum(1)
    shape = (int(lengths.sum()), *tensor.shape[2:])
    return _new(mode, func, args, tensor.host, (shape, tensor.dtype))[0], sizes


def _unpack(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, sizes, batch_first, _, total = args
    if isinstance(sizes, VirtualTensor):
        return NotImplemented
    longest, batch = max(len(sizes), total), int(sizes[0])
    lengths = (sizes[None] > torch.arange(batch)[:, None]).sum(1)
    (padded,) = _new(mode, func, args, tensor.host, ((longest, batch, *tensor.shape[1:]), tensor.dtype))
    return (_aten.transpose.int(padded, 0, 1) if batch_first else padded), lengths


def _unique(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    values.assume("unique finds every value different")
    count = tensor.numel()
    inverse = tuple(tensor.shape)
    return tuple(
        _new(mode, func, args, tensor.host, ((count,), tensor.dtype), (inverse, torch.int64), ((count,), torch.int64))
    )


def _repeat_interleave(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    repeats = args[0]
    size = kwargs.get("output_size")
    if size is None:
        values.assume("repeat_interleave repeats every element once")
        size = repeats.numel()
    return _new(mode, func, args, repeats.host, ((size,), torch.int64))[0]


def _bincount(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    values.assume("bincount finds no value beyond minlength")
    return _new(mode, func, args, tensor.host, ((max(1, least),), torch.int64))[0]


def _index(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Index with boolean masks as CUDA does: each mask becomes the rows of its nonzero elements."""
    tensor, indices = args
    if not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return NotImplemented
    expanded: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
        else:
            with mode:
                expanded += _aten.nonzero.default(index).unbind(1)
    with mode:
        return func(tensor, expanded)


def _scalar(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    return values.item(args[0])


def _equal(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].shape == args[1].shape


def _not_left_aligned(mode: VirtualMode, func: Any, args: Any, kwargs: Any) -> Any:
    values.assume("a padding mask leaves no token out (no nested tensor in the encoder's fast path)")
    return False


HANDLERS: dict[Any, Callable[[VirtualMode, Any, Any, Any], Any]] = {
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten._unique2.default: _unique,
    _aten.unique_dim.default: _unique_rows,
    _aten.unique_dim_consecutive.default: _unique_rows,
    _aten.unique_consecutive.default: _unique_rows,
    _aten._pack_padded_sequence.default: _pack,
    _aten._pad_packed_sequence.default: _unpack,
    _aten.repeat_interleave.Tensor: _repeat_interleave,
    _aten.bincount.default: _bincount,
    _aten.index.Tensor: _index,
    _aten._local_scalar_dense.default: _scalar,
    _aten.equal.default: _equal,
    _aten.allclose.default: _equal,
    _aten.is_nonzero.default: _scalar,
    _aten._nested_tensor_from_mask_left_aligned.default: _not_left_aligned,
}
