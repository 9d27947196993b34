"""Refuse arguments that CUDA's kernels refuse, and torch's fake kernels accept, in torch's words.

A rule has the signature of its op, and raises the error. It runs once for each kind of call, before its plan is made.
tests/virtual_gpu/test_kernel_refusals.py compares with the errors of the CPU over torch's database of ops.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memexplore.torch_internals.tensors import untyped_storage
from memexplore.virtual_gpu.kernels.table import Kind, rule

_aten = torch.ops.aten

_SCALAR_TYPES = {
    torch.uint8: ("Byte", "unsigned char"),
    torch.int8: ("Char", "signed char"),
    torch.int16: ("Short", "short int"),
    torch.int32: ("Int", "int"),
    torch.int64: ("Long", "long int"),
    torch.float16: ("Half", "c10::Half"),
    torch.float32: ("Float", "float"),
    torch.float64: ("Double", "double"),
    torch.complex32: ("ComplexHalf", "c10::complex<c10::Half>"),
    torch.complex64: ("ComplexFloat", "c10::complex<float>"),
    torch.complex128: ("ComplexDouble", "c10::complex<double>"),
    torch.bool: ("Bool", "bool"),
    torch.bfloat16: ("BFloat16", "c10::BFloat16"),
    torch.float8_e5m2: ("Float8_e5m2", "c10::Float8_e5m2"),
    torch.float8_e4m3fn: ("Float8_e4m3fn", "c10::Float8_e4m3fn"),
}
"""dtype -> its name in c10 (`toString` in c10/core/ScalarType.h), and as a type of C++."""
_REDUCED = (torch.float16, torch.bfloat16)


def _name(tensor: torch.Tensor) -> str:
    return _SCALAR_TYPES.get(tensor.dtype, (str(tensor.dtype), ""))[0]


def _type(tensor: torch.Tensor) -> str:
    return _SCALAR_TYPES.get(tensor.dtype, ("", str(tensor.dtype)))[1]


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def _refuse_if(is_wrong: bool, text: str) -> None:
    if is_wrong:
        raise RuntimeError(text)


def _refuse_other_dtype(expected: torch.Tensor, *tensors: torch.Tensor | None) -> None:
    """Refuse tensors of another dtype than a kernel reads them in: `data_ptr<T>()`, ATen/core/TensorMethods.cpp."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype is not expected.dtype:
            raise RuntimeError(f"expected scalar type {_name(expected)} but found {_name(tensor)}")


# --- products --------------------------------------------------------------------------------------------------------


@rule(Kind.REFUSAL, "cuda/Blas.cpp", _aten.mm.default, _aten.mm.out)
def product(self: Any, mat2: Any, **_: Any) -> None:
    """addmm_out_cuda_impl."""
    if self.dtype is not mat2.dtype:
        types = f"{_type(self)} != {_type(mat2)}"
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {types}")


@rule(
    Kind.REFUSAL,
    "LinearAlgebra.cpp",
    *(_aten.addmm.default, _aten.addmm_.default, _aten.addmm.out, _aten._addmm_activation.default),
    *(_aten.addbmm.default, _aten.addbmm_.default),
)
def biased_product(self: Any, mat1: Any, mat2: Any, **_: Any) -> None:
    """ADDMM_META; addbmm consists of such products."""
    for name, tensor in (("self", self), ("mat1", mat1)):
        if tensor.dtype is not mat2.dtype:
            types = f"{_name(tensor)} and {_name(mat2)}"
            raise RuntimeError(f"{name} and mat2 must have the same dtype, but got {types}")


@rule(Kind.REFUSAL, "cuda/Blas.cpp", _aten.bmm.default, _aten.bmm.out)
def batched_product(self: Any, mat2: Any, **_: Any) -> None:
    """bmm_out_cuda_impl reads both in the dtype of the first."""
    _refuse_other_dtype(self, mat2)


@rule(Kind.REFUSAL, "cuda/Blas.cpp", _aten.baddbmm.default, _aten.baddbmm_.default, _aten.baddbmm.out)
def biased_batched_product(self: Any, batch1: Any, batch2: Any, **_: Any) -> None:
    """common_checks_baddbmm_bmm, and bmm_out_cuda_impl."""
    if self.dtype is not batch1.dtype:
        types = f"input {_type(self)}, batch1: {_type(batch1)}, batch2: {_type(batch2)}"
        raise RuntimeError(f"Input dtypes must be the same, got: {types}")
    _refuse_other_dtype(batch1, batch2)


@rule(Kind.REFUSAL, "Blas.cpp", _aten.addmv.default, _aten.addmv_.default, _aten.addmv.out)
def biased_product_of_vector(self: Any, mat: Any, vec: Any, **_: Any) -> None:
    """TORCH_META_FUNC(addmv)."""
    dims = f"{self.dim()}, {mat.dim()}, {vec.dim()}"
    is_vector = (mat.dim(), vec.dim()) == (2, 1) and self.dim() <= 1
    _refuse_if(not is_vector, f"vector + matrix @ vector expected, got {dims}")
    _refuse_vector_dtypes(self, mat, vec)


@rule(Kind.REFUSAL, "Blas.cpp", _aten.mv.default, _aten.mv.out)
def product_of_vector(self: Any, vec: Any, **_: Any) -> None:
    """The result of mv has the dtype of the vector: mv in Blas.cpp."""
    _refuse_vector_dtypes(vec, self, vec)


def _refuse_vector_dtypes(self: torch.Tensor, mat: torch.Tensor, vec: torch.Tensor) -> None:
    if not self.dtype is mat.dtype is vec.dtype:
        names = f"{_name(self)}, {_name(mat)}, and {_name(vec)}"
        raise RuntimeError(f"addmv input tensors must have the same dtype, but got {names}")


# --- layers ----------------------------------------------------------------------------------------------------------


@rule(Kind.REFUSAL, "Convolution.cpp", _aten.convolution.default)
def convolution(input: Any, weight: Any, bias: Any, *rest: Any, **_: Any) -> None:
    """check_input_same_type_as_parameters and check_shape_forward."""
    text = "Input type ({}) and {} type ({}) should be the same"
    _refuse_if(input.dtype is not weight.dtype, text.format(_type(input), "weight", _type(weight)))
    if bias is None:
        return
    _refuse_if(input.dtype is not bias.dtype, text.format(_type(input), "bias", _type(bias)))
    transposed, groups = rest[3], rest[5]
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    size = f"Given {'transposed=1, ' if transposed else ''}weight of size {_shape(weight)}"
    expected = f"expected bias to be 1-dimensional with {channels} elements"
    _refuse_if(_shape(bias) != [channels], f"{size}, {expected}, but got bias of size {_shape(bias)} instead")


@rule(Kind.REFUSAL, "layer_norm.h", _aten.native_layer_norm.default)
def layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, *_: Any) -> None:
    """_check_layer_norm_inputs; CUDA's kernel reads all in the dtype of the input."""
    shape = list(normalized_shape)
    text = "Expected normalized_shape to be at least 1-dimensional, i.e., containing at least one element, but got "
    _refuse_if(not shape, f"{text}normalized_shape = {shape}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and _shape(tensor) != shape:
            text = f"Expected {name} to be of same shape as normalized_shape, but got {name} of shape "
            raise RuntimeError(f"{text}{_shape(tensor)} and normalized_shape = {shape}")
    if _shape(input)[-len(shape) :] != shape:
        wanted = ", ".join(map(str, ("*", *shape)))
        text = f"Given normalized_shape={shape}, expected input with shape [{wanted}], but got input of size"
        raise RuntimeError(f"{text}{_shape(input)}")
    _refuse_other_dtype(input, weight, bias)


@rule(Kind.REFUSAL, "cuda/group_norm_kernel.cu", _aten.native_group_norm.default)
def group_norm(input: Any, weight: Any = None, bias: Any = None, *_: Any) -> None:
    """GroupNormKernelImplInternal reads all in the dtype of the input."""
    _refuse_other_dtype(input, weight, bias)


@rule(
    Kind.REFUSAL,
    "Normalization.cpp",
    *(_aten.native_batch_norm.default, _aten._native_batch_norm_legit.default, _aten.cudnn_batch_norm.default),
    *(_aten._batch_norm_with_update.default,),
)
def batch_norm(input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *_: Any) -> None:
    """_batch_norm_impl_index, and the accessors of cuda/Normalization.cu."""
    if input.dim() < 2:
        return
    channels = input.shape[1]
    tensors = {"running_mean": running_mean, "running_var": running_var, "weight": weight, "bias": bias}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        text = f"{name} should contain {channels} elements not {tensor.numel()}"
        _refuse_if(tensor.numel() != channels, text)
        _refuse_if(tensor.dim() != 1, f"TensorAccessor expected 1 dims but tensor has {tensor.dim()}")
        # Statistics and weights may be float32 for inputs of less precision.
        if not (input.dtype in _REDUCED and tensor.dtype is torch.float32):
            _refuse_other_dtype(input, tensor)


@rule(Kind.REFUSAL, "cuda/Embedding.cu", _aten.embedding.default)
def embedding(weight: Any, indices: Any, *_: Any, **__: Any) -> None:
    """embedding in Embedding.cpp: checkScalarTypes."""
    if indices.dtype not in (torch.int64, torch.int32):
        types = f"Long, Int; but got torch.cuda.{_name(indices)}Tensor instead"
        text = "Expected tensor for argument #1 'indices' to have one of the following scalar types: "
        raise RuntimeError(f"{text}{types} (while checking arguments for embedding)")


@rule(Kind.REFUSAL, "cuda/EmbeddingBag.cu", _aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)
def embedding_bag(weight: Any, indices: Any, offsets: Any, *rest: Any) -> None:
    """_embedding_bag_cuda: checkSameType."""
    factors = rest[3] if len(rest) > 3 else None
    if factors is not None and factors.dtype is not weight.dtype:
        types = f"but type torch.cuda.{_name(weight)}Tensor does not equal torch.cuda.{_name(factors)}Tensor"
        text = "Expected tensor for argument #1 'weight' to have the same type as tensor for argument #1 "
        raise RuntimeError(f"{text}'per_sample_weights'; {types} (while checking arguments for embedding_bag)")


@rule(Kind.REFUSAL, "Activation.cpp", _aten.gelu.default, _aten.gelu_.default)
def gelu(self: Any, *, approximate: str = "none") -> None:
    """get_gelutype_enum in Gelu.h."""
    _refuse_if(approximate not in ("none", "tanh"), "approximate argument must be either none or tanh.")


@rule(Kind.REFUSAL, "Activation.cpp", _aten.leaky_relu_backward.default)
def leaky_relu_backward(grad_output: Any, self: Any, negative_slope: Any, self_is_result: bool) -> None:
    """leaky_relu_backward."""
    text = (
        "In-place leakyReLu backward calculation is triggered with a negative slope which is not supported. This is "
        "caused by calling in-place forward function with a negative slope, please call out-of-place version instead. "
        "File an issue at https://github.com/pytorch/pytorch if you do require supporting in-place leakRelu backward "
        "calculation with negative slope"
    )
    _refuse_if(bool(self_is_result) and negative_slope < 0, text)


@rule(
    Kind.REFUSAL,
    "GridSampler.cpp",
    *(
        _aten.grid_sampler_2d.default,
        _aten.grid_sampler_3d.default,
        _aten.cudnn_grid_sampler.default,
        _aten.grid_sampler.default,
    ),
)
def grid_sampler(input: Any, grid: Any, *_: Any) -> None:
    """check_grid_sampler_common, and the kernel's `data_ptr`."""
    text = f"grid_sampler(): expected grid to have size {input.dim() - 2} in last dimension, but got grid with sizes "
    _refuse_if(grid.shape[-1] != input.dim() - 2, f"{text}{_shape(grid)}")
    text = "grid_sampler(): expected grid and input to have same batch size, but got input with sizes "
    sizes = f"{_shape(input)} and grid with sizes {_shape(grid)}"
    _refuse_if(input.shape[0] != grid.shape[0], text + sizes)
    _refuse_other_dtype(input, grid)


@rule(Kind.REFUSAL, "transformers/attention.cpp", _aten.scaled_dot_product_attention.default)
def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any) -> None:
    """validate_sdpa_input."""
    if not query.dtype is key.dtype is value.dtype:
        types = f"query.dtype: {_type(query)} key.dtype: {_type(key)} and value.dtype: {_type(value)} instead."
        raise RuntimeError(f"Expected query, key, and value to have the same dtype, but got {types}")
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        text = "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
        raise RuntimeError(f"{text}{_type(attn_mask)} and  query.dtype: {_type(query)} instead.")


# --- losses ----------------------------------------------------------------------------------------------------------


@rule(Kind.REFUSAL, "LossNLL.cpp", _aten.nll_loss_forward.default, _aten.nll_loss2d_forward.default)
def negative_log_likelihood(self: Any, target: Any, weight: Any = None, *_: Any) -> None:
    """nll_loss_forward_out_cuda_template, whose text differs between releases."""
    is_index = target.dtype in (torch.int64, torch.uint8)
    _refuse_if(not is_index, f"expected target dtype to be Long or Byte, but got {_name(target)}")
    _refuse_other_dtype(self, weight)


@rule(Kind.REFUSAL, "cuda/Loss.cu", _aten.binary_cross_entropy.default)
def binary_cross_entropy(self: Any, target: Any, *_: Any) -> None:
    """The dtype that TensorIterator expects: compute_types in TensorIterator.cpp."""
    _refuse_if(target.dtype is not self.dtype, f"Found dtype {_name(target)} but expected {_name(self)}")


@rule(
    Kind.REFUSAL,
    "cuda/MultiMarginLoss.cu",
    _aten.multi_margin_loss.default,
    _aten.multilabel_margin_loss_forward.default,
)
def margin(self: Any, target: Any, *_: Any) -> None:
    """multi_margin_loss_cuda and multilabel_margin_loss_forward_out_cuda_template."""
    _refuse_if(target.dtype is not torch.int64, f"expected scalar type Long but found {_name(target)}")


@rule(Kind.REFUSAL, "cuda/LossCTC.cu", _aten._ctc_loss.default)
def ctc(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *_: Any) -> None:
    """ctc_loss_gpu_template."""
    steps, batch = log_probs.shape[:2]
    _refuse_if(len(input_lengths) != batch, "input_lengths must be of size batch_size")
    _refuse_if(len(target_lengths) != batch, "target_lengths must be of size batch_size")
    place = "(while checking arguments for ctc_loss_gpu)"
    longest = max(input_lengths, default=0)
    text = f"Expected input_lengths to have value at most {steps}, but got value {longest} {place}"
    _refuse_if(longest > steps, text)
    dim, needed = (0, sum(target_lengths)) if targets.dim() == 1 else (1, max(target_lengths, default=0))
    size = targets.shape[dim]
    wanted = f"size {needed} at dimension 0" if dim == 0 else f"size at least {needed} at dimension 1"
    text = f"Expected tensor to have {wanted}, but got size {size} for argument #2 'targets' {place}"
    _refuse_if(size != needed if dim == 0 else size < needed, text)


# --- indexing --------------------------------------------------------------------------------------------------------


@rule(
    Kind.REFUSAL,
    "TensorAdvancedIndexing.cpp",
    *(_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default),
)
def index_put(self: Any, indices: Any, values: Any, *_: Any) -> None:
    """_index_put_impl_: one dtype, and values that can be broadcast to the indexed elements."""
    text = f"got {_name(self)} for the destination and {_name(values)} for the source."
    is_same = self.dtype is values.dtype
    _refuse_if(not is_same, f"Index put requires the source and destination dtypes match, {text}")
    shape = _indexed_shape(self, indices)
    if shape is not None and not _can_expand(_shape(values), shape):
        text = f"shape mismatch: value tensor of shape {_shape(values)} cannot be broadcast to indexing result of shape"
        raise RuntimeError(f"{text} {shape}")


def _indexed_shape(self: torch.Tensor, indices: Any) -> list[int] | None:
    """Return the shape of `self[indices]`; None where values decide it, and for indices that do not fit."""
    places = [place for place, index in enumerate(indices) if index is not None]
    if any(indices[place].dtype in (torch.bool, torch.uint8) for place in places) or len(indices) > self.dim():
        return None
    try:
        common = list(torch.broadcast_shapes(*(indices[place].shape for place in places)))
    except RuntimeError:
        return None
    others = [[size] for place, size in enumerate(self.shape) if place not in places]
    are_adjacent = places == list(range(places[0], places[-1] + 1)) if places else True
    first = places[0] if are_adjacent and places else 0
    return [size for sizes in (*others[:first], common, *others[first:]) for size in sizes]


def _can_expand(shape: list[int], target: list[int]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in pairs)


@rule(Kind.REFUSAL, "TensorAdvancedIndexing.cpp", _aten.index_add.default, _aten.index_add_.default)
def index_add(self: Any, dim: int, index: Any, source: Any, **_: Any) -> None:
    """index_func_meta_impl."""
    _refuse_index("index_add_", index, source, self, dim)


@rule(Kind.REFUSAL, "TensorAdvancedIndexing.cpp", _aten.index_reduce.default, _aten.index_reduce_.default)
def index_reduce(self: Any, dim: int, index: Any, source: Any, *_: Any, **__: Any) -> None:
    """index_func_meta_impl."""
    _refuse_index("index_reduce_", index, source, self, dim)


def _refuse_index(name: str, index: Any, source: Any, self: Any, dim: int) -> None:
    is_index = index.dtype in (torch.int32, torch.int64)
    _refuse_if(not is_index, f"{name}(): Expected dtype int32/int64 for index but got: {_name(index)}")
    text = f"{name}(): self ({_name(self)}) and source ({_name(source)}) must have the same scalar type"
    _refuse_if(self.dtype is not source.dtype, text)
    count = source.shape[dim] if -source.dim() <= dim < source.dim() else 1
    text = (
        f"{name}(): Number of indices ({index.numel()}) should be equal to source.size(dim): ({count}), for dim: {dim}"
    )
    _refuse_if(index.numel() != count, text)
    is_same = self.dim() == source.dim() and _without(self, dim) == _without(source, dim)
    text = "source tensor shape must match self tensor shape, excluding the specified dimension. "
    _refuse_if(not is_same, f"{text}Got self.shape = {_shape(self)} source.shape = {_shape(source)}")


def _without(tensor: torch.Tensor, dim: int) -> list[int]:
    shape = _shape(tensor)
    if -len(shape) <= dim < len(shape):
        del shape[dim]
    return shape


@rule(Kind.REFUSAL, "TensorAdvancedIndexing.cpp", _aten.index_copy.default, _aten.index_copy_.default)
def index_copy(self: Any, dim: int, index: Any, source: Any) -> None:
    """TORCH_PRECOMPUTE_META_FUNC(index_copy)."""
    _refuse_copy("index_copy_()", index, self, source, f"(self) {_name(self)} and (source) {_name(source)}")


@rule(Kind.REFUSAL, "TensorAdvancedIndexing.cpp", _aten.put.default, _aten.put_.default)
def put(self: Any, index: Any, source: Any, *_: Any) -> None:
    """put_."""
    _refuse_copy("put_()", index, self, source, f"self.dtype = {_name(self)} and source.dtype = {_name(source)}")


def _refuse_copy(name: str, index: Any, self: Any, source: Any, dtypes: str) -> None:
    text = f"{name}: Expected a long tensor for index, but got {_name(index)}"
    _refuse_if(index.dtype is not torch.int64, text)
    text = f"{name}: self and source expected to have the same dtype, but got {dtypes}"
    _refuse_if(self.dtype is not source.dtype, text)


@rule(Kind.REFUSAL, "cuda/Indexing.cu", _aten.index_select.default)
def index_select(self: Any, dim: int, index: Any) -> None:
    """index_select_out_cuda."""
    is_index = index.dtype in (torch.int32, torch.int64)
    _refuse_if(not is_index, "index_select(): Expected dtype int32 or int64 for index")


@rule(Kind.REFUSAL, "TensorAdvancedIndexing.cpp", _aten.masked_scatter.default, _aten.masked_scatter_.default)
def masked_scatter(self: Any, mask: Any, source: Any) -> None:
    """masked_scatter__cuda."""
    text = f"masked_scatter_ only supports boolean masks, but got mask with dtype {_name(mask)}"
    _refuse_if(mask.dtype is not torch.bool, text)
    names = f"{_name(self)} and {_name(source)}"
    text = f"masked_scatter: expected self and source to have same dtypes but got {names}"
    _refuse_if(self.dtype is not source.dtype, text)


@rule(Kind.REFUSAL, "TensorShape.cpp", _aten.slice_scatter.default)
def slice_scatter(self: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> None:
    """slice_scatter."""
    shape = _shape(self)
    shape[dim] = len(range(shape[dim])[start:end:step])
    _refuse_source(src, shape)


@rule(Kind.REFUSAL, "TensorShape.cpp", _aten.select_scatter.default)
def select_scatter(self: Any, src: Any, dim: int, index: Any) -> None:
    """select_scatter."""
    _refuse_source(src, _without(self, dim))


@rule(Kind.REFUSAL, "TensorShape.cpp", _aten.diagonal_scatter.default)
def diagonal_scatter(self: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> None:
    """diagonal_scatter."""
    shape = _shape(self)
    length = min(shape[dim1] + min(offset, 0), shape[dim2] - max(offset, 0))
    others = [size for dim, size in enumerate(shape) if dim not in (dim1 % len(shape), dim2 % len(shape))]
    _refuse_source(src, [*others, max(length, 0)])


def _refuse_source(source: torch.Tensor, shape: list[int]) -> None:
    text = "expected src to have a size equal to the slice of self. "
    _refuse_if(_shape(source) != shape, f"{text}src size = {_shape(source)}, slice size = {shape}")


@rule(Kind.REFUSAL, "TensorShape.cpp", _aten.as_strided.default, _aten.as_strided_.default)
def as_strided(self: Any, size: Any, stride: Any, storage_offset: Any = None) -> None:
    """checkInBoundsForStorage in Resize.h."""
    if 0 in size or len(size) != len(stride):
        return
    offset = self.storage_offset() if storage_offset is None else storage_offset
    last = offset + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    needed, held = (last + 1) * self.dtype.itemsize, untyped_storage(self).nbytes()
    place = f"sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize {self.dtype.itemsize}"
    text = f"setStorage: {place} requiring a storage size of {needed} are out of bounds for storage of size {held}"
    _refuse_if(needed > held, text)


@rule(Kind.REFUSAL, "Bucketization.cpp", _aten.bucketize.Tensor)
def bucketize(self: Any, boundaries: Any, **_: Any) -> None:
    """bucketize_out_cuda."""
    _refuse_if(boundaries.dim() != 1, f"boundaries tensor must be 1 dimension, but got dim({boundaries.dim()})")


@rule(Kind.REFUSAL, "BucketizationUtils.h", _aten.searchsorted.Tensor)
def searchsorted(sorted_sequence: Any, self: Any, *, sorter: Any = None, **_: Any) -> None:
    """searchsorted_pre_check."""
    if sorter is not None and sorter.dtype is not torch.int64:
        text = f"torch.searchsorted(): sorter must be a tensor of long dtype but got dtype {_name(sorter)}"
        raise RuntimeError(text)


# --- elementwise -----------------------------------------------------------------------------------------------------


@rule(Kind.REFUSAL, "TensorFactories.cpp", _aten.complex.default, _aten.polar.default)
def complex_of(first: Any, second: Any) -> None:
    """complex_check_dtype."""
    if first.dtype is not second.dtype:
        names = f"{_name(first)} but got scalar type {_name(second)}"
        raise RuntimeError(f"Expected object of scalar type {names} for second argument")


@rule(Kind.REFUSAL, "BinaryOps.cpp", _aten.heaviside.default, _aten.heaviside_.default)
def heaviside(self: Any, values: Any) -> None:
    """TORCH_META_FUNC(heaviside)."""
    text = "heaviside is not yet implemented for tensors with different dtypes."
    _refuse_if(self.dtype is not values.dtype, text)


@rule(Kind.REFUSAL, "TensorCompare.cpp", _aten.isclose.default, _aten.allclose.default)
def is_close(self: Any, other: Any, *_: Any, **__: Any) -> None:
    """isclose."""
    _refuse_if(self.dtype is not other.dtype, f"{_name(self)} did not match {_name(other)}")


@rule(Kind.REFUSAL, "cuda/CrossKernel.cu", _aten.linalg_cross.default)
def cross(self: Any, other: Any, **_: Any) -> None:
    """launch_cross_kernel reads both in the dtype of the first."""
    _refuse_other_dtype(self, other)


@rule(Kind.REFUSAL, "cuda/DistanceKernel.cu", _aten._cdist_forward.default)
def distances(first: Any, second: Any, *_: Any) -> None:
    """cdist_kernel_impl reads both in the dtype of the first."""
    _refuse_other_dtype(first, second)


# --- random numbers --------------------------------------------------------------------------------------------------

_MOST_CATEGORIES = 1 << 24


@rule(Kind.REFUSAL, "Distributions.cpp", _aten.multinomial.default, _aten.multinomial.out)
def multinomial(self: Any, num_samples: int, replacement: bool = False, *, out: Any = None, **_: Any) -> None:
    """multinomial_out."""
    text = f"multinomial expects Long tensor out, got: {_name(out)}" if out is not None else ""
    _refuse_if(out is not None and out.dtype is not torch.int64, text)
    _refuse_if(self.dim() not in (1, 2), "prob_dist must be 1 or 2 dim")
    text = f"multinomial only supports floating-point dtypes for input, got: {_name(self)}"
    _refuse_if(not self.is_floating_point(), text)
    _refuse_if(num_samples <= 0, "cannot sample n_sample <= 0 samples")
    text = "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
    _refuse_if(not replacement and num_samples > self.shape[-1], text)
    _refuse_if(self.shape[-1] > _MOST_CATEGORIES, "number of categories cannot exceed 2^24")


def _printed(number: Any) -> str:
    """Return a number as a stream of C++ prints it."""
    return f"{number:g}"


@rule(Kind.REFUSAL, "DistributionTemplates.h", _aten.cauchy_.default)
def cauchy(self: Any, median: float = 0, sigma: float = 1, **_: Any) -> None:
    """cauchy_impl_."""
    _refuse_if(sigma <= 0, f"cauchy_ expects sigma > 0.0, but found sigma={_printed(sigma)}")


@rule(Kind.REFUSAL, "DistributionTemplates.h", _aten.exponential_.default)
def exponential(self: Any, lambd: float = 1, **_: Any) -> None:
    """exponential_impl_."""
    _refuse_if(lambd <= 0, f"exponential_ expects lambda > 0.0, but found lambda={_printed(lambd)}")


@rule(Kind.REFUSAL, "DistributionTemplates.h", _aten.geometric_.default)
def geometric(self: Any, p: float, **_: Any) -> None:
    """geometric_impl_."""
    _refuse_if(not 0 < p < 1, f"geometric_ expects p to be in (0, 1), but got p={_printed(p)}")


@rule(Kind.REFUSAL, "DistributionTemplates.h", _aten.log_normal_.default)
def log_normal(self: Any, mean: float = 1, std: float = 2, **_: Any) -> None:
    """log_normal_impl_."""
    _refuse_if(std <= 0, f"log_normal_ expects std > 0.0, but found std={_printed(std)}")


@rule(Kind.REFUSAL, "DistributionTemplates.h", _aten.uniform_.default)
def uniform(self: Any, low: float = 0, high: float = 1, **_: Any) -> None:
    """uniform_impl_."""
    numbers = f"from={_printed(low)} > to={_printed(high)}"
    text = f"uniform_ expects to return a [from, to) range, but found {numbers}"
    _refuse_if(not math.isnan(low) and low > high, text)
