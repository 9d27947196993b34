"""Run ops whose output shape or result depends on values, each with the assumption that stands for the values.

Masks keep every element, all values are different, and a value counts as 1 (values/reading.py). The assumption is noted
on the tape as *assumed*, with the line of the user's code.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.torch_internals.dispatch import schema_of
from memexplore.torch_internals.tensors import storage_key, untyped_storage
from memexplore.virtual_gpu.kernels import cub, indexing
from memexplore.virtual_gpu.kernels.plan import Free, NewTensor, OpRunner, Output, Plan, Requests, Scratch, argument
from memexplore.virtual_gpu.kernels.table import Kind, find, rule
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu, is_virtual
from memexplore.virtual_gpu.values import choices, known_values, notes, reading, real_tensors, value_hints

_aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)

WITHOUT_KNOWN_VALUES = frozenset({_aten.index.Tensor, _aten._nested_tensor_from_mask_left_aligned.default})
"""Ops that their rules run also if all values are known: masks among indices become known indices, with the memory that
this takes on a GPU; the encoder of `nn.TransformerEncoder` makes no nested tensor."""

COMPARISONS = frozenset({_aten.equal.default, _aten.allclose.default})
"""Ops without a tensor as result that take memory on a GPU."""

HOST_RESULTS: dict[Any, tuple[int, ...]] = {
    _aten._pack_padded_sequence.default: (1,),
    _aten._pad_packed_sequence.default: (1,),
}
"""Numbers of the results that are on the CPU."""


def requests(func: Any, args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """Return the requests of an op whose result depends on values, None for those of its outputs."""
    requests_of = find(func, Kind.REQUESTS)
    return requests_of(args, kwargs, outputs) if requests_of is not None and not args[0].is_cpu else None


def _new(
    runner: OpRunner,
    func: Any,
    args: Any,
    host: bool,
    *shapes: tuple[tuple[int, ...], torch.dtype],
    kwargs: Any = None,
) -> list[Any]:
    """Allocate and return new contiguous tensors of given shapes and dtypes."""
    outputs: list[Any] = []
    for shape, dtype in shapes:
        meta = torch.empty(shape, dtype=dtype, device="meta")
        outputs.append(NewTensor(shape, meta.stride(), 0, dtype, meta.numel() * dtype.itemsize, host))
    return runner.run_plan(Plan(outputs, list, requests(func, args, kwargs or {}, outputs)), func, args, [])


@rule(Kind.REQUESTS, "cuda/Nonzero.cu", _aten.nonzero.default)
def _nonzero_requests(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """nonzero, after a contiguous copy: nonzero_cuda_out_impl in cuda/Nonzero.cu."""
    tensor = args[0]
    copy: Requests = [] if tensor.is_contiguous() else [Scratch(tensor.numel() * tensor.dtype.itemsize)]
    result: Requests = [Output(0)] if outputs[0].size else []
    return [*copy, *indexing.nonzero(tensor.numel(), result, len(copy), tensor.dim() > 0)]


@rule(Kind.REQUESTS, "cuda/IndexKernel.cpp", _aten.masked_select.default)
def _masked_select_requests(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """The mask's indices, then the elements: masked_select_out_cuda_impl in cuda/IndexKernel.cpp."""
    tensor, mask = args
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    count = outputs[0].shape[0]
    copy: Requests = [] if mask.shape == shape and mask.is_contiguous() else [Scratch(math.prod(shape))]
    positions: Requests = [Scratch(count * max(len(shape), 1) * 8)] if count else []
    selection = indexing.nonzero(math.prod(shape), positions, len(copy))
    return [*copy, *selection, *([Free(0)] if copy else []), *([Output(0)] if count else [])]


@rule(Kind.REQUESTS, "Repeat.h", _aten.repeat_interleave.Tensor)
def _repeat_interleave_requests(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
    """Sums of the counts, whether one is negative, the indices: repeat_interleave_common in Repeat.h."""
    count = args[0].numel()
    result: Requests = [Output(0)] if outputs[0].size else []
    if not count:
        return result
    first: Requests = [Scratch(count * 8), Scratch(cub.scan(count, 8)), Free(1)]
    if kwargs.get("output_size") is None:
        first += [Scratch(count), Scratch(1), Free(3), Free(2)]
    return [*first, *result]


@rule(Kind.REQUESTS, "cuda/SummaryOps.cu", _aten.bincount.default)
def _bincount_requests(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """The smallest and the largest value, then the counts: _bincount_cuda in cuda/SummaryOps.cu."""
    if not args[0].numel():
        return None
    item = args[0].dtype.itemsize
    return [Scratch(item), Free(0), Scratch(item), Free(1), *([Output(0)] if outputs[0].size else [])]


@rule(Kind.REQUESTS, "cuda/Unique.cu", _aten._unique2.default)
def _unique_requests(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """_unique2 of the values alone: they are sorted, then distinct ones selected, in a result of the input's size.

    Source: unique_cuda_template in cuda/Unique.cu and compute_unique in cuda/UniqueCub.cu.
    """
    tensor = args[0]
    count, item = tensor.numel(), tensor.dtype.itemsize
    if not count or len(outputs) < 3 or any(outputs[number].size for number in (1, 2)):
        return None
    outputs[0] = outputs[0]._replace(size=count * item)
    copy: Requests = [] if tensor.is_contiguous() else [Scratch(count * item)]
    first = len(copy)
    sort: Requests = [Scratch(count * item), Scratch(cub.radix_sort(count, item)), Free(first + 1)]
    select: Requests = [Scratch(8), Scratch(cub.select(count, item)), Free(first + 3)]
    return [*copy, *sort, Output(0), *select]


@rule(Kind.REQUESTS, "cuda/UniqueCub.cu", _aten.unique_consecutive.default)
def _consecutive_requests(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """unique_consecutive of the values alone: a selection, as in `_unique_requests` (cuda/UniqueCub.cu)."""
    tensor = args[0]
    count, item = tensor.numel(), tensor.dtype.itemsize
    if not count or argument(args, kwargs, 3, "dim") is not None or any(outputs[number].size for number in (1, 2)):
        return None
    outputs[0] = outputs[0]._replace(size=count * item)
    return [Output(0), Scratch(8), Scratch(cub.select(count, item))]


def _count_true(mask: torch.Tensor, assumption: str) -> int:
    """Return the number of elements that a mask keeps: all, or the share in its value hints; note the assumption."""
    known = reading.read_known(mask) if is_virtual(mask) else mask
    if known is not None:
        return int(known.count_nonzero())
    hints = value_hints.selected(mask)
    if hints.share < 1:
        notes.assume(choices.assumption())
    elif not hints.is_fact:
        notes.assume(assumption if hints.value else "a mask that counted as false keeps no element")
    return hints.count(mask.numel())


@rule(Kind.DATA_DEPENDENT, "cuda/Nonzero.cu", _aten.nonzero.default)
def nonzero(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """nonzero: all elements, or the share of true elements in the tensor's value hints."""
    tensor = args[0]
    if not is_virtual(tensor):
        return NotImplemented
    count = _count_true(tensor, "nonzero and boolean masks keep every element")
    (indices,) = _new(runner, func, args, tensor.is_cpu, ((count, tensor.dim()), torch.int64))
    return indices


@rule(Kind.DATA_DEPENDENT, "cuda/IndexKernel.cpp", _aten.masked_select.default)
def masked_select(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """masked_select: all elements, or the share of true elements in the mask's value hints."""
    tensor, mask = args
    count = _count_true(mask, "masked_select keeps every element")
    # Broadcasting repeats each element of the mask.
    count *= math.prod(torch.broadcast_shapes(tensor.shape, mask.shape)) // max(1, mask.numel())
    return _new(runner, func, args, tensor.is_cpu, ((count,), tensor.dtype))[0]


@rule(Kind.DATA_DEPENDENT, "cuda/Unique.cu", _aten._unique2.default, _aten._unique.default)
def unique(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_unique2: values, inverse indices and counts. Of indices no more values than there were candidates."""
    tensor = args[0]
    count, candidates = tensor.numel(), value_hints.of(tensor).choices
    if 0 < candidates < count:
        notes.assume(f"unique finds each of {candidates} candidates")
        count = candidates
    else:
        notes.assume("unique finds every value different")
    # Results that are not asked for are empty.
    inverse, counts = (
        argument(args, kwargs, 2, "return_inverse", False),
        argument(args, kwargs, 3, "return_counts", False),
    )
    sizes = [
        ((count,), tensor.dtype),
        (tuple(tensor.shape) if inverse else (0,), torch.int64),
        ((count,) if counts else (0,), torch.int64),
    ]
    return tuple(_new(runner, func, args, tensor.is_cpu, *sizes[: len(schema_of(func).returns)]))


@rule(
    Kind.DATA_DEPENDENT,
    "cuda/Unique.cu",
    _aten.unique_dim.default,
    _aten.unique_dim_consecutive.default,
    _aten.unique_consecutive.default,
)
def unique_along_dim(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """unique_dim, unique_dim_consecutive, and unique_consecutive, whose `dim` is optional."""
    tensor = args[0]
    notes.assume("unique finds every value different")
    names = [argument.name for argument in schema_of(func).arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    dim = arguments.get("dim")
    count = tensor.numel() if dim is None else tensor.shape[dim]
    shape = (count,) if dim is None else tuple(tensor.shape)
    inverse = tuple(tensor.shape) if dim is None else (count,)
    sizes = [
        (shape, tensor.dtype),
        (inverse if arguments.get("return_inverse") else (0,), torch.int64),
        ((count,) if arguments.get("return_counts") else (0,), torch.int64),
    ]
    return tuple(_new(runner, func, args, tensor.is_cpu, *sizes, kwargs=kwargs))


@rule(Kind.DATA_DEPENDENT, "PackedSequence.cpp", _aten._pack_padded_sequence.default)
def pack_padded_sequence(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_pack_padded_sequence: lengths on the CPU are real; lengths on the virtual GPU count as the longest possible."""
    tensor, lengths, batch_first = args
    longest = tensor.shape[1 if batch_first else 0]
    if is_virtual(lengths):
        known = reading.read_known(lengths)
        if known is None:
            notes.assume("every sequence has full length")
        lengths = real_tensors.full((lengths.numel(),), longest) if known is None else known
    sizes = (lengths[None] > real_tensors.arange(int(lengths.max()))[:, None]).sum(1)
    shape = (int(lengths.sum()), *tensor.shape[2:])
    return _new(runner, func, args, tensor.is_cpu, (shape, tensor.dtype))[0], sizes


@rule(Kind.DATA_DEPENDENT, "PackedSequence.cpp", _aten._pad_packed_sequence.default)
def pad_packed_sequence(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_pad_packed_sequence, whose batch sizes are real."""
    tensor, sizes, batch_first, _, total = args
    if is_virtual(sizes):
        return NotImplemented
    longest, batch = max(len(sizes), total), int(sizes[0])
    lengths = (sizes[None] > real_tensors.arange(batch)[:, None]).sum(1)
    (padded,) = _new(runner, func, args, tensor.is_cpu, ((longest, batch, *tensor.shape[1:]), tensor.dtype))
    return (_aten.transpose.int(padded, 0, 1) if batch_first else padded), lengths


@rule(Kind.DATA_DEPENDENT, "cuda/Repeat.cu", _aten.repeat_interleave.Tensor)
def repeat_interleave(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """repeat_interleave.Tensor: `output_size` indices, else one for each element."""
    repeats = args[0]
    size = kwargs.get("output_size")
    if size is None:
        notes.assume("repeat_interleave repeats every element once")
        size = repeats.numel()
    return _new(runner, func, args, repeats.is_cpu, ((size,), torch.int64), kwargs=kwargs)[0]


@rule(Kind.DATA_DEPENDENT, "cuda/SummaryOps.cu", _aten.bincount.default)
def bincount(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """bincount: `minlength` bins, at least one."""
    tensor = args[0]
    minlength = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    known = reading.read_known(tensor)
    if known is None:
        notes.assume("bincount finds no value beyond minlength, and each value equally often")
        size = max(1, minlength, value_hints.of(tensor).choices)
    else:
        size = max(minlength, int(known.max()) + 1 if known.numel() else 0)
    weights = argument(args, kwargs, 1, "weights", None)
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    counts = _new(runner, func, args, tensor.is_cpu, ((size,), dtype))[0]
    if known is None and weights is None and not tensor.is_cpu and size <= tensor.numel():
        share, rest = divmod(tensor.numel(), size)
        known_values.put(counts, real_tensors.tensor([share + 1] * rest + [share] * (size - rest)))
    return counts


@rule(Kind.DATA_DEPENDENT, "TensorAdvancedIndexing.cpp", _aten.index.Tensor)
def index(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """index.Tensor with boolean masks: each mask becomes the indices of its nonzero elements, as on CUDA."""
    tensor, indices = args
    if not any(entry is not None and entry.dtype in _MASKS for entry in indices):
        return NotImplemented
    expanded: list[Any] = []
    for entry in indices:
        if entry is None or entry.dtype not in _MASKS:
            expanded.append(entry)
        else:
            with runner:
                expanded += _aten.nonzero.default(entry).unbind(1)
    with runner:
        return func(tensor, expanded)


@rule(Kind.DATA_DEPENDENT, "cuda/CUDAScalar.cu", _aten._local_scalar_dense.default)
@rule(Kind.DATA_DEPENDENT, "TensorCompare.cpp", _aten.is_nonzero.default)
def scalar(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_local_scalar_dense and is_nonzero: the virtual value of a one-element tensor."""
    return reading.item(args[0])


@rule(Kind.DATA_DEPENDENT, "cuda/Equal.cpp", _aten.equal.default)
def equal(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """equal: tensors of equal shapes count as equal, if no value hint says that they differ."""
    first, second = args[:2]
    same = storage_key(untyped_storage(first)) == storage_key(untyped_storage(second))
    if not same and first.shape == second.shape and first.numel() and is_on_gpu(first) and is_on_gpu(second):
        with runner:
            first.eq(second).all()
    return first.shape == second.shape and value_hints.of(first).value == value_hints.of(second).value


@rule(Kind.DATA_DEPENDENT, "TensorCompare.cpp", _aten.allclose.default)
def all_close(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """allclose: as `equal`; it compares with tolerances (TensorCompare.cpp)."""
    first, second = args[:2]
    if is_on_gpu(first) and is_on_gpu(second):
        with runner:
            torch.isclose(*args[:4], **kwargs).all()
    return first.shape == second.shape and value_hints.of(first).value == value_hints.of(second).value


@rule(Kind.DATA_DEPENDENT, "nested/NestedTensorMath.cpp", _aten._nested_tensor_from_mask_left_aligned.default)
def mask_is_left_aligned(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_nested_tensor_from_mask_left_aligned: False, so that the encoder makes no nested tensor."""
    notes.assume("a padding mask leaves no token out (no nested tensor in the encoder's fast path)")
    return False
