"""Run the fast path of nn.TransformerEncoderLayer and nn.MultiheadAttention, one op for a layer, in inference only.

Each op is made of the ops that its CUDA kernel runs. Source: transformer_encoder_layer_forward in
transformers/transformer.cpp, native_multi_head_attention_cuda in transformers/cuda/attention.cu, its helpers in
transformers/attention.cpp, masked_softmax_cuda in cuda/SoftMax.cu.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.torch_internals.dispatch import disabled_torch_function, schema_of
from memexplore.virtual_gpu.kernels import attention
from memexplore.virtual_gpu.kernels.plan import OpRunner
from memexplore.virtual_gpu.kernels.table import Kind, rule

_aten = torch.ops.aten


def has_torch_function(tensors: Any) -> bool:
    """Return whether a tensor has a `__torch_function__` of the user's: the layers then leave their fast path.

    torch.overrides.has_torch_function, which this replaces, counts the function mode of the virtual GPU too.
    """
    disabled = disabled_torch_function
    return any(
        type(tensor) is not torch.Tensor and getattr(type(tensor), "__torch_function__", disabled) is not disabled
        for tensor in tensors
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return _aten.view.default(tensor, [-1, tensor.shape[-1]])


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return _aten.transpose.int(weight, 0, 1)


def _linear(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    result = _aten.addmm.default(bias, _rows(tensor), _transposed(weight))
    return _aten.view.default(result, [*tensor.shape[:-1], weight.shape[0]])


def _heads(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return (batch, steps, width) viewed as (batch, heads, steps, width of a head)."""
    batch, steps, width = tensor.shape
    return _aten.transpose.int(_aten.view.default(tensor, [batch, steps, count, width // count]), 1, 2)


def _merge_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Return (batch, heads, steps, width of a head) as (batch, steps, width), copied if it is not contiguous."""
    batch, count, steps, width = tensor.shape
    swapped = _aten.transpose.int(tensor, 1, 2)
    if not swapped.is_contiguous():
        swapped = _aten.clone.default(swapped, memory_format=torch.contiguous_format)
    return _aten.view.default(swapped, [batch, steps, count * width])


def _masked_softmax(scores: torch.Tensor, mask: torch.Tensor | None, kind: int | None) -> torch.Tensor:
    """softmax, in place without a mask: masked_softmax_cuda in cuda/SoftMax.cu.

    With a mask a new result, and a filled copy where the kernel for short rows cannot run.
    """
    if mask is None:
        return scores
    if mask.dtype is not torch.bool:
        mask = _aten._to_copy.default(mask, dtype=torch.bool)
    columns = scores.shape[-1]
    result = _aten.empty_like.default(scores)
    if columns <= 1024 and columns * scores.element_size() <= 4096 and mask.is_contiguous():
        return result
    if kind == 1 and mask.dim() == 2:
        mask = _aten.expand.default(_aten.view.default(mask, [mask.shape[0], 1, 1, columns]), list(scores.shape))
    return _aten._softmax.default(_aten.masked_fill.Scalar(scores, mask, float("-inf")), -1, False)


def _self_attention(
    tensor: torch.Tensor,
    count: int,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    kind: int | None,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the result of self-attention, and its weights if they are needed (None otherwise)."""
    packed_weight, packed_bias, out, out_bias = weights
    batch, steps, width = tensor.shape
    if width // count % 8 == 0 and not need_weights and mask is None:
        heads = _heads(tensor, count)
        if (
            attention.chosen_kernel(attention.Call(heads, heads, heads, None, 0.0, False, False))
            is not attention.Kernel.MATH
        ):
            parts = _aten.split.Tensor(_linear(tensor, packed_weight, packed_bias), width, -1)
            query, key, value = (_heads(part, count) for part in parts)
            context = attention.scaled_dot_product_attention(query, key, value)
            return _linear(_merge_heads(context), out, out_bias), None
    projected = _aten.mm.default(_rows(tensor), _transposed(packed_weight))
    # Query, key and value share one storage; the result of attention overwrites the query.
    packed = _aten.new_empty.default(projected, [3 * batch, count, steps, width // count])
    del projected
    query, key, _ = _aten.split.Tensor(packed, batch)
    flat = [_aten.view.default(part, [batch * count, steps, width // count]) for part in (query, key)]
    scores = _aten.bmm.default(flat[0], _aten.transpose.int(flat[1], 1, 2))
    scores = _masked_softmax(_aten.view.default(scores, [batch, count, steps, steps]), mask, kind)
    if not need_weights:
        del scores
    result = _linear(_merge_heads(query), out, out_bias)
    return result, scores if need_weights else None


@rule(Kind.OPS, "transformers/cuda/attention.cu", _aten._native_multi_head_attention.default)
def multi_head_attention(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_native_multi_head_attention, where query, key and value are one tensor."""
    arguments = {argument.name: argument.default_value for argument in schema_of(func).arguments}
    arguments |= dict(zip(arguments, args, strict=False)) | kwargs
    query, need_weights = arguments["query"], arguments["need_weights"]
    if query is not arguments["key"] or query is not arguments["value"]:
        return NotImplemented
    weights = tuple(arguments[name] for name in ("qkv_weight", "qkv_bias", "proj_weight", "proj_bias"))
    with runner:
        result, scores = _self_attention(
            query, arguments["num_head"], weights, arguments["mask"], arguments["mask_type"], need_weights
        )
        if scores is not None and arguments["average_attn_weights"]:
            scores = _aten.div_.Scalar(_aten.sum.dim_IntList(scores, [1]), arguments["num_head"])
        # Without weights C++ returns an undefined tensor; a dispatch mode returns None for it.
        return result, scores


@rule(Kind.OPS, "transformers/transformer.cpp", _aten._transformer_encoder_layer_fwd.default)
def layer(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_transformer_encoder_layer_fwd: attention, in-place sum, norm, two linear layers, in-place sum, norm."""
    source, width, count, *weights, gelu, norm_first, eps = args[:10]
    norm1, norm1_bias, norm2, norm2_bias, linear1, linear1_bias, linear2, linear2_bias = args[10:18]
    mask, kind = (*args[18:], None, None)[:2]

    def norm(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return _aten.native_layer_norm.default(tensor, [width], weight, bias, eps)[0]

    with runner:
        x = norm(source, norm1, norm1_bias) if norm_first else source
        x = _self_attention(x, count, tuple(weights), mask, kind, False)[0]
        x = _aten.add_.Tensor(x, source)
        before = x if norm_first else norm(x, norm1, norm1_bias)
        del x
        inner = norm(before, norm2, norm2_bias) if norm_first else before
        hidden = _aten._addmm_activation.default(linear1_bias, _rows(inner), _transposed(linear1), use_gelu=gelu)
        inner = _linear(hidden, linear2, linear2_bias)
        del hidden
        x = _aten.add_.Tensor(_aten.view.default(inner, list(source.shape)), before)
        del inner
        return x if norm_first else norm(x, norm2, norm2_bias)
