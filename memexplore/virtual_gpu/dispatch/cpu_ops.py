"""Compute on the CPU ops that only CUDA has, or that CUDA and the CPU compute with other intermediate results.

Results are those of training on the CPU, None for an output that only the op's own backward reads. The backward of a
fused kernel computes its forward once more with autograd, with the random numbers of the first time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from memexplore.torch_internals.dispatch import ForceDispatchKeyGuard, exclude_set, include_set
from memexplore.torch_internals.tensors import untyped_storage
from memexplore.virtual_gpu.kernels import recurrent
from memexplore.virtual_gpu.values import real_tensors

_aten = torch.ops.aten
FORWARD = "forward_call"
"""Attribute of the copy of a result of an op in `REPLAYED`: its `Forward`."""


class Forward(NamedTuple):
    """The call of a fused kernel, for its backward."""

    random_state: torch.Tensor
    """State of the random number generator before the op."""
    arguments: tuple[Any, ...]
    """The op's arguments, None for tensors."""


@functools.cache
def _keys_outside_ops() -> tuple[Any, Any]:
    """Return the dispatch keys that a thread includes and excludes when it runs no op."""
    with torch.inference_mode(False):
        return include_set(), exclude_set()


def remember_keys() -> None:
    """Read the dispatch keys of this thread. Call it while no op runs."""
    _keys_outside_ops()


def _gradients(function: Callable[..., Any], inputs: list[Any], gradients: list[Any]) -> list[Any]:
    """Return the gradients of the inputs of a function (None for inputs without), given those of its outputs."""
    included, excluded = _keys_outside_ops()
    with ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        leaves = [
            value.detach().requires_grad_() if value is not None and value.dtype.is_floating_point else value
            for value in inputs
        ]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        pairs = [(out, grad) for out, grad in zip(outputs, gradients, strict=True) if grad is not None]
        variables = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        results = torch.autograd.grad(
            [out for out, _ in pairs], variables, [grad for _, grad in pairs], allow_unused=True
        )
    by_id = {id(leaf): grad for leaf, grad in zip(variables, results, strict=True)}
    return [None if leaf is None else by_id.get(id(leaf)) for leaf in leaves]


def _replayed(result: torch.Tensor, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that draws the random numbers again that gave `result`."""
    forward = getattr(untyped_storage(result), FORWARD, None)

    def call(*args: Any) -> Any:
        if forward is None:
            return function(*args)
        present = torch.default_generator.get_state()
        try:
            torch.default_generator.set_state(forward.random_state)
            return function(*args)
        finally:
            torch.default_generator.set_state(present)

    return call


# --- normalization and dropout --------------------------------------------------------------------------------------


def _batch_norm(source: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rest: Any) -> Any:
    return (*_aten.native_batch_norm(source, weight, bias, mean, variance, training, *rest), None)


def _batch_norm_backward(
    source: Any, gradient: Any, weight: Any, mean: Any, variance: Any, saved_mean: Any, saved: Any, eps: float, _: Any
) -> Any:
    return _aten.native_batch_norm_backward(
        gradient, source, weight, mean, variance, saved_mean, saved, True, eps, [True, True, True]
    )


def _rms_norm(source: Any, shape: Any, weight: Any, eps: Any) -> Any:
    wide = source.float() if source.dtype.itemsize < 4 else source
    dims = list(range(source.dim() - len(shape), source.dim()))
    smallest = torch.finfo(wide.dtype).eps if eps is None else eps
    return functional.rms_norm(source, shape, weight, eps), torch.rsqrt(
        wide.pow(2).mean(dims, keepdim=True).add_(smallest)
    )


def _rms_norm_backward(gradient: Any, source: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
    eps = getattr(untyped_storage(rstd), FORWARD).arguments[3]

    def normalize(source: Any, weight: Any) -> Any:
        return functional.rms_norm(source, shape, weight, eps)

    return _gradients(normalize, [source, weight], [gradient])


def _dropout(source: Any, p: float, train: Any) -> Any:
    """As `dropout` on the CPU: noise of the input's dtype."""
    if train is False:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    noise = torch.empty_like(source).bernoulli_(1 - p)
    kept = noise.bool()
    return source * noise.div_(1 - p), kept


def _dropout_backward(gradient: Any, kept: Any, scale: float) -> Any:
    return gradient * kept.to(gradient.dtype).div_(1 / scale)


# --- attention ------------------------------------------------------------------------------------------------------


def _attention(query: Any, key: Any, value: Any, bias: Any, dropout: float, causal: bool, scale: Any) -> Any:
    return functional.scaled_dot_product_attention(query, key, value, bias, dropout, causal, scale=scale)


def _flash(
    query: Any, key: Any, value: Any, dropout: float = 0, causal: bool = False, *_: Any, scale: Any = None
) -> Any:
    result = _attention(query, key, value, None, dropout, causal, scale)
    return (result, *[None] * 8)


def _attention_gradients(
    gradient: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, dropout: float, causal: bool, scale: Any
) -> list[Any]:
    bias = bias if bias is not None and bias.numel() else None

    def attend(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return _attention(query, key, value, bias, dropout, causal, scale)

    return _gradients(_replayed(out, attend), [query, key, value, bias], [gradient])


def _flash_backward(gradient: Any, query: Any, key: Any, value: Any, out: Any, *rest: Any, scale: Any = None) -> Any:
    dropout, causal = rest[5], rest[6]
    return _attention_gradients(gradient, query, key, value, None, out, dropout, causal, scale)[:3]


def _efficient(
    query: Any, key: Any, value: Any, bias: Any, _: Any, dropout: float = 0, causal: bool = False, *, scale: Any = None
) -> Any:
    return _attention(query, key, value, bias, dropout, causal, scale), None, None, None


def _efficient_backward(
    gradient: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, *rest: Any, scale: Any = None
) -> Any:
    dropout, mask = rest[3], rest[4]
    causal = rest[5] if len(rest) > 5 else False
    gradients = _attention_gradients(gradient, query, key, value, bias, out, dropout, causal, scale)
    return [gradient if needed else None for gradient, needed in zip(gradients, mask, strict=True)]


def _cudnn(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    _: Any,
    dropout: float = 0,
    causal: bool = False,
    *__: Any,
    scale: Any = None,
) -> Any:
    return (_attention(query, key, value, bias, dropout, causal, scale), *[None] * 8)


def _cudnn_backward(gradient: Any, query: Any, key: Any, value: Any, out: Any, *rest: Any, scale: Any = None) -> Any:
    bias, dropout, causal = rest[3], rest[8], rest[9]
    return _attention_gradients(gradient, query, key, value, bias, out, dropout, causal, scale)[:3]


# --- recurrent layers -----------------------------------------------------------------------------------------------


def _recurrent(args: Any) -> Callable[..., Any]:
    """Return the layers as a function of input, states and weights."""
    (mode, _, projected, layers, batch_first, dropout, train, bidirectional, batch_sizes) = args[6:15]
    biases = args[2] - (1 if projected else 0) == 4
    function: Any = {
        recurrent.LSTM: torch.lstm,
        recurrent.GRU: torch.gru,
        recurrent.TANH: torch.rnn_tanh,
        recurrent.RELU: torch.rnn_relu,
    }[mode]

    def run(source: Any, hidden: Any, cell: Any, *weights: Any) -> Any:
        state: Any = (hidden, cell) if mode == recurrent.LSTM else hidden
        tail = (list(weights), biases, layers, dropout, train, bidirectional)
        if len(batch_sizes):
            return function(source, real_tensors.tensor(batch_sizes), state, *tail)
        return function(source, state, *tail, batch_first)

    return run


def _rnn(*args: Any) -> Any:
    results = list(_recurrent(args)(args[0], args[4], args[5], *args[1]))
    return (*results, *[None] * (5 - len(results)))


def _rnn_backward(*args: Any) -> Any:
    source, weights, stride, buffer, hidden, cell, output, *gradients = args[:10]
    run = _recurrent((source, weights, stride, buffer, hidden, cell, *args[10:]))
    needed = gradients if cell is not None else gradients[:2]
    of_source, of_hidden, of_cell, *of_weights = _gradients(
        _replayed(output, run), [source, hidden, cell, *weights], needed
    )
    return of_source, of_hidden, of_cell, of_weights


def _sums(gates: Any, hidden: Any, bias: Any, hidden_bias: Any) -> tuple[Any, Any]:
    return (gates, hidden) if bias is None else (gates + bias, hidden + hidden_bias)


def _lstm_cell(gates: Any, hidden: Any, cell: Any, bias: Any = None, hidden_bias: Any = None) -> Any:
    gates, hidden = _sums(gates, hidden, bias, hidden_bias)
    i, f, g, o = (gates + hidden).chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    after = f * cell + i * g
    return o * after.tanh(), after, torch.cat((i, f, g, o), 1)


def _lstm_cell_backward(of_hidden: Any, of_cell: Any, cell: Any, after: Any, workspace: Any, biases: bool) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    squashed = after.tanh()
    of_hidden = torch.zeros_like(after) if of_hidden is None else of_hidden
    inner = _aten.tanh_backward(of_hidden * o, squashed)
    inner = inner if of_cell is None else inner + of_cell
    of_i, of_f = _aten.sigmoid_backward(inner * g, i), _aten.sigmoid_backward(inner * cell, f)
    of_g, of_o = _aten.tanh_backward(inner * i, g), _aten.sigmoid_backward(of_hidden * squashed, o)
    of_gates = torch.cat((of_i, of_f, of_g, of_o), 1)
    return of_gates, inner * f, of_gates.sum(0) if biases else None


def _gru_cell(gates: Any, hidden_gates: Any, hidden: Any, bias: Any = None, hidden_bias: Any = None) -> Any:
    gates, hidden_gates = _sums(gates, hidden_gates, bias, hidden_bias)
    (r, z, n), (hr, hz, hn) = gates.chunk(3, 1), hidden_gates.chunk(3, 1)
    r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
    n = (n + r * hn).tanh()
    return (hidden - n) * z + n, torch.cat((r, z, n, hidden, hn), 1)


def _gru_cell_backward(gradient: Any, workspace: Any, biases: bool) -> Any:
    r, z, n, hidden, hn = workspace.chunk(5, 1)
    of_z = _aten.sigmoid_backward(gradient * (hidden - n), z)
    of_n = _aten.tanh_backward(gradient - gradient * z, n)
    of_r = _aten.sigmoid_backward(of_n * hn, r)
    of_gates, of_hidden_gates = torch.cat((of_r, of_z, of_n), 1), torch.cat((of_r, of_z, of_n * r), 1)
    of_biases = (of_gates.sum(0), of_hidden_gates.sum(0)) if biases else (None, None)
    return of_gates, of_hidden_gates, gradient * z, *of_biases


# --- others ---------------------------------------------------------------------------------------------------------


def _grid_sampler(source: Any, grid: Any) -> Any:
    return functional.grid_sample(source, grid, align_corners=True)


def _grid_sampler_backward(source: Any, grid: Any, gradient: Any) -> Any:
    return _gradients(_grid_sampler, [source, grid], [gradient])


def _log_sigmoid(source: Any) -> Any:
    return functional.logsigmoid(source), None


def _log_sigmoid_backward(gradient: Any, source: Any, _: Any) -> Any:
    return _gradients(functional.logsigmoid, [source], [gradient])[0]


def _softmax(source: Any, dim: int, widened: bool) -> Any:
    return _aten._softmax(source.float() if widened else source, dim, False)


def _log_softmax(source: Any, dim: int, widened: bool) -> Any:
    return _aten._log_softmax(source.float() if widened else source, dim, False)


def _softmax_backward(gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    return _aten._softmax_backward_data(gradient, output, dim, output.dtype).to(dtype)


def _log_softmax_backward(gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> Any:
    return _aten._log_softmax_backward_data(gradient, output, dim, output.dtype).to(dtype)


OPS: dict[Any, Callable[..., Any]] = {
    # The CPU's result has no memory, and reading it would end the process.
    _aten._efficientzerotensor.default: torch.zeros,
    _aten.cudnn_batch_norm.default: _batch_norm,
    _aten.cudnn_batch_norm_backward.default: _batch_norm_backward,
    _aten._fused_rms_norm.default: _rms_norm,
    _aten._fused_rms_norm_backward.default: _rms_norm_backward,
    _aten.native_dropout.default: _dropout,
    _aten.native_dropout_backward.default: _dropout_backward,
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention.default: _efficient,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten._scaled_dot_product_cudnn_attention.default: _cudnn,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._cudnn_rnn.default: _rnn,
    _aten._cudnn_rnn_backward.default: _rnn_backward,
    _aten._thnn_fused_lstm_cell.default: _lstm_cell,
    _aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    _aten._thnn_fused_gru_cell.default: _gru_cell,
    _aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    _aten._transformer_encoder_layer_fwd.default: _aten._transformer_encoder_layer_fwd.default,
    _aten._native_multi_head_attention.default: _aten._native_multi_head_attention.default,
    _aten.cudnn_grid_sampler.default: _grid_sampler,
    _aten.cudnn_grid_sampler_backward.default: _grid_sampler_backward,
    _aten.log_sigmoid_forward.default: _log_sigmoid,
    _aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: _log_softmax,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
}
"""Op -> function of its real arguments that returns its real results."""

REPLAYED = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._cudnn_rnn.default,
        _aten._fused_rms_norm.default,
    }
)
"""Ops whose backward computes them once more, with the same random numbers."""
