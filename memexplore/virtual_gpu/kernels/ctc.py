"""Choose the kernel of connectionist temporal classification (ctc_loss), and request its memory.

Source: ctc_loss_impl in LossCTC.cpp, _use_cudnn_ctc_loss and _cudnn_ctc_loss in cudnn/LossCTC.cpp, the native kernel in
cuda/LossCTC.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memexplore.tape import Category
from memexplore.torch_internals.dispatch import schema_of
from memexplore.virtual_gpu.kernels.plan import OpRunner, Output, Plan, Requests, Scratch, nbytes, new
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.tensors.tensor import is_on_gpu, is_virtual
from memexplore.virtual_gpu.values import known_values, notes, reading, real_tensors

_aten = torch.ops.aten

NOTE = "cuDNN's workspace for ctc_loss is an estimate: the log-probabilities and one forward variable for each state"

_LONGEST = 255
"""Longest target that cuDNN takes."""


def _lengths(lengths: Any, together: int) -> list[int]:
    """Return lengths as numbers: their values, or where these are unknown the longest possible, noted as an assumption.

    `together` is the sum of the longest possible ones.
    """
    if not isinstance(lengths, torch.Tensor):
        return list(lengths)
    if not is_virtual(lengths):
        return lengths.reshape(-1).tolist()
    assumption = known_values.assumption(lengths)
    is_made_up = assumption is not None and assumption.is_made_up
    known = None if is_made_up else reading.read_known(lengths)
    if known is not None:
        return known.reshape(-1).tolist()
    notes.assume("the lengths in ctc_loss count as the longest possible")
    count = lengths.numel()
    return [(together + number) // count for number in reversed(range(count))]


def _input_and_target_lengths(
    log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, outputs: Any
) -> tuple[list[int], list[int]]:
    """Return the lengths of inputs and targets; targets are rows of a matrix or concatenated."""
    steps, batch = log_probs.shape[:2]
    return _lengths(inputs, steps * batch), _lengths(outputs, targets.numel())


def uses_cudnn(log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, outputs: Any, blank: int) -> bool:
    """Return whether cuDNN runs: concatenated 32-bit targets, on the CPU unless the lengths are tensors.

    Source: _use_cudnn_ctc_loss in cudnn/LossCTC.cpp.
    """
    supported = torch.backends.cudnn.enabled and blank == 0 and targets.dim() == 1 and targets.is_contiguous()
    supported = supported and log_probs.dim() == 3 and log_probs.dtype is torch.float32 and targets.dtype is torch.int32
    if not supported:
        return False
    if isinstance(inputs, torch.Tensor):
        if inputs.dtype is not torch.int32 or outputs.dtype is not torch.int32:
            return False
    elif is_on_gpu(targets) or any(length != log_probs.shape[0] for length in inputs):
        return False
    pairs = zip(*_input_and_target_lengths(log_probs, targets, inputs, outputs), strict=True)
    return all(output <= min(_LONGEST, length) for length, output in pairs)


@rule(Kind.COMPOSITE, "LossCTC.cpp", _aten.ctc_loss.IntList, _aten.ctc_loss.Tensor)
def loss(  # type: ignore[no-untyped-def]
    log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False
):
    """Losses by cuDNN or the native kernel, each divided by its target's length, and their mean: ctc_loss_impl."""
    batched = log_probs.dim() == 3
    if not batched:
        log_probs = log_probs.unsqueeze(1)
    if uses_cudnn(log_probs, targets, input_lengths, target_lengths, blank):
        tensors = isinstance(input_lengths, torch.Tensor)
        op = _aten._cudnn_ctc_loss.Tensor if tensors else _aten._cudnn_ctc_loss.default
        # cuDNN's non-deterministic kernel has been off since pull request 21680.
        losses = op(log_probs, targets, input_lengths, target_lengths, blank, True, zero_infinity)[0]
    else:
        if not batched and targets.dim() == 1:
            targets = targets.unsqueeze(0)
        if not is_on_gpu(targets) or targets.dtype is not torch.int64:
            targets = targets.to(log_probs.device, torch.int64)
        input_lengths, target_lengths = _input_and_target_lengths(log_probs, targets, input_lengths, target_lengths)
        losses = _aten._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        zero = torch.zeros((), dtype=losses.dtype, device=losses.device)
        losses = torch.where(losses == float("inf"), zero, losses)
        del zero
    if reduction == 1:
        if isinstance(target_lengths, torch.Tensor):
            lengths = target_lengths.to(losses.device)
        else:
            lengths = real_tensors.tensor(target_lengths).to(losses.device, losses.dtype)
        divisors = lengths.clamp_min(1)
        del lengths
        return (losses / divisors).mean()
    if reduction == 2:
        return losses.sum()
    return losses if batched else losses.squeeze(0)


@rule(Kind.OPS, "cudnn/LossCTC.cpp", _aten._use_cudnn_ctc_loss.default, _aten._use_cudnn_ctc_loss.Tensor)
def answer_use_cudnn(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """_use_cudnn_ctc_loss."""
    return uses_cudnn(*args)


@rule(Kind.OPS, "LossCTC.cpp", _aten._ctc_loss.Tensor, _aten._ctc_loss_backward.Tensor)
def with_tensor_lengths(runner: OpRunner, func: Any, args: Any, kwargs: Any) -> Any:
    """The native ops' overloads with lengths as tensors, which are read on the CPU: ctc_loss_tensor in LossCTC.cpp."""
    names = [argument.name for argument in schema_of(func).arguments]
    first = names.index("input_lengths")
    lengths = _input_and_target_lengths(
        args[names.index("log_probs")], args[names.index("targets")], args[first], args[first + 1]
    )
    with runner:
        op = _aten._ctc_loss.default if first == 2 else _aten._ctc_loss_backward.default
        return op(*args[:first], *lengths, *args[first + 2 :], **kwargs)


@rule(Kind.PLAN, "cuda/LossCTC.cu", _aten._ctc_loss.default)
def forward(args: Any, kwargs: Any) -> Plan:
    """Offsets and lengths on the device, log-alphas, losses: ctc_loss_gpu_template in cuda/LossCTC.cu."""
    log_probs, _, _, target_lengths = args[:4]
    steps, batch = log_probs.shape[:2]
    outputs: list[Any] = [
        new((batch,), log_probs.dtype),
        new((batch, steps, 2 * max(target_lengths, default=0) + 1), log_probs.dtype),
    ]
    return Plan(outputs, tuple, [*(Scratch(8 * batch) for _ in range(3)), Output(1), Output(0)])


@rule(Kind.PLAN, "cuda/LossCTC.cu", _aten._ctc_loss_backward.default)
def backward(args: Any, kwargs: Any) -> Plan:
    """Log-betas of the log-alphas' size, then the gradient: ctc_loss_backward_gpu_template in cuda/LossCTC.cu."""
    log_probs, log_alpha = args[1], args[6]
    lengths: Requests = [Scratch(8 * log_probs.shape[1]) for _ in range(3)]
    outputs: list[Any] = [new(tuple(log_probs.shape), log_probs.dtype)]
    return Plan(outputs, None, [*lengths, Scratch(nbytes(log_alpha)), Output(0)])


def _forward_variables(longest: int, log_probs: torch.Tensor) -> int:
    steps, batch = log_probs.shape[:2]
    return batch * steps * (2 * longest + 1) * log_probs.dtype.itemsize


@rule(Kind.PLAN, "cudnn/LossCTC.cpp", _aten._cudnn_ctc_loss.default, _aten._cudnn_ctc_loss.Tensor)
def cudnn(args: Any, kwargs: Any) -> Plan:
    """Losses together with the gradient, which the backward pass only scales: _cudnn_ctc_loss in cudnn/LossCTC.cpp."""
    notes.add(NOTE)
    log_probs, targets, _, target_lengths = args[:4]
    copy: Requests = []
    longest: int = _LONGEST
    if isinstance(target_lengths, Sequence):
        longest = max(target_lengths, default=0)
    elif not is_on_gpu(targets):
        copy = [Scratch(nbytes(targets))]
    workspace = Scratch(nbytes(log_probs) + _forward_variables(longest, log_probs), Category.WORKSPACE)
    outputs: list[Any] = [new((log_probs.shape[1],), log_probs.dtype), new(tuple(log_probs.shape), log_probs.dtype)]
    return Plan(outputs, tuple, [*copy, Output(1), workspace, Output(0)])
