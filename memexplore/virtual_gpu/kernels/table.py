"""Table of kernels: op -> facts about its CUDA kernel beyond the outputs of torch's fake kernel.

Each entry has a kind, a rule and the file in PyTorch that the rule follows; the path is below aten/src/ATen/native
unless it begins with aten/, torch/ or the name of another library. An op may have entries of several kinds. An op
without an entry requests the storages of its outputs, in order, and nothing else.

Two kinds of facts have tables of their own, because they are not about memory: tensors/value_hints.py (values) and
dispatch/shape_rules.py (faster ways to the shapes that torch's fake kernels give).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from memexplore.virtual_gpu.kernels import (
    attention,
    attention_memory,
    batch_norm,
    bitsandbytes,
    collectives,
    composed,
    composites,
    convolutions,
    ctc,
    cublas_workspace,
    data_dependent,
    elementwise,
    encoder,
    float32_precision,
    grouped_mm,
    indexing,
    losses,
    normalization,
    products,
    random_numbers,
    reductions,
    rnn,
    sampling,
    sorting,
    sparse,
    transfers,
    without_fake_kernel,
)
from memexplore.virtual_gpu.kernels.autograd_in_place import InPlace

_aten = torch.ops.aten


class Kind(enum.Enum):
    """Kinds of rules, each with the signature of its rule."""

    REQUESTS = "memory requests in addition to the outputs"
    """`(args, kwargs, outputs) -> Requests | None`; None: the storages of the outputs and nothing else."""
    PLAN = "outputs and memory requests, where torch's fake kernel is missing or differs from CUDA"
    """`(args, kwargs) -> Plan`"""
    CUBLAS = "cuBLAS workspace"
    """`(args, kwargs, requests, outputs, workspaces) -> (requests, libraries whose workspaces the thread must have)`"""
    FAKE = "result in place of that of torch's fake kernel"
    """`(*args, **kwargs) -> result`"""
    OPS = "run by other ops or plans"
    """`(runner, func, args, kwargs) -> result`, or NotImplemented: run it as any other op."""
    DATA_DEPENDENT = "output shape or result depends on values: a noted assumption stands for them"
    """As OPS."""
    COMPOSITE = "composite op that branches on the device in C++"
    """The op's own signature; called with autograd, before the dispatch mode."""
    SETTINGS = "global settings of torch that decide a plan, besides the arguments"
    """`() -> settings`, hashable; the default dtype counts for every op."""
    TF32 = "whether torch may compute it in TF32 where it gets float32"
    """`() -> bool`, a setting that decides the plan too"""
    IN_PLACE = "op that a formula of autograd runs in place on a real GPU"
    """An `InPlace`: the in-place op, and where it applies."""


class Entry(NamedTuple):
    """Entry of an op: a rule of one kind, and the PyTorch file that the rule follows."""

    kind: Kind
    rule: Any
    source: str


def find(op: Any, kind: Kind) -> Any:
    """Return the rule of a kind for an op, None if the table has none."""
    entries = TABLE.get(op)
    if entries is None:
        # Libraries register their ops when they are imported.
        entries = TABLE.get(str(op), {})
    entry = entries.get(kind)
    return entry.rule if entry is not None else None


def of_kind(kind: Kind) -> dict[Any, Any]:
    """Return op -> rule for all entries of a kind."""
    return {op: entries[kind].rule for op, entries in TABLE.items() if kind in entries}


_Rows = Iterable[tuple[Any, str, list[Any]]]
"""Rows of one kind: rule, source, ops."""

_REDUCE = "cuda/Reduce.cuh"
_REQUESTS: _Rows = [
    # Matrix products
    (products.two_operands, "cuda/Blas.cpp", [_aten.mm.default, _aten.bmm.default]),
    (products.with_bias, "cuda/Blas.cpp", [_aten.addmm.default, _aten._addmm_activation.default]),
    (products.added, "cuda/Blas.cpp", [_aten.baddbmm.default]),
    (
        products.triangular_solve,
        "cuda/linalg/BatchLinearAlgebra.cpp",
        [_aten.linalg_solve_triangular.default, _aten.triangular_solve.default],
    ),
    # Convolutions
    (convolutions.forward, "cudnn/ConvShared.cpp", [_aten.convolution.default]),
    (convolutions.backward, "Convolution.cpp", [_aten.convolution_backward.default]),
    # Reductions
    (
        reductions.total,
        _REDUCE,
        [
            *(_aten.sum.default, _aten.sum.dim_IntList, _aten.nansum.default, _aten.prod.default),
            *(_aten.mean.default, _aten.mean.dim),
        ],
    ),
    (reductions.extreme, _REDUCE, [_aten.amax.default, _aten.amin.default, _aten.max.default, _aten.min.default]),
    (
        reductions.truth,
        _REDUCE,
        [
            *(_aten.any.default, _aten.any.dim, _aten.all.default, _aten.all.dim),
            *(_aten._is_any_true.default, _aten._is_all_true.default),
        ],
    ),
    (
        reductions.extreme_with_index,
        _REDUCE,
        [_aten.max.dim, _aten.min.dim, _aten.argmax.default, _aten.argmin.default],
    ),
    (
        reductions.variance,
        _REDUCE,
        [_aten.var.correction, _aten.std.correction, _aten.var_mean.correction, _aten.std_mean.correction],
    ),
    (reductions.vector_norm, _REDUCE, [_aten.linalg_vector_norm.default]),
    (reductions.foreach_norm, "cuda/ForeachReduceOp.cu", [_aten._foreach_norm.Scalar]),
    *sorting.REQUESTS,
    *composed.REQUESTS,
    # Softmax, normalization, random numbers
    (elementwise.softmax_backward, "cuda/SoftMax.cu", [_aten._softmax_backward_data.default]),
    (attention_memory.safe_softmax, "transformers/attention.cpp", [_aten._safe_softmax.default]),
    (normalization.group_norm, "cuda/group_norm_kernel.cu", [_aten.native_group_norm.default]),
    (normalization.group_norm_backward, "cuda/group_norm_kernel.cu", [_aten.native_group_norm_backward.default]),
    *batch_norm.REQUESTS,
    (random_numbers.dropout, "cuda/Dropout.cu", [_aten.native_dropout.default]),
    (random_numbers.multinomial, "Distributions.cpp", [_aten.multinomial.default]),
    # Losses
    (losses.pointwise, "Loss.cpp", [_aten.mse_loss.default, _aten.smooth_l1_loss.default]),
    (losses.multi_margin, "cuda/MultiMarginLoss.cu", [_aten.multi_margin_loss.default]),
    (losses.huber, "Loss.cpp", [_aten.huber_loss.default]),
    (losses.binary_with_logits, "Loss.cpp", [_aten.binary_cross_entropy_with_logits.default]),
    (losses.negative_log_likelihood_2d, "cuda/NLLLoss2d.cu", [_aten.nll_loss2d_forward.default]),
    # Indexing
    (indexing.read, "TensorAdvancedIndexing.cpp", [_aten.index.Tensor]),
    (
        indexing.put,
        "cuda/Indexing.cu",
        [_aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default],
    ),
    (indexing.embedding, "Embedding.cpp", [_aten.embedding.default]),
    (indexing.embedding_backward, "cuda/Embedding.cu", [_aten.embedding_dense_backward.default]),
    (
        indexing.embedding_bag,
        "cuda/EmbeddingBag.cu",
        [_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default],
    ),
    (indexing.embedding_bag_backward, "cuda/EmbeddingBag.cu", [_aten._embedding_bag_backward.default]),
    *elementwise.REQUESTS,
    (random_numbers.permutation, "cuda/Randperm.cu", [_aten.randperm.default, _aten.randperm.generator]),
    *without_fake_kernel.REQUESTS,
    # Copies between devices
    (transfers.copy_into, "cuda/Copy.cu", [_aten.copy_.default]),
    (transfers.to_copy, "cuda/Copy.cu", [_aten._to_copy.default]),
]

_BITSANDBYTES = "bitsandbytes/backends/cuda/ops.py"
_PLANS: _Rows = [
    (grouped_mm.product, "cuda/GroupedBlas.cpp", [_aten._grouped_mm.default]),
    (
        attention_memory.flash_forward,
        "transformers/cuda/flash_attn/flash_api.cpp",
        [_aten._scaled_dot_product_flash_attention.default],
    ),
    (
        attention_memory.flash_backward,
        "transformers/cuda/flash_attn/flash_api.cpp",
        [_aten._scaled_dot_product_flash_attention_backward.default],
    ),
    (
        attention_memory.efficient_forward,
        "transformers/cuda/attention.cu",
        [_aten._scaled_dot_product_efficient_attention.default],
    ),
    (
        attention_memory.efficient_backward,
        "transformers/cuda/attention_backward.cu",
        [_aten._scaled_dot_product_efficient_attention_backward.default],
    ),
    (attention_memory.cudnn_forward, "cudnn/MHA.cpp", [_aten._scaled_dot_product_cudnn_attention.default]),
    (attention_memory.cudnn_backward, "cudnn/MHA.cpp", [_aten._scaled_dot_product_cudnn_attention_backward.default]),
    (normalization.rms_norm, "cuda/layer_norm_kernel.cu", [_aten._fused_rms_norm.default]),
    (normalization.rms_norm_backward, "cuda/layer_norm_kernel.cu", [_aten._fused_rms_norm_backward.default]),
    (losses.binary, "cuda/Loss.cu", [_aten.binary_cross_entropy.default]),
    (ctc.forward, "cuda/LossCTC.cu", [_aten._ctc_loss.default]),
    (ctc.backward, "cuda/LossCTC.cu", [_aten._ctc_loss_backward.default]),
    (ctc.cudnn, "cudnn/LossCTC.cpp", [_aten._cudnn_ctc_loss.default, _aten._cudnn_ctc_loss.Tensor]),
    (rnn.lstm_cell, "cuda/RNN.cu", [_aten._thnn_fused_lstm_cell.default]),
    (rnn.gru_cell, "cuda/RNN.cu", [_aten._thnn_fused_gru_cell.default]),
    (rnn.gru_cell_backward, "cuda/RNN.cu", [_aten._thnn_fused_gru_cell_backward.default]),
    (rnn.forward, "cudnn/RNN.cpp", [_aten._cudnn_rnn.default]),
    (sampling.forward, "cudnn/GridSampler.cpp", [_aten.cudnn_grid_sampler.default]),
    (sampling.backward, "cudnn/GridSampler.cpp", [_aten.cudnn_grid_sampler_backward.default]),
    *without_fake_kernel.PLANS,
    (bitsandbytes.vectorwise_quant, _BITSANDBYTES, ["bitsandbytes.int8_vectorwise_quant.default"]),
    (bitsandbytes.double_quant, _BITSANDBYTES, ["bitsandbytes.int8_double_quant.default"]),
    (elementwise.fused_sgd, "cuda/FusedSgdKernel.cu", [_aten._fused_sgd_.default, _aten._fused_sgd_.tensor_lr]),
]

_CUBLAS: _Rows = [
    (
        cublas_workspace.add_to_requests,
        "cuda/Blas.cpp",
        [
            *(_aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default, _aten.vdot.default),
            *(_aten.baddbmm.default, _aten.baddbmm_.default, _aten.addbmm.default, _aten.addmv.default),
        ],
    ),
    (
        products.libraries_of_addmm,
        "cuda/Blas.cpp",
        [_aten.addmm.default, _aten.addmm_.default, _aten._addmm_activation.default],
    ),
]

_FAKE: _Rows = [
    # torch's fake kernel refuses indices on the CPU, which CUDA accepts.
    (lambda target, *_: target, "TensorAdvancedIndexing.cpp", [_aten._index_put_impl_.default]),
    # torch's fake kernels refuse a generator.
    (
        lambda target, *_, **__: target,
        "Distributions.cpp",
        [_aten.cauchy_.default, _aten.exponential_.default, _aten.geometric_.default, _aten.log_normal_.default],
    ),
]

_OPS: _Rows = [
    (collectives.run, "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp", collectives.OPS),
    (ctc.answer_use_cudnn, "cudnn/LossCTC.cpp", [_aten._use_cudnn_ctc_loss.default, _aten._use_cudnn_ctc_loss.Tensor]),
    (ctc.with_tensor_lengths, "LossCTC.cpp", [_aten._ctc_loss.Tensor, _aten._ctc_loss_backward.Tensor]),
    *composed.OPS,
    (sorting.median, "cuda/Sorting.cpp", [_aten.median.default, _aten.nanmedian.default]),
    (bitsandbytes.scaled_mm, _BITSANDBYTES, ["bitsandbytes.int8_scaled_mm.default"]),
    (bitsandbytes.mixed_scaled_mm, _BITSANDBYTES, ["bitsandbytes.int8_mixed_scaled_mm.default"]),
    (encoder.layer, "transformers/transformer.cpp", [_aten._transformer_encoder_layer_fwd.default]),
    (
        encoder.multi_head_attention,
        "transformers/cuda/attention.cu",
        [_aten._native_multi_head_attention.default],
    ),
    (sparse.make, "sparse/SparseTensor.cpp", [_aten._sparse_coo_tensor_with_dims_and_tensors.default]),
    (sparse.from_dense, "TensorConversions.cpp", [_aten._to_sparse.default, _aten._to_sparse.sparse_dim]),
    (sparse.embedding_bag_backward, "EmbeddingBag.cpp", [_aten._embedding_bag_backward.default]),
    (rnn.backward, "cudnn/RNN.cpp", [_aten._cudnn_rnn_backward.default]),
    (rnn.flatten_weight, "cudnn/RNN.cpp", [_aten._cudnn_rnn_flatten_weight.default]),
]

_DATA_DEPENDENT: _Rows = [
    (data_dependent.nonzero, "cuda/Nonzero.cu", [_aten.nonzero.default]),
    (
        data_dependent.non_maximum_suppression,
        "torchvision/csrc/ops/cuda/nms_kernel.cu",
        ["torchvision.nms.default"],
    ),
    (data_dependent.masked_select, "cuda/IndexKernel.cpp", [_aten.masked_select.default]),
    (data_dependent.index, "TensorAdvancedIndexing.cpp", [_aten.index.Tensor]),
    (data_dependent.unique, "cuda/Unique.cu", [_aten._unique2.default, _aten._unique.default]),
    (
        data_dependent.unique_along_dim,
        "cuda/Unique.cu",
        [_aten.unique_dim.default, _aten.unique_dim_consecutive.default, _aten.unique_consecutive.default],
    ),
    (data_dependent.pack_padded_sequence, "PackedSequence.cpp", [_aten._pack_padded_sequence.default]),
    (data_dependent.pad_packed_sequence, "PackedSequence.cpp", [_aten._pad_packed_sequence.default]),
    (data_dependent.repeat_interleave, "cuda/Repeat.cu", [_aten.repeat_interleave.Tensor]),
    (data_dependent.bincount, "cuda/SummaryOps.cu", [_aten.bincount.default]),
    (data_dependent.scalar, "cuda/CUDAScalar.cu", [_aten._local_scalar_dense.default]),
    (data_dependent.scalar, "TensorCompare.cpp", [_aten.is_nonzero.default]),
    (data_dependent.equal, "cuda/Equal.cpp", [_aten.equal.default]),
    (data_dependent.all_close, "TensorCompare.cpp", [_aten.allclose.default]),
    (
        data_dependent.mask_is_left_aligned,
        "nested/NestedTensorMath.cpp",
        [_aten._nested_tensor_from_mask_left_aligned.default],
    ),
]

_COMPOSITES: _Rows = [
    (composites.dropout, "Dropout.cpp", [_aten.dropout.default]),
    (composites.softmax, "SoftMax.cpp", [_aten.softmax.int]),
    (composites.log_softmax, "SoftMax.cpp", [_aten.log_softmax.int]),
    (composites.linear, "Linear.cpp", [_aten.linear.default]),
    (composites.einsum, "Linear.cpp", [_aten.einsum.default]),
    (composites.rms_norm, "layer_norm.cpp", [_aten.rms_norm.default]),
    (composites.one_hot, "Onehot.cpp", [_aten.one_hot.default]),
    (composites.batch_norm, "Normalization.cpp", [_aten._batch_norm_impl_index.default]),
    (
        attention.scaled_dot_product_attention,
        "transformers/attention.cpp",
        [_aten.scaled_dot_product_attention.default],
    ),
    (ctc.loss, "LossCTC.cpp", [_aten.ctc_loss.IntList, _aten.ctc_loss.Tensor]),
    (sampling.grid_sampler, "GridSampler.cpp", [_aten.grid_sampler.default]),
    (composites.lstm_cell, "RNN.cpp", [_aten.lstm_cell.default]),
    (composites.gru_cell, "RNN.cpp", [_aten.gru_cell.default]),
    (composites.lstm, "RNN.cpp", [_aten.lstm.input]),
    (composites.lstm_packed, "RNN.cpp", [_aten.lstm.data]),
    (composites.recurrent(rnn.GRU), "RNN.cpp", [_aten.gru.input]),
    (composites.recurrent_packed(rnn.GRU), "RNN.cpp", [_aten.gru.data]),
    (composites.recurrent(rnn.TANH), "RNN.cpp", [_aten.rnn_tanh.input]),
    (composites.recurrent_packed(rnn.TANH), "RNN.cpp", [_aten.rnn_tanh.data]),
    (composites.recurrent(rnn.RELU), "RNN.cpp", [_aten.rnn_relu.input]),
    (composites.recurrent_packed(rnn.RELU), "RNN.cpp", [_aten.rnn_relu.data]),
]

_CONVOLUTIONS = [_aten.convolution.default, _aten.convolution_backward.default]
_SETTINGS: _Rows = [(convolutions.settings, "Convolution.cpp", _CONVOLUTIONS)]
_TF32: _Rows = [
    (float32_precision.of_products, "cuda/Blas.cpp", [op for _, _, ops in _CUBLAS for op in ops]),
    (float32_precision.of_convolutions, "cudnn/ConvShared.cpp", _CONVOLUTIONS),
    (float32_precision.of_recurrent, "cudnn/RNN.cpp", [_aten._cudnn_rnn.default, _aten._cudnn_rnn_backward.default]),
]

_FORMULAS = "torch/csrc/autograd/FunctionsManual.cpp"
_WITH_LOGITS = ("BinaryCrossEntropyWithLogitsBackward0",)
_EXTREMES = ("MedianBackward0", "NanmedianBackward0", "MaxBackward1", "MinBackward1")
_IN_PLACE: _Rows = [
    # index_backward; the indices were checked in the forward pass (`unsafe`).
    (InPlace(_aten._index_put_impl_.default, (True,)), _FORMULAS, [_aten.index_put.default]),
    # value_selecting_reduction_backward
    (InPlace(_aten.scatter_.src), "ReduceOps.cpp", [_aten.scatter.src]),
    (InPlace(_aten.scatter_.value), "ReduceOps.cpp", [_aten.scatter.value]),
    # gather_backward, index_select_backward
    (InPlace(_aten.scatter_add_.default), "TensorAdvancedIndexing.cpp", [_aten.scatter_add.default]),
    (InPlace(_aten.index_add_.default), "TensorAdvancedIndexing.cpp", [_aten.index_add.default]),
    # masked_select_backward, take_backward
    (InPlace(_aten.masked_scatter_.default), "TensorAdvancedIndexing.cpp", [_aten.masked_scatter.default]),
    (InPlace(_aten.put_.default), "TensorAdvancedIndexing.cpp", [_aten.put.default]),
    # evenly_distribute_backward, clamp_backward
    (
        InPlace(_aten.logical_and_.default, nodes=(*_EXTREMES, "ClampBackward0", "ClampBackward1")),
        _FORMULAS,
        [_aten.logical_and.default],
    ),
    # binary_cross_entropy_with_logits_backward
    (InPlace(_aten.sub_.Tensor, nodes=_WITH_LOGITS), _FORMULAS, [_aten.sub.Tensor]),
    (InPlace(_aten.mul_.Tensor, nodes=_WITH_LOGITS), _FORMULAS, [_aten.mul.Tensor]),
    (InPlace(_aten.div_.Scalar, nodes=_WITH_LOGITS), _FORMULAS, [_aten.div.Scalar]),
    (InPlace(_aten.div_.Tensor, nodes=_WITH_LOGITS), _FORMULAS, [_aten.div.Tensor]),
]


def _table(rows: dict[Kind, _Rows]) -> dict[Any, dict[Kind, Entry]]:
    table: dict[Any, dict[Kind, Entry]] = {}
    for kind, rows_of_kind in rows.items():
        for rule, source, ops in rows_of_kind:
            for op in ops:
                entries = table.setdefault(op, {})
                if kind in entries:
                    raise ValueError(f"{op} has two rules of kind {kind.name}: keep one of them")
                entries[kind] = Entry(kind, rule, source)
    return table


TABLE: dict[Any, dict[Kind, Entry]] = _table(
    {
        Kind.REQUESTS: _REQUESTS,
        Kind.PLAN: _PLANS,
        Kind.CUBLAS: _CUBLAS,
        Kind.FAKE: _FAKE,
        Kind.OPS: _OPS,
        Kind.DATA_DEPENDENT: _DATA_DEPENDENT,
        Kind.COMPOSITE: _COMPOSITES,
        Kind.SETTINGS: _SETTINGS,
        Kind.TF32: _TF32,
        Kind.IN_PLACE: _IN_PLACE,
    }
)
"""Op -> its entries, one for each kind."""
