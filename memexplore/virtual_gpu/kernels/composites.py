"""Composite ops that ask for the device in C++, where a virtual tensor says `meta`: here they take CUDA's branch.

A kernel in this file stands in for the C++ one on the key AutogradPrivateUse1, which only virtual tensors of the device
have; for tensors of another PrivateUse1 backend it hands over to C++. Each names its source,
below aten/src/ATen/native.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch

from memexplore.torch_internals.dispatch import DispatchKey, kernel_lookup_of
from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.kernels import attention, ctc, cuda_build, rnn, sampling
from memexplore.virtual_gpu.tensors.tensor import DeviceState, VirtualTensor

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_registered: list[torch.library.Library] = []


def dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Dropout.cpp: the fused kernel wherever something is kept and something dropped."""
    if train and 0 < p < 1 and tensor.numel():
        return _aten.native_dropout(tensor, p, train)[0]
    return _decomposed(_aten.dropout.default, tensor, p, train)


def softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """SoftMax.cpp: half precision to float in one kernel."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return _aten._softmax(tensor, dim, True)
    return _decomposed(_aten.softmax.int, tensor, dim, dtype)


def log_softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """SoftMax.cpp: half precision to float in one kernel."""
    if tensor.dtype is torch.float16 and dtype is torch.float32:
        return _aten._log_softmax(tensor, dim, True)
    return _decomposed(_aten.log_softmax.int, tensor, dim, dtype)


def linear(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Linear.cpp: where bias and product are no single addmm, the bias is added in place."""
    if bias is None or tensor.dim() == 2 or (tensor.dim() == 3 and tensor.is_contiguous()) or weight.dim() != 2:
        return _decomposed(_aten.linear.default, tensor, weight, bias)
    return torch.matmul(tensor, weight.t()).add_(bias)


def rms_norm(
    tensor: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """layer_norm.cpp: until torch 2.8 there was no fused kernel."""
    if cuda_build.current().release >= (2, 9):
        return _decomposed(_aten.rms_norm.default, tensor, shape, weight, eps)
    return _decomposed(_aten._fused_rms_norm.default, tensor, shape, weight, eps)[0]


def einsum(equation: str, operands: list[torch.Tensor], *, path: list[int] | None = None) -> torch.Tensor:
    """Linear.cpp, sumproduct_pair: until torch 2.8 operands were never exchanged (pull request 161755).

    C++ exchanges them where all dimensions of the second alone come first in the result. With those of the first in
    front it has no reason to, and a view brings the result in order.
    """
    labels = None if cuda_build.current().release >= (2, 9) or len(operands) != 2 else _labels(equation, operands)
    if labels is None:
        return _decomposed(_aten.einsum.default, equation, operands, path=path)
    (first, second), result = labels
    sizes = [dict(zip(names, each.shape, strict=True)) for names, each in zip((first, second), operands, strict=True)]
    alone = [label for label in result if sizes[0].get(label, 1) != 1 and sizes[1].get(label, 1) == 1]
    order = alone + [label for label in result if label not in alone]
    ordered = f"{''.join(first)},{''.join(second)}->{''.join(order)}"
    return _decomposed(_aten.einsum.default, ordered, operands).permute([order.index(label) for label in result])


def _labels(equation: str, operands: list[torch.Tensor]) -> tuple[list[list[str]], list[str]] | None:
    """The labels of an equation's operands and result, ellipses spelt out; None for one without result or diagonal."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    named = [names.replace("...", "") for names in inputs.split(",")]
    if not arrow or len(named) != len(operands) or any(len(set(names)) < len(names) for names in named):
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = [tensor.dim() - len(names) for tensor, names in zip(operands, named, strict=True)]
    if max(hidden) > len(free):
        return None
    around = free[: max(hidden)]

    def spelt(names: str, count: int) -> list[str]:
        return list(names.replace("...", "".join(around[len(around) - count :])))

    return [spelt(*each) for each in zip(inputs.split(","), hidden, strict=True)], spelt(result, len(around))


def one_hot(tensor: torch.Tensor, classes: int = -1) -> torch.Tensor:
    """Onehot.cpp: zeros, then ones scattered into them; the values are not looked at."""
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
    """_batch_norm_impl_index in Normalization.cpp: cuDNN's kernel where its conditions hold."""
    if cudnn and _cudnn_normalises(tensor, weight, bias, mean, variance, training, eps):
        assert weight is not None
        tensor = tensor.contiguous(memory_format=_format(tensor))
        results = _aten.cudnn_batch_norm(tensor, weight, bias, mean, variance, training, momentum, eps)
        return (*results, 1)
    reserve = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    results = _aten.native_batch_norm(tensor, weight, bias, mean, variance, training, momentum, eps)
    return (*results, reserve, 0)


def _cudnn_normalises(
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
    # CUDNN_PER_ACTIVATION_BATCH_MAX, CUDNN_SPATIAL_BATCH_MAX and CUDNN_BATCH_MAX in cudnn.h.
    if tensor.dim() == 2:
        return training and tensor.shape[0] <= 131_070
    return tensor.dim() > 2 and tensor.shape[0] <= (880_801 if training else 65_535)


def _format(tensor: torch.Tensor) -> torch.memory_format:
    """`suggest_memory_format`: channels_last where the strides say so."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(tensor.dim())
    if wanted is not None and tensor.is_contiguous(memory_format=wanted) and not tensor.is_contiguous():
        return wanted
    return torch.contiguous_format


def lstm_cell(
    tensor: torch.Tensor,
    state: list[torch.Tensor],
    weight: torch.Tensor,
    hidden_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RNN.cpp: two products, then one kernel (cuda/RNN.cu)."""
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
    """RNN.cpp: two products, then one kernel (cuda/RNN.cu)."""
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
    whole = all(storage_key(param.untyped_storage()) == first for param in params)
    return _aten._cudnn_rnn(
        tensor,
        params,
        stride,
        params[0].detach() if whole else None,
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


def _lstm(tensor, state, params, has_biases, layers, dropout, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
    """lstm.input"""
    return _cudnn_rnn(
        rnn.LSTM, tensor, state[0], state[1], params, has_biases, layers, dropout, train, bidirectional, batch_first, []
    )


def _lstm_packed(tensor, sizes, state, params, has_biases, layers, dropout, train, bidirectional):  # type: ignore[no-untyped-def]
    """lstm.data"""
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


def _plain(mode: int) -> Callable[..., Any]:
    def kernel(tensor, hidden, params, has_biases, layers, dropout, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
        return _cudnn_rnn(
            mode, tensor, hidden, None, params, has_biases, layers, dropout, train, bidirectional, batch_first, []
        )[:2]

    return kernel


def _plain_packed(mode: int) -> Callable[..., Any]:
    def kernel(tensor, sizes, hidden, params, has_biases, layers, dropout, train, bidirectional):  # type: ignore[no-untyped-def]
        return _cudnn_rnn(
            mode, tensor, hidden, None, params, has_biases, layers, dropout, train, bidirectional, False, sizes.tolist()
        )[:2]

    return kernel


# --- registration ---------------------------------------------------------------------------------------------------

KERNELS: dict[Any, Callable[..., Any]] = {
    _aten.dropout.default: dropout,
    _aten.softmax.int: softmax,
    _aten.log_softmax.int: log_softmax,
    _aten.linear.default: linear,
    _aten.rms_norm.default: rms_norm,
    _aten.einsum.default: einsum,
    _aten.one_hot.default: one_hot,
    _aten._batch_norm_impl_index.default: batch_norm,
    _aten.scaled_dot_product_attention.default: attention.scaled_dot_product_attention,
    _aten.ctc_loss.IntList: ctc.loss,
    _aten.ctc_loss.Tensor: ctc.loss,
    _aten.grid_sampler.default: sampling.grid_sampler,
    _aten.lstm_cell.default: lstm_cell,
    _aten.gru_cell.default: gru_cell,
    _aten.lstm.input: _lstm,
    _aten.lstm.data: _lstm_packed,
    _aten.gru.input: _plain(rnn.GRU),
    _aten.gru.data: _plain_packed(rnn.GRU),
    _aten.rnn_tanh.input: _plain(rnn.TANH),
    _aten.rnn_tanh.data: _plain_packed(rnn.TANH),
    _aten.rnn_relu.input: _plain(rnn.RELU),
    _aten.rnn_relu.data: _plain_packed(rnn.RELU),
}
"""Composite op -> what it does on CUDA."""

# Composite for backends without a kernel of their own; CUDA has one, and autograd a formula that calls it.
_WITH_KERNELS = ("silu_backward", "mish_backward", "_fused_rms_norm")


def _decomposed(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What C++ makes of a composite op, on the same tensors."""
    return kernel_lookup_of(op)(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _guarded(op: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        if DeviceState.gpu_name is None or not any(_is_virtual(value) for value in args):
            return kernel_lookup_of(op)(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        return kernel(*args, **kwargs)

    return stand_in


def _is_virtual(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_virtual, value))
    return isinstance(value, VirtualTensor) and not value.host


def _unreachable(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("an op of the virtual GPU reached a device that is not there; please report it")


def register() -> None:
    """Put the kernels in place, once a process: they serve virtual tensors and nobody else."""
    if _registered:
        return
    autograd = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    for op, kernel in KERNELS.items():
        autograd.impl(op, _guarded(op, kernel))
    backend = torch.library.Library("aten", "IMPL", "PrivateUse1")
    for name in _WITH_KERNELS:
        # That there is a kernel makes autograd use its formula; the dispatch mode answers before it is called.
        backend.impl(name, _unreachable)
    _registered.extend((autograd, backend))
