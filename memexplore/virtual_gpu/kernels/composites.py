"""Composite ops that branch on the device in C++, written as the branch that CUDA takes.

A virtual tensor reports `meta` to C++, so C++ would take another branch. In and out: the arguments and the result of
the op; composite_dispatch.py registers each function with torch. Docstrings name the C++ file below
aten/src/ATen/native.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import DispatchKey, kernel_lookup_of
from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.kernels import cuda_build, rnn

_aten = torch.ops.aten


def decomposed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a composite op as C++ decomposes it."""
    return kernel_lookup_of(op)(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """The fused kernel wherever 0 < p < 1: Dropout.cpp."""
    if train and 0 < p < 1 and tensor.numel():
        return _aten.native_dropout(tensor, p, train)[0]
    return decomposed(_aten.dropout.default, tensor, p, train)


def softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One kernel from half precision to float32: SoftMax.cpp."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return _aten._softmax(tensor, dim, True)
    return decomposed(_aten.softmax.int, tensor, dim, dtype)


def log_softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One kernel from half precision to float32: SoftMax.cpp."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return _aten._log_softmax(tensor, dim, True)
    return decomposed(_aten.log_softmax.int, tensor, dim, dtype)


def linear(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Where bias and product are not a single addmm, the bias is added in place: Linear.cpp."""
    if bias is None or tensor.dim() == 2 or (tensor.dim() == 3 and tensor.is_contiguous()) or weight.dim() != 2:
        return decomposed(_aten.linear.default, tensor, weight, bias)
    return torch.matmul(tensor, weight.t()).add_(bias)


def rms_norm(
    tensor: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """No fused kernel until torch 2.8: layer_norm.cpp."""
    if cuda_build.current().release >= (2, 9):
        return decomposed(_aten.rms_norm.default, tensor, shape, weight, eps)
    return decomposed(_aten._fused_rms_norm.default, tensor, shape, weight, eps)[0]


def einsum(equation: str, operands: list[torch.Tensor], *, path: list[int] | None = None) -> torch.Tensor:
    """Until torch 2.8 operands were never swapped: sumproduct_pair in Linear.cpp, pull request 161755.

    The installed C++ swaps them where all dimensions that only the second operand has come first in the result. With
    the dimensions of the first operand in front it does not swap, and a view restores the order of the result.
    """
    labels = None if cuda_build.current().release >= (2, 9) or len(operands) != 2 else _labels(equation, operands)
    if labels is None:
        return decomposed(_aten.einsum.default, equation, operands, path=path)
    (first, second), result = labels
    sizes = [dict(zip(names, each.shape, strict=True)) for names, each in zip((first, second), operands, strict=True)]
    first_only = [label for label in result if sizes[0].get(label, 1) != 1 and sizes[1].get(label, 1) == 1]
    order = first_only + [label for label in result if label not in first_only]
    ordered = f"{''.join(first)},{''.join(second)}->{''.join(order)}"
    return decomposed(_aten.einsum.default, ordered, operands).permute([order.index(label) for label in result])


def _labels(equation: str, operands: list[torch.Tensor]) -> tuple[list[list[str]], list[str]] | None:
    """Return the labels of an equation's operands and result, with letters for ellipses.

    None for an equation without a result, with a diagonal, or with another number of operands.
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    explicit = [names.replace("...", "") for names in inputs.split(",")]
    if not arrow or len(explicit) != len(operands) or any(len(set(names)) < len(names) for names in explicit):
        return None
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    ellipsis_dims = [tensor.dim() - len(names) for tensor, names in zip(operands, explicit, strict=True)]
    if max(ellipsis_dims) > len(unused):
        return None
    letters = unused[: max(ellipsis_dims)]

    def expand(names: str, count: int) -> list[str]:
        return list(names.replace("...", "".join(letters[len(letters) - count :])))

    return [expand(*each) for each in zip(inputs.split(","), ellipsis_dims, strict=True)], expand(result, len(letters))


def one_hot(tensor: torch.Tensor, classes: int = -1) -> torch.Tensor:
    """Zeros, then ones scattered into them; the values are not checked: Onehot.cpp."""
    if classes < 0:
        classes = int(tensor.max().item()) + 1
    result = torch.zeros((*tensor.shape, classes), dtype=torch.int64, device=tensor.device)
    return result.scatter_(-1, tensor.unsqueeze(-1), 1)


def batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    """cuDNN's kernel where its conditions hold: _select_batch_norm_backend in Normalization.cpp."""
    if not tensor.numel():
        return decomposed(
            _aten._batch_norm_impl_index.default,
            *(tensor, weight, bias, mean, variance, training, momentum, eps, cudnn),
        )
    if cudnn and _uses_cudnn_batch_norm(tensor, weight, bias, mean, variance, training, eps):
        assert weight is not None
        tensor = tensor.contiguous(memory_format=_suggested_format(tensor))
        results = _aten.cudnn_batch_norm.default(tensor, weight, bias, mean, variance, training, momentum, eps)
        return (*results, 1)
    reserve = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    results = _aten.native_batch_norm.default(tensor, weight, bias, mean, variance, training, momentum, eps)
    return (*results, reserve, 0)


def _uses_cudnn_batch_norm(
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    if weight is None or bias is None or not torch.backends.cudnn.enabled or eps < 1e-5:
        return False
    if (mean is None) != (variance is None) or (mean is None and not training):
        return False
    if tensor.dtype is torch.bfloat16 or weight.dtype is torch.bfloat16 or tensor.numel() >= 2**31 - 1:
        return False
    if tensor.dtype is torch.float16 and weight.dtype is not torch.float32:
        return False
    return tensor.dim() > 2 and tensor.shape[0] <= (880_801 if training else 65_535)


def _suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return channels_last where the strides are in that format: suggest_memory_format in c10."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = formats.get(tensor.dim())
    if channels_last and tensor.is_contiguous(memory_format=channels_last) and not tensor.is_contiguous():
        return channels_last
    return torch.contiguous_format


def lstm_cell(
    tensor: torch.Tensor,
    state: list[torch.Tensor],
    weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two products, then one kernel (cuda/RNN.cu): RNN.cpp."""
    hidden, cell, _ = _aten._thnn_fused_lstm_cell(
        torch.matmul(tensor, weight.t()), torch.matmul(state[0], hidden_weight.t()), state[1], bias, hidden_bias
    )
    return hidden, cell


def gru_cell(
    tensor: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Two products, then one kernel (cuda/RNN.cu): RNN.cpp."""
    return _aten._thnn_fused_gru_cell(
        torch.matmul(tensor, weight.t()), torch.matmul(hidden, hidden_weight.t()), hidden, bias, hidden_bias
    )[0]


# --- recurrent layers: RNN.cpp and cudnn/RNN.cpp --------------------------------------------------------------------


def _cudnn_rnn(
    mode: int,
    tensor: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor | None,
    params: list[torch.Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: list[int],
) -> Any:
    size = hidden.shape[2]
    projected = 0
    if cell is not None and cell.shape[2] != size:
        size, projected = cell.shape[2], size
    stride = (4 if has_biases else 2) + (1 if projected else 0)
    first = storage_key(params[0].untyped_storage())
    flattened = all(storage_key(param.untyped_storage()) == first for param in params)
    return _aten._cudnn_rnn(
        tensor,
        params,
        stride,
        params[0].detach() if flattened else None,
        hidden.contiguous(),
        cell.contiguous() if cell is not None else None,
        mode,
        size,
        projected,
        layers,
        batch_first,
        dropout,
        train,
        bidirectional,
        batch_sizes,
        None,
    )[:3]


def lstm(tensor, state, params, has_biases, layers, dropout, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
    """lstm.input: one call of cuDNN for all layers and steps."""
    return _cudnn_rnn(
        rnn.LSTM, tensor, state[0], state[1], params, has_biases, layers, dropout, train, bidirectional, batch_first, []
    )


def lstm_packed(tensor, sizes, state, params, has_biases, layers, dropout, train, bidirectional):  # type: ignore[no-untyped-def]
    """lstm.data: lstm.input on a packed sequence."""
    return _cudnn_rnn(
        rnn.LSTM,
        tensor,
        state[0],
        state[1],
        params,
        has_biases,
        layers,
        dropout,
        train,
        bidirectional,
        False,
        sizes.tolist(),
    )


def recurrent(mode: int) -> Callable[..., Any]:
    """Return the kernel of gru.input, rnn_tanh.input or rnn_relu.input, by cuDNN's number of the mode."""

    def kernel(tensor, hidden, params, has_biases, layers, dropout, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
        return _cudnn_rnn(
            mode, tensor, hidden, None, params, has_biases, layers, dropout, train, bidirectional, batch_first, []
        )[:2]

    return kernel


def recurrent_packed(mode: int) -> Callable[..., Any]:
    """Return the kernel of gru.data, rnn_tanh.data or rnn_relu.data, by cuDNN's number of the mode."""

    def kernel(tensor, sizes, hidden, params, has_biases, layers, dropout, train, bidirectional):  # type: ignore[no-untyped-def]
        return _cudnn_rnn(
            mode, tensor, hidden, None, params, has_biases, layers, dropout, train, bidirectional, False, sizes.tolist()
        )[:2]

    return kernel
