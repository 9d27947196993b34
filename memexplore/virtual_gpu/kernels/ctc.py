"""Connectionist temporal classification: which kernel runs, what it requests.

Source: ctc_loss_impl in LossCTC.cpp, _use_cudnn_ctc_loss and _cudnn_ctc_loss in cudnn/LossCTC.cpp, the native kernel in
cuda/LossCTC.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memexplore.tape import Category
from memexplore.torch_internals.dispatch import schema_of
from memexplore.virtual_gpu.dispatch.plans import Output, Plan, Scratch
from memexplore.virtual_gpu.kernels.shapes import Requests, nbytes, new
from memexplore.virtual_gpu.tensors import values
from memexplore.virtual_gpu.tensors.tensor import VirtualTensor

_aten = torch.ops.aten

NOTE = "cuDNN's workspace for ctc_loss is an estimate: the log-probabilities and one forward variable for each state"
_LONGEST = 255


def _virtual(tensor: Any) -> bool:
    return isinstance(tensor, VirtualTensor) and not tensor.host


def _lengths(lengths: Any, longest: int) -> list[int]:
    """Lengths as numbers: read where they are real, else taken to be as long as can be."""
    if not isinstance(lengths, torch.Tensor):
        return list(lengths)
    if not isinstance(lengths, VirtualTensor):
        return lengths.reshape(-1).tolist()
    values.assume("the lengths in ctc_loss count as the longest possible")
    return [longest] * lengths.numel()


def _numbers(log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, outputs: Any) -> tuple[list[int], list[int]]:
    """The lengths of the inputs and of the targets, which are rows or one after the other."""
    batch = log_probs.shape[1]
    longest = targets.shape[1] if targets.dim() == 2 else targets.shape[0] // batch
    return _lengths(inputs, log_probs.shape[0]), _lengths(outputs, longest)


def uses_cudnn(log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, outputs: Any, blank: int) -> bool:
    """_use_cudnn_ctc_loss: 32-bit targets one after the other, on the CPU where the lengths are no tensors."""
    chosen = torch.backends.cudnn.enabled and blank == 0 and targets.dim() == 1 and targets.is_contiguous()
    chosen = chosen and log_probs.dim() == 3 and log_probs.dtype is torch.float32 and targets.dtype is torch.int32
    if not chosen:
        return False
    if isinstance(inputs, torch.Tensor):
        if inputs.dtype is not torch.int32 or outputs.dtype is not torch.int32:
            return False
    elif _virtual(targets) or any(length != log_probs.shape[0] for length in inputs):
        return False
    pairs = zip(*_numbers(log_probs, targets, inputs, outputs), strict=True)
    return all(output <= min(_LONGEST, length) for length, output in pairs)


def loss(  # type: ignore[no-untyped-def]
    log_probs, targets, input_lengths, target_lengths, blank=0, reduction=1, zero_infinity=False
):
    """ctc_loss_impl: the losses by cuDNN or the native kernel, each over its target's length, their mean."""
    batched = log_probs.dim() == 3
    if not batched:
        log_probs = log_probs.unsqueeze(1)
    if uses_cudnn(log_probs, targets, input_lengths, target_lengths, blank):
        tensors = isinstance(input_lengths, torch.Tensor)
        op = _aten._cudnn_ctc_loss.Tensor if tensors else _aten._cudnn_ctc_loss.default
        # Its kernel that is not deterministic has been off since pull request 21680.
        losses = op(log_probs, targets, input_lengths, target_lengths, blank, True, zero_infinity)[0]
    else:
        if not batched and targets.dim() == 1:
            targets = targets.unsqueeze(0)
        targets = targets.to(log_probs.device, torch.int64)
        input_lengths, target_lengths = _numbers(log_probs, targets, input_lengths, target_lengths)
        losses = _aten._ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros((), dtype=losses.dtype, device=losses.device), losses)
    if reduction == 1:
        if isinstance(target_lengths, torch.Tensor):
            lengths = target_lengths.to(losses.device)
        else:
            lengths = torch.tensor(target_lengths).to(losses.device, losses.dtype)
        return (losses / lengths.clamp_min(1)).mean()
    if reduction == 2:
        return losses.sum()
    return losses if batched else losses.squeeze(0)


def with_lengths(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The native ops' overloads that take lengths as tensors, which they read on the CPU (ctc_loss_tensor)."""
    names = [argument.name for argument in schema_of(func).arguments]
    first = names.index("input_lengths")
    lengths = _numbers(args[names.index("log_probs")], args[names.index("targets")], args[first], args[first + 1])
    with mode:
        op = _aten._ctc_loss.default if first == 2 else _aten._ctc_loss_backward.default
        return op(*args[:first], *lengths, *args[first + 2 :], **kwargs)


def forward(args: Any, kwargs: Any) -> Plan:
    """ctc_loss_gpu_template: offsets and lengths on the device, the log-alphas, the losses."""
    log_probs, _, _, target_lengths = args[:4]
    steps, batch = log_probs.shape[:2]
    outputs: list[Any] = [
        new((batch,), log_probs.dtype),
        new((batch, steps, 2 * max(target_lengths, default=0) + 1), log_probs.dtype),
    ]
    return Plan(outputs, tuple, [*(Scratch(8 * batch) for _ in range(3)), Output(1), Output(0)], False, None)


def backward(args: Any, kwargs: Any) -> Plan:
    """ctc_loss_backward_gpu_template: log-betas of the log-alphas' size, then the gradient."""
    log_probs, log_alpha = args[1], args[6]
    lengths: Requests = [Scratch(8 * log_probs.shape[1]) for _ in range(3)]
    outputs: list[Any] = [new(tuple(log_probs.shape), log_probs.dtype)]
    return Plan(outputs, None, [Scratch(nbytes(log_alpha)), Output(0), *lengths], False, None)


def _states(longest: int, log_probs: torch.Tensor) -> int:
    steps, batch = log_probs.shape[:2]
    return batch * steps * (2 * longest + 1) * log_probs.dtype.itemsize


def cudnn(args: Any, kwargs: Any) -> Plan:
    """_cudnn_ctc_loss: the gradient comes with the losses, so that the backward pass only scales it."""
    values.note(NOTE)
    log_probs, targets, _, target_lengths = args[:4]
    copy: Requests = []
    longest: int = _LONGEST
    if isinstance(target_lengths, Sequence):
        longest = max(target_lengths, default=0)
    elif not _virtual(targets):
        copy = [Scratch(nbytes(targets))]
    workspace = Scratch(nbytes(log_probs) + _states(longest, log_probs), Category.WORKSPACE)
    outputs: list[Any] = [new((log_probs.shape[1],), log_probs.dtype), new(tuple(log_probs.shape), log_probs.dtype)]
    return Plan(outputs, tuple, [*copy, Output(1), workspace, Output(0)], False, None)
