"""Read values of virtual tensors for user code: `item()`, `if tensor:`, `tolist()`, `numpy()`, printing.

Known values (known_values.py) are read as they are. For unknown ones there is one rule: **every unknown value counts as
1**, so that guards such as `isfinite(loss)` pass, nothing divides by zero and GradScaler steps (its `found_inf` counts
as 0). Tensors and numbers print as `virtual`. A loop whose end depends on an unknown value cannot be simulated and ends
in one clear error (value_reads.py).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from memexplore.virtual_gpu.values import known_values, notes, real_tensors, value_hints, value_reads
from memexplore.virtual_gpu.values.virtual_array import VirtualArray
from memexplore.virtual_gpu.values.virtual_numbers import VirtualFloat, VirtualInt, decide_by, number

NO_DLPACK = (
    "a tensor of a virtual GPU has no memory that another library could read by DLPack: hand over "
    "tensor.cpu().numpy(), or profile on a real GPU"
)


def on_read() -> None:
    """Do what follows from the program waiting for a value of the GPU; replaced while a virtual GPU is on."""


def read_known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the known values that a program reads; note where another rank has sent others in their place."""
    known = known_values.of(tensor)
    sender = known_values.sender(tensor)
    if known is not None and sender is not None:
        notes.assume(SENT_BY_ANOTHER.format(sender))
    return known


SENT_BY_ANOTHER = "what rank {} has broadcast counted as what this rank had in the tensor before"


def item(tensor: torch.Tensor) -> Any:
    """Return the value of a one-element virtual tensor.

    Raises RuntimeError for several elements, NotSimulated in a loop that cannot end.
    """
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    if not tensor.is_cpu:
        on_read()
    known = read_known(tensor)
    if known is not None:
        return known.item()
    hints = value_hints.of(tensor)
    value = number(tensor.dtype, hints.value)
    value_reads.count_read(ones=int(isinstance(value, VirtualFloat) and hints.value == 1))
    if type(value) is bool:
        return decide_by(value)
    if isinstance(value, VirtualInt):
        notes.assume(f"the value of an integer tensor counted as {int(value)}")
    return value


def formatted(tensor: torch.Tensor, spec: str) -> str:
    """Return a one-element virtual tensor as text in the form of a specification, `virtual` for an unknown float."""
    if not tensor.is_floating_point() or known_values.is_known(tensor):
        return format(item(tensor), spec)
    if not getattr(tensor, "host", True):
        on_read()
    return format(number(tensor.dtype), spec)


def truth(tensor: torch.Tensor) -> bool:
    """Return the truth value of a one-element virtual tensor.

    Raises RuntimeError for several elements, NotSimulated in a loop that cannot end.
    """
    if tensor.numel() != 1:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
    known = read_known(tensor)
    if known is not None:
        return bool(known)
    value_reads.count_read()
    return decide_by(bool(value_hints.of(tensor).value))


def tolist(tensor: torch.Tensor) -> Any:
    """Return nested lists of the tensor's values, of virtual numbers for unknown ones."""
    known = read_known(tensor)
    if known is not None:
        return known.tolist()
    value = value_hints.of(tensor).value
    value_reads.count_read(ones=tensor.numel() if tensor.is_floating_point() and value == 1 else 0)
    if not tensor.is_floating_point():
        notes.assume("the values of an integer tensor counted as 1")

    def build(shape: tuple[int, ...]) -> Any:
        if not shape:
            return number(tensor.dtype, value)
        return [build(shape[1:]) for _ in range(shape[0])]

    return build(tuple(tensor.shape))


def numpy(tensor: torch.Tensor) -> Any:
    """Return a numpy array of the tensor's values; for unknown ones an array of the value 1 that prints as `virtual`.

    Raises TypeError for a dtype that numpy lacks, as torch does.
    """
    known = read_known(tensor)
    if known is not None:
        # An array of its own: who writes to it does not write to the GPU.
        return known.resolve_conj().resolve_neg().clone().numpy()
    notes.assume("unknown values count as 1 in a numpy array")
    return VirtualArray.filled(
        real_tensors.full(tensor.shape, value_hints.of(tensor).value, dtype=tensor.dtype).numpy()
    )


def text(tensor: torch.Tensor) -> str:
    """Return the text that a virtual tensor prints as: its values, or shape and dtype of unknown ones."""
    known = known_values.of(tensor)
    if known is not None:
        return _text_of_known(tensor, known)
    if tensor.dim() == 0:
        return f"virtual({str(tensor.dtype).removeprefix('torch.')}, device='{tensor.device}')"
    extra = ", requires_grad=True" if tensor.requires_grad and tensor.is_leaf else ""
    return f"virtual(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device='{tensor.device}'{extra})"


_SUFFIXES = re.compile(r"(, size=\([^)]*\))?(, dtype=[\w.]+)?\)$")


def _text_of_known(tensor: torch.Tensor, known: torch.Tensor) -> str:
    """Return the text that torch prints for a tensor on `cuda:0`."""
    printed = repr(known)
    match = _SUFFIXES.search(printed)
    suffixes = match[0][:-1] if match else ""
    body = printed[: match.start()] if match else printed[:-1]
    device = "" if tensor.is_cpu else f", device='{tensor.device}'"
    history = ", requires_grad=True" if tensor.requires_grad else ""
    if tensor.grad_fn is not None:
        history = f", grad_fn=<{tensor.grad_fn.name()}>"
    return f"{body}{device}{suffixes}{history})"
