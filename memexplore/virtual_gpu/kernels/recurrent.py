"""Request the memory of recurrent layers: of cuDNN's op for all layers and steps, and of the fused cells.

Source: RNN.cpp and cudnn/RNN.cpp below aten/src/ATen/native. cuDNN does not document the sizes of its reserve space and
workspace. The first is as measured on an H100, the second an estimate, which the tape's notes say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memexplore.tape import Category
from memexplore.torch_internals.tensors import storage_key
from memexplore.virtual_gpu.kernels.cublas_workspace import Library
from memexplore.virtual_gpu.kernels.plan import (
    Constant,
    Free,
    Kept,
    OpRunner,
    Output,
    Plan,
    Scratch,
    is_contiguous,
    new,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.values import known_values, notes

_aten = torch.ops.aten


@rule(Kind.TF32, "cudnn/RNN.cpp", _aten._cudnn_rnn.default, _aten._cudnn_rnn_backward.default)
def tf32_allowed_in_recurrent_layers() -> bool:
    """Return whether recurrent layers of cuDNN may: by default they do."""
    return bool(torch.backends.cudnn.rnn.fp32_precision == "tf32")  # type: ignore[attr-defined]


RELU, TANH, LSTM, GRU = range(4)
"""cuDNN's numbers of its modes: torch/backends/cudnn/rnn.py."""

MODES = {"RNN_RELU": RELU, "RNN_TANH": TANH, "LSTM": LSTM, "GRU": GRU}

_GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}

_KEPT = {RELU: 1, TANH: 1, LSTM: 5, GRU: 6}
"""Values that cuDNN keeps for each hidden unit and step of a layer, beside the output between layers: as measured for
LSTM and GRU with cuDNN 9.19 on an H100."""

_LAYER = 8 << 20
"""Bytes of the workspace for each layer and direction, whatever its size."""

_SMALL = {RELU: (256, 10), TANH: (256, 10), LSTM: (128, 18), GRU: (128, 15)}
"""Hidden units up to which a layer is small, and the copies of its output that its workspace then holds."""

_LARGE = {RELU: 4, TANH: 4, LSTM: 5, GRU: 4}

NOTE = (
    "cuDNN's workspace for recurrent layers is an estimate, fitted on 4 000 layers that were measured on an H100 with "
    "cuDNN 9.19: half of them are within 2 %, nine in ten within 12 %"
)


def weight_count(mode: int, width: int, hidden: int, projected: int, layers: int, directions: int) -> int:
    """Return the elements of the buffer of all weights; cuDNN always keeps two biases (cudnnSetRNNDescriptor_v8).

    >>> weight_count(LSTM, 8, 16, 0, 1, 1) == 4 * 16 * (8 + 16) + 2 * 4 * 16
    True
    """
    total = 0
    out = projected or hidden
    for layer in range(layers):
        wide = width if layer == 0 else out * directions
        total += directions * (_GATES[mode] * hidden * (wide + out + 2) + projected * hidden)
    return total


class Sizes:
    """Extents of a call of _cudnn_rnn, packed or padded, batch or steps first."""

    def __init__(self, args: Any) -> None:
        source = args[0]
        self.mode, self.hidden, self.projected, self.layers = args[-10:-6]
        self.batch_first, self.dropout, self.train, bidirectional, batch_sizes = args[-6:-1]
        self.directions = 2 if bidirectional else 1
        self.packed = len(batch_sizes) > 0
        self.out = self.projected or self.hidden
        self.width = source.shape[-1]
        if self.packed:
            self.rows, self.batch, self.length = source.shape[0], batch_sizes[0], len(batch_sizes)
        else:
            self.batch, self.length = source.shape[:2] if self.batch_first else source.shape[1::-1]
            self.rows = self.batch * self.length
        self.dtype, self.item = source.dtype, source.dtype.itemsize

    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the outputs of the last layer."""
        wide = self.out * self.directions
        if self.packed:
            return (self.rows, wide)
        return (self.batch, self.length, wide) if self.batch_first else (self.length, self.batch, wide)

    def needs_no_copy(self, tensor: torch.Tensor) -> bool:
        """Return whether cuDNN reads a tensor without a copy: contiguous with the steps first."""
        if self.packed or not self.batch_first:
            return tensor.is_contiguous()
        return is_contiguous(tensor, (1, 0, 2))

    @property
    def _output(self) -> int:
        """Bytes of the outputs of one layer."""
        return self.rows * self.hidden * self.directions * self.item

    @property
    def reserve(self) -> int:
        """Bytes of the reserve space: of 4 145 that were measured on an H100, 13 differ."""
        if not self.train:
            return 0
        between = self.rows * self.out * self.directions * self.item
        # A bit for each value between layers says whether dropout keeps it; with two directions, two.
        bits = self.rows * self.out * self.directions**2 if self.dropout else 0
        mask = -(-bits // 256) * 32
        return _KEPT[self.mode] * self._output * self.layers + (between + mask) * (self.layers - 1) + 256

    @property
    def workspace(self) -> int:
        """Bytes of the workspace, an estimate: weights, copies of input and output, and states."""
        weights = weight_count(self.mode, self.width, self.hidden, self.projected, self.layers, self.directions)
        limit, copies = _SMALL[self.mode]
        is_small = self.hidden <= limit and self.dtype is not torch.bfloat16
        outputs = (copies if is_small else _LARGE[self.mode]) * self._output
        inputs = (5 if is_small else 3) * self.rows * self.width * self.directions * self.item // 2
        states = 8 * self.batch * self.hidden * self.directions * self.layers * self.item
        return _LAYER * self.layers * self.directions + weights * self.item + outputs + inputs + states


@rule(Kind.PLAN, "cudnn/RNN.cpp", _aten._cudnn_rnn.default)
def forward(args: Any, kwargs: Any) -> Plan:
    """_cudnn_rnn: input copy, output, last states, weights that are not in one buffer, workspace, reserve space.

    The first call with dropout allocates the random state of the device before (get_dropout_state in cudnn/RNN.cpp).
    """
    notes.add(NOTE)
    source, weights, cell_state = args[0], args[3], args[5]
    sizes = Sizes(args)
    shape = sizes.output_shape()
    order = None
    if sizes.batch_first and not sizes.packed:
        order = (1, 0, 2)
    depth = sizes.layers * sizes.directions
    outputs: list[Any] = [
        new(shape, source.dtype, order),
        new((depth, sizes.batch, sizes.out), source.dtype),
        new((depth, sizes.batch, sizes.hidden) if cell_state is not None else (0,), source.dtype),
        new((sizes.reserve,), torch.uint8),
    ]
    requests: list[Any] = [Kept(Library.DROPOUT)] if sizes.train and sizes.dropout else []
    if not sizes.needs_no_copy(source):
        requests.append(Scratch(source.numel() * sizes.item))
    requests += [Output(0), Output(1), Output(2)]
    if weights is None:
        count = weight_count(sizes.mode, sizes.width, sizes.hidden, sizes.projected, sizes.layers, sizes.directions)
        outputs.append(new((count,), source.dtype))
        requests.append(Output(4))
    else:
        # C++ returns the weight buffer that it got; only the backward pass reads it.
        outputs.append(new((0,), source.dtype))
    requests += [Scratch(sizes.workspace, Category.WORKSPACE), Output(3)]
    return Plan(outputs, tuple, requests)


def flat_copies(weights: list[torch.Tensor], count: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a buffer of `count` elements and the copies of weights that lie in it.

    Gradients pass through the copies: copy_weights_to_flat_buf_views in cudnn/RNN.cpp.
    """
    buffer = torch.zeros(count, dtype=dtype, device=weights[0].device)
    copies, start = [], 0
    for weight in weights:
        copy = torch.empty(0, dtype=dtype, device=weight.device)
        with torch.no_grad():
            copy.set_(buffer[start : start + weight.numel()].view(weight.shape))  # type: ignore[call-overload]
        copies.append(copy.copy_(weight))
        start += weight.numel()
    return buffer, copies


@rule(Kind.OPS, "cudnn/RNN.cpp", _aten._cudnn_rnn_backward.default)
def backward(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_cudnn_rnn_backward: gradients of input and states, then of all weights in one buffer."""
    notes.add(NOTE)
    source, weights, _, _, hidden_state, cell_state, output, gradient = args[:8]
    sizes = Sizes(args[:-2])
    mask = args[-1]
    dtype = source.dtype
    requests: list[Any] = []
    if gradient is None:
        requests.append(Scratch(output.numel() * sizes.item))
    for missing, state in ((args[8], hidden_state), (args[9], cell_state)):
        if missing is None and state is not None:
            requests.append(Scratch(state.numel() * sizes.item))
    swapped = sizes.batch_first and not sizes.packed
    copied = [tensor for tensor in (source, gradient) if tensor is not None and not sizes.needs_no_copy(tensor)]
    before_copies = sum(type(entry) is Scratch for entry in requests)
    requests += [Scratch(tensor.numel() * sizes.item) for tensor in copied]
    shape = tuple(source.shape)
    outputs: list[Any] = [new(shape, dtype, (1, 0, 2) if swapped else None), new(tuple(hidden_state.shape), dtype)]
    outputs.append(new(tuple(cell_state.shape), dtype) if cell_state is not None else Constant(None))
    number = sum(type(entry) is Scratch for entry in requests)
    requests += [Output(0), Output(1)]
    if cell_state is not None:
        requests.append(Output(2))
    requests += [Scratch(sizes.workspace, Category.WORKSPACE), Free(number)]
    requests += [Free(before_copies + position) for position in reversed(range(len(copied)))]
    if mask[3]:
        # _cudnn_rnn_backward_weight copies the input again.
        if not sizes.needs_no_copy(source):
            requests.append(Scratch(source.numel() * sizes.item))
        count = weight_count(sizes.mode, sizes.width, sizes.hidden, sizes.projected, sizes.layers, sizes.directions)
        outputs.append(new((count,), dtype))
        requests += [Output(3), Scratch(sizes.workspace, Category.WORKSPACE)]
    results = runner.run_plan(Plan(outputs, list, requests), func, args, [])
    gradients: list[torch.Tensor] = []
    if mask[3]:
        buffer, start = results.pop(), 0
        for weight in weights:
            with runner:
                gradients.append(buffer[start : start + weight.numel()].view(weight.shape))
            start += weight.numel()
    return (*results, gradients)


@rule(Kind.OPS, "cudnn/RNN.cpp", _aten._cudnn_rnn_flatten_weight.default)
def flatten_weight(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_cudnn_rnn_flatten_weight: a buffer of zeros, of which all weights become views."""
    weights, _, width, kind, hidden, projected, layers, _, bidirectional = args
    count = weight_count(kind, width, hidden, projected, layers, 2 if bidirectional else 1)
    plan = Plan([new((count,), weights[0].dtype)], None, None)
    buffer = runner.run_plan(plan, func, args, [])
    known = [known_values.of(weight) for weight in weights]
    all_known = all(value is not None for value in known)
    start = 0
    with torch.no_grad():
        for weight in weights:
            with runner:
                part = buffer[start : start + weight.numel()].view(weight.shape)
                weight.set_(part)
            start += weight.numel()
        for weight, value in zip(weights, known, strict=True):
            if value is not None and all_known:
                known_values.put(weight, value)
    return buffer


@rule(Kind.PLAN, "cuda/RNN.cu", _aten._thnn_fused_lstm_cell.default)
def fused_lstm_cell(args: Any, kwargs: Any) -> Plan:
    """A workspace of the gates' size, then the states: _thnn_fused_lstm_cell in cuda/RNN.cu."""
    gates, _, cell = args[:3]
    outputs = [new(tuple(cell.shape), cell.dtype), new(tuple(cell.shape), cell.dtype)]
    return Plan([*outputs, new(tuple(gates.shape), gates.dtype)], tuple, [Output(2), Output(0), Output(1)])


@rule(Kind.PLAN, "cuda/RNN.cu", _aten._thnn_fused_gru_cell.default)
def fused_gru_cell(args: Any, kwargs: Any) -> Plan:
    """A workspace of five values for each hidden unit, then the state: _thnn_fused_gru_cell in cuda/RNN.cu."""
    hidden = args[2]
    outputs: list[Any] = [new(tuple(hidden.shape), hidden.dtype)]
    outputs.append(new((hidden.shape[0], 5 * hidden.shape[1]), hidden.dtype))
    return Plan(outputs, tuple, [Output(1), Output(0)])


@rule(Kind.PLAN, "cuda/RNN.cu", _aten._thnn_fused_gru_cell_backward.default)
def fused_gru_cell_backward(args: Any, kwargs: Any) -> Plan:
    """Gradients of both gates and the state, then of the biases: _thnn_fused_gru_cell_backward in cuda/RNN.cu."""
    gradient, _, has_bias = args
    rows, width = gradient.shape
    gates = new((rows, 3 * width), gradient.dtype)
    bias: Any = new((3 * width,), gradient.dtype) if has_bias else Constant(None)
    return Plan([gates, gates, new((rows, width), gradient.dtype), bias, bias], tuple, None)


# --- composite ops: RNN.cpp and cudnn/RNN.cpp -----------------------------------------------------------------------


@rule(Kind.COMPOSITE, "RNN.cpp", _aten.lstm_cell.default)
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


@rule(Kind.COMPOSITE, "RNN.cpp", _aten.gru_cell.default)
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


@rule(Kind.COMPOSITE, "RNN.cpp", _aten.lstm.input)
def lstm(tensor, state, params, has_biases, layers, dropout, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
    """lstm.input: one call of cuDNN for all layers and steps."""
    return _cudnn_rnn(
        LSTM, tensor, state[0], state[1], params, has_biases, layers, dropout, train, bidirectional, batch_first, []
    )


@rule(Kind.COMPOSITE, "RNN.cpp", _aten.lstm.data)
def lstm_packed(tensor, sizes, state, params, has_biases, layers, dropout, train, bidirectional):  # type: ignore[no-untyped-def]
    """lstm.data: lstm.input on a packed sequence."""
    return _cudnn_rnn(
        LSTM,
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


def _of_padded(mode: int) -> Callable[..., Any]:
    """Return the kernel of gru.input, rnn_tanh.input or rnn_relu.input, by cuDNN's number of the mode."""

    def kernel(tensor, hidden, params, has_biases, layers, dropout, train, bidirectional, batch_first):  # type: ignore[no-untyped-def]
        return _cudnn_rnn(
            mode, tensor, hidden, None, params, has_biases, layers, dropout, train, bidirectional, batch_first, []
        )[:2]

    return kernel


def _of_packed(mode: int) -> Callable[..., Any]:
    """Return the kernel of gru.data, rnn_tanh.data or rnn_relu.data, by cuDNN's number of the mode."""

    def kernel(tensor, sizes, hidden, params, has_biases, layers, dropout, train, bidirectional):  # type: ignore[no-untyped-def]
        return _cudnn_rnn(
            mode, tensor, hidden, None, params, has_biases, layers, dropout, train, bidirectional, False, sizes.tolist()
        )[:2]

    return kernel


for _mode, _op in ((GRU, _aten.gru), (TANH, _aten.rnn_tanh), (RELU, _aten.rnn_relu)):
    rule(Kind.COMPOSITE, "RNN.cpp", _op.input)(_of_padded(_mode))
    rule(Kind.COMPOSITE, "RNN.cpp", _op.data)(_of_packed(_mode))
