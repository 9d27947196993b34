"""Imitate sparse COO tensors: gradients of `nn.Embedding(sparse=True)`, and matrices of graphs.

A sparse tensor is one to autograd; its memory is that of its indices and values, and its ops are ops on these. Sources
are below aten/src/ATen/native/sparse. Which indices are equal depends on values: where they are unknown `coalesce`
counts every index as different, as a note on the tape says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import DisableTorchFunction, disable_current_modes, pytree, schema_of
from memexplore.virtual_gpu.kernels import cub
from memexplore.virtual_gpu.kernels.plan import OpRunner
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.tensors.sparse_contents import contents_of, is_sparse, set_contents
from memexplore.virtual_gpu.tensors.tensor import is_virtual, wrap
from memexplore.virtual_gpu.values import known_values, notes, real_tensors
from memexplore.virtual_gpu.values.value_reads import NotSimulated

_aten = torch.ops.aten

LIMIT = 4 << 20
"""Bytes of the largest dense result whose values are computed, unless an argument is larger."""


def _name(func: Any) -> str:
    return schema_of(func).name.split("::")[-1]


def among(args: Any, kwargs: Any) -> bool:
    """Return whether a sparse tensor is among the arguments of an op."""
    return any(map(is_sparse, pytree.tree_leaves((args, kwargs))))


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op that has a sparse tensor among its arguments, by ops on indices and values.

    Raises NotSimulated for an op without a rule.
    """
    handler = _HANDLERS.get(_name(func))
    if handler is not None:
        result = handler(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    raise NotSimulated(f"{func} of a sparse tensor cannot be simulated on a virtual GPU; profile it on a real GPU")


def new(size: Any, indices: torch.Tensor, values: torch.Tensor, coalesced: bool) -> torch.Tensor:
    """Return a sparse tensor with given indices and values."""
    with disable_current_modes(), DisableTorchFunction():
        shape = [tuple(part.shape) for part in (indices, values)]
        plain = torch.sparse_coo_tensor(
            torch.empty(shape[0], dtype=indices.dtype, device="meta"),
            torch.empty(shape[1], dtype=values.dtype, device="meta"),
            tuple(size),
            check_invariants=False,
        )
        result = wrap(plain, host=False)
    set_contents(result, indices, values, coalesced)
    return result


@rule(Kind.OPS, "sparse/SparseTensor.cpp", _aten._sparse_coo_tensor_with_dims_and_tensors.default)
def make(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_sparse_coo_tensor_with_dims_and_tensors keeps the indices and values that it gets."""
    _, _, size, indices, contents = args
    return new(size, indices, contents, bool(kwargs.get("is_coalesced")))


@rule(Kind.OPS, "TensorConversions.cpp", _aten._to_sparse.default, _aten._to_sparse.sparse_dim)
def from_dense(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """to_sparse: indices and values of the elements that are not 0, dense_to_sparse in TensorConversions.cpp."""
    source = args[0]
    if (len(args) > 1 and args[1] != source.dim()) or kwargs.get("layout") not in (None, torch.sparse_coo):
        raise NotSimulated(f"{func} to that layout cannot be simulated on a virtual GPU; use torch.sparse_coo")
    with runner:
        indices = _aten.nonzero.default(source)
        contents = _aten.index.Tensor(source, list(indices.unbind(1)))
        return new(source.shape, _aten.t.default(indices), contents, True)


@rule(Kind.OPS, "EmbeddingBag.cpp", _aten._embedding_bag_backward.default)
def embedding_bag_backward(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_embedding_bag_backward with sparse=True: _embedding_bag_sparse_backward_symint in EmbeddingBag.cpp."""
    gradient, indices, _, bags, sizes, _, rows, _, kind, sparse = args[:10]
    if not sparse:
        return NotImplemented
    with runner:
        taken = _aten.index_select.default(gradient, 0, bags)
        if kind == 1:
            taken = _aten.div.Tensor(taken, _aten.index_select.default(sizes, 0, bags).to(taken.dtype).unsqueeze(1))
        weights = args[10] if len(args) > 10 else kwargs.get("per_sample_weights")
        if weights is not None:
            taken = _aten.mul.Tensor(taken, weights.unsqueeze(1))
        return new((rows, gradient.shape[1]), indices.reshape(1, -1), taken, False)


def _real(value: Any) -> Any:
    """Return a virtual tensor as a real one with its values, None for unknown values, and other arguments unchanged."""
    if is_sparse(value):
        contents = contents_of(value)
        indices, values = known_values.of(contents.indices), known_values.of(contents.values)
        if indices is None or values is None:
            return None
        return torch.sparse_coo_tensor(
            indices, values, tuple(value.shape), is_coalesced=contents.coalesced, check_invariants=False
        )
    return known_values.of(value) if is_virtual(value) else value


def _bytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()


def _compute(func: Any, args: Any, result: torch.Tensor, options: dict[str, Any]) -> None:
    """Compute the values of a dense result, which may be the first argument, or make them unknown."""
    real = [_real(value) for value in args]
    unknown = any(value is None and argument is not None for value, argument in zip(real, args, strict=True))
    largest = max(
        [LIMIT, *(_bytes(value) for value in real if isinstance(value, torch.Tensor) and not value.is_sparse)]
    )
    if unknown or _bytes(result) > largest:
        known_values.forget(result)
        return
    try:
        computed = func(*real, **options)
    except (RuntimeError, TypeError, ValueError):
        # The CPU has no kernel for this op or dtype.
        known_values.forget(result)
        return
    if result is not args[0]:
        known_values.put(result, computed)


def _computed(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that makes or writes a dense tensor, with the values of that tensor."""

    @functools.wraps(rule)
    def run(func: Any, *args: Any, **options: Any) -> Any:
        result = rule(func, *args, **options)
        if is_virtual(result) and not is_sparse(result):
            with disable_current_modes():
                _compute(func, args, result, options)
        return result

    return run


def _with_values(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return new(tensor.shape, contents_of(tensor).indices, values, contents_of(tensor).coalesced)


def _detach(func: Any, tensor: Any) -> Any:
    return _with_values(tensor, contents_of(tensor).values)


def _clone(func: Any, tensor: Any, **_: Any) -> Any:
    indices, contents = contents_of(tensor).indices, contents_of(tensor).values
    return new(tensor.shape, indices.clone(), contents.clone(), contents_of(tensor).coalesced)


def _to_copy(func: Any, tensor: Any, **options: Any) -> Any:
    contents = contents_of(tensor).values
    device = options.get("device")
    if device is not None and device.type == "cpu":
        with disable_current_modes():
            real = _real(tensor)
            if real is not None:
                return real.to(options.get("dtype") or real.dtype, copy=True)
        raise NotSimulated(
            "the values of a sparse tensor on a virtual GPU are not known, so that it cannot be copied to the CPU: "
            "leave the copy out, or profile on a real GPU"
        )
    return new(
        tensor.shape,
        contents_of(tensor).indices.clone(),
        contents.to(options.get("dtype") or contents.dtype, copy=True),
        contents_of(tensor).coalesced,
    )


def _coalesce(func: Any, tensor: Any) -> Any:
    """Sorted flat indices, their order, and new indices and values: _coalesce_sparse_cuda in SparseCUDATensor.cu."""
    indices, contents = contents_of(tensor).indices, contents_of(tensor).values
    count = contents.shape[0]
    if count < 2:
        return new(tensor.shape, indices, contents, True)
    known = _coalesced(tensor)
    distinct = count if known is None else known[0].shape[1]
    flat = indices.new_empty(count)
    order, offsets = torch.empty_like(flat), torch.empty_like(flat)
    sorting = indices.new_empty(cub.radix_sort(count, 8, 8), dtype=torch.uint8)
    del sorting
    made = contents.new_empty((distinct, *contents.shape[1:]))
    dims = indices.shape[0]
    new_indices = flat[:distinct].unsqueeze(0) if dims == 1 else indices.new_empty((dims, distinct))
    del order, offsets
    if known is not None:
        known_values.put(new_indices, known[0])
        if known[1] is not None:
            known_values.put(made, known[1])
    return new(tensor.shape, new_indices, made, True)


def _coalesced(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return distinct indices and the sums of their values, None for unknown values; None for unknown indices."""
    indices, contents = known_values.of(contents_of(tensor).indices), known_values.of(contents_of(tensor).values)
    if indices is None:
        notes.assume("coalesce finds no index twice")
        return None
    with disable_current_modes():
        values = real_tensors.ones(indices.shape[1], dtype=torch.int8) if contents is None else contents
        size = tuple(tensor.shape)[: indices.shape[0] + values.dim() - 1]
        distinct = torch.sparse_coo_tensor(indices, values, size, check_invariants=False).coalesce()
        return distinct.indices(), None if contents is None else distinct.values()


def _marked(func: Any, tensor: Any, coalesced: bool) -> Any:
    contents_of(tensor).coalesced = coalesced
    return tensor


def _to_dense(func: Any, tensor: Any, dtype: Any = None, **_: Any) -> Any:
    return contents_of(tensor).values.new_zeros(tensor.shape, dtype=dtype or tensor.dtype)


def _of_values(func: Any, tensor: Any, *rest: Any, **options: Any) -> Any:
    """Apply an elementwise op to the values; one that is not linear, to those of distinct indices."""
    if not is_sparse(tensor) or any(isinstance(value, torch.Tensor) and value.dim() for value in rest):
        return NotImplemented
    if _name(func) in _NOT_LINEAR and not contents_of(tensor).coalesced:
        tensor = _coalesce(func, tensor)
    result = func(contents_of(tensor).values, *rest, **options)
    return tensor if _name(func).endswith("_") else _with_values(tensor, result)


def _sum(func: Any, tensor: Any, dims: Any = (), keepdim: bool = False, **options: Any) -> Any:
    """The sum of all elements is that of the values."""
    if dims or keepdim:
        return NotImplemented
    return _aten.sum(contents_of(tensor).values, **options)


def _norm(func: Any, tensor: Any, order: Any = 2, dims: Any = (), keepdim: bool = False, **options: Any) -> Any:
    """The norm of the values of distinct indices: norm_sparse in SparseTensorMath.cpp."""
    if keepdim or (dims and len(dims) < tensor.dim()):
        return NotImplemented
    coalesced = tensor if contents_of(tensor).coalesced else _coalesce(func, tensor)
    return _aten.linalg_vector_norm(contents_of(coalesced).values, 2 if order is None else order, **options)


def _add(func: Any, first: Any, second: Any, alpha: Any = 1) -> Any:
    """Dense and sparse: the dense result; two sparse ones: all indices and values of both (SparseCUDATensorMath.cu)."""
    in_place = _name(func).endswith("_")
    if not is_sparse(first):
        return first if in_place else torch.empty_like(first)
    if not is_sparse(second):
        return torch.empty_like(second)
    scaled = contents_of(second).values if alpha == 1 else contents_of(second).values * alpha
    indices, contents = (
        torch.cat([contents_of(first).indices, contents_of(second).indices], 1),
        torch.cat([contents_of(first).values, scaled]),
    )
    if not in_place:
        return new(first.shape, indices, contents, False)
    set_contents(first, indices, contents, False)
    return first


def _nothing(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    indices, contents = contents_of(tensor).indices, contents_of(tensor).values
    return indices.new_empty((indices.shape[0], 0)), contents.new_empty((0, *contents.shape[1:]))


def _zero(func: Any, tensor: Any) -> Any:
    set_contents(tensor, *_nothing(tensor), True)
    return tensor


def _transposed(func: Any, tensor: Any, first: int = 0, second: int = -1) -> Any:
    """A clone whose rows of indices are exchanged: sparse_transpose_ in TensorShape.cpp."""
    first, second = first % tensor.dim(), second % tensor.dim()
    indices, contents = contents_of(tensor).indices.clone(), contents_of(tensor).values.clone()
    if first == second:
        return new(tensor.shape, indices, contents, contents_of(tensor).coalesced)
    if max(first, second) >= indices.shape[0]:
        return NotImplemented
    kept = torch.zeros_like(indices[first]).copy_(indices[first])
    indices[first].copy_(indices[second])
    indices[second].copy_(kept)
    size = list(tensor.shape)
    size[first], size[second] = size[second], size[first]
    return new(size, indices, contents, False)


def _product(func: Any, matrix: Any, dense: Any) -> Any:
    """Sparse times dense: s_addmm_out_sparse_dense_cuda in SparseCUDABlas.cpp; cuSPARSE's buffer is not counted."""
    if not is_sparse(matrix) or is_sparse(dense):
        return NotImplemented
    notes.add("workspaces of cuSPARSE are not counted: their sizes are not public")
    return dense.new_empty((matrix.shape[0], *dense.shape[1:]))


def _added_product(func: Any, added: Any, matrix: Any, dense: Any, **_: Any) -> Any:
    result = _product(func, matrix, dense)
    return added if _name(func).endswith("_") else result


def _masked(func: Any, tensor: Any, mask: Any) -> Any:
    """The elements of a dense tensor at the indices of a sparse one: sparse_mask in SparseTensor.cpp."""
    indices, contents = contents_of(mask).indices, contents_of(mask).values
    taken = tensor.new_empty((contents.shape[0], *tensor.shape[indices.shape[0] :]))
    source, positions = known_values.of(tensor), known_values.of(indices)
    if source is not None and positions is not None:
        known_values.put(taken, source[tuple(positions)])
    return new(mask.shape, indices.clone(), taken, contents_of(mask).coalesced)


def _like(func: Any, tensor: Any, **options: Any) -> Any:
    indices, contents = contents_of(tensor).indices, contents_of(tensor).values
    return new(
        tensor.shape, indices.new_empty((indices.shape[0], 0)), contents.new_empty((0, *contents.shape[1:])), True
    )


_NOT_LINEAR = frozenset(("abs", "pow", "sign", "sqrt"))

_HANDLERS: dict[str, Callable[..., Any]] = {
    "_indices": lambda func, tensor: contents_of(tensor).indices.detach(),
    "_values": lambda func, tensor: contents_of(tensor).values.detach(),
    "indices": lambda func, tensor: contents_of(tensor).indices.detach(),
    "values": lambda func, tensor: contents_of(tensor).values.detach(),
    "_nnz": lambda func, tensor: contents_of(tensor).values.shape[0],
    "sparse_dim": lambda func, tensor: contents_of(tensor).indices.shape[0],
    "dense_dim": lambda func, tensor: contents_of(tensor).values.dim() - 1,
    "_dimI": lambda func, tensor: contents_of(tensor).indices.shape[0],
    "_dimV": lambda func, tensor: contents_of(tensor).values.dim() - 1,
    "is_coalesced": lambda func, tensor: contents_of(tensor).coalesced,
    "is_same_size": lambda func, first, second: first.shape == second.shape,
    "_coalesced_": _marked,
    "_coalesce": _coalesce,
    "detach": _detach,
    "alias": _detach,
    "clone": _clone,
    "_to_copy": _to_copy,
    "_to_dense": _computed(_to_dense),
    "add": _computed(_add),
    "add_": _computed(_add),
    "zero_": _zero,
    "zeros_like": _like,
    "empty_like": _like,
    "t": _transposed,
    "transpose": _transposed,
    "mm": _computed(_product),
    "mv": _computed(_product),
    "addmm": _computed(_added_product),
    "addmm_": _computed(_added_product),
    "_sparse_addmm": _computed(_added_product),
    "sparse_mask": _masked,
    "norm": _norm,
    "native_norm": _norm,
    "sum": _sum,
    "_sparse_sum": _sum,
    **dict.fromkeys(("mul", "mul_", "div", "div_", "neg", "neg_", "abs", "pow", "sqrt", "sqrt_", "sign"), _of_values),
}
"""Name of an op -> its rule: `(op, *args, **kwargs) -> result`."""
