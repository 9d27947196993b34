"""Read values of virtual tensors for user code: `item()`, `if tensor:`, `tolist()`, `numpy()`, printing.

Known values (known_values.py) are read as they are. **Every other value counts as 1**, so that guards such as
`isfinite(loss)` pass, nothing divides by zero and GradScaler steps (its `found_inf` counts as 0). Only the choices of
an op such as `topk` or `argmax` have values that are assumed (choices.py). Tensors and numbers print as `virtual`. A
loop whose end depends on an unknown value cannot be simulated and ends in one clear error (value_reads.py).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from memexplore.virtual_gpu.values import known_values, notes, real_tensors, value_hints, value_reads
from memexplore.virtual_gpu.values.virtual_array import stand_ins
from memexplore.virtual_gpu.values.virtual_numbers import VirtualFloat, VirtualInt, decide_by, number

NO_DLPACK = (
    "a tensor of a virtual GPU has no memory that another library could read by DLPack: hand over "
    "tensor.cpu().numpy(), or profile on a real GPU"
)


def on_read() -> None:
    """Do what follows from the program waiting for a value of the GPU; replaced while a virtual GPU is on."""


def read_known(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the known values that a program reads; note what is assumed about them."""
    known = known_values.of(tensor)
    assumption = known_values.assumption(tensor)
    if assumption is not None:
        notes.assume(assumption.text)
        if assumption.is_made_up:
            value_reads.count_read()
    return known


def _is_made_up(tensor: torch.Tensor) -> bool:
    assumption = known_values.assumption(tensor)
    return assumption is not None and assumption.is_made_up


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
        return _as_virtual(known.item()) if _is_made_up(tensor) else known.item()
    hints = value_hints.of(tensor)
    value = number(tensor.dtype, hints.value)
    value_reads.count_read(ones=int(isinstance(value, VirtualFloat) and hints.value == 1))
    if type(value) is bool:
        return _decide(hints)
    if isinstance(value, VirtualInt) and not hints.is_fact:
        notes.assume(f"the value of an integer tensor counted as {int(value)}")
    return value


def _as_virtual(value: Any) -> Any:
    """Return a number that is assumed as one that prints as `virtual`, in nested lists too."""
    if isinstance(value, list):
        return [_as_virtual(entry) for entry in value]
    return decide_by(value) if type(value) is bool else VirtualInt(value)


def _decide(hints: value_hints.ValueHints) -> bool:
    """Return an unknown boolean, by which code decides; note it where it does not follow from a rule."""
    if not hints.is_fact:
        notes.assume(f"an unknown boolean counted as {bool(hints.value)}")
    return decide_by(bool(hints.value))


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
        return decide_by(bool(known)) if _is_made_up(tensor) else bool(known)
    value_reads.count_read()
    return _decide(value_hints.of(tensor))


def tolist(tensor: torch.Tensor) -> Any:
    """Return nested lists of the tensor's values, of virtual numbers for unknown ones."""
    known = read_known(tensor)
    if known is not None:
        return _as_virtual(known.tolist()) if _is_made_up(tensor) else known.tolist()
    hints = value_hints.of(tensor)
    value_reads.count_read(ones=tensor.numel() if tensor.is_floating_point() and hints.value == 1 else 0)
    if not tensor.is_floating_point() and not hints.is_fact:
        notes.assume(f"the values of an integer tensor counted as {int(hints.value)}")

    def build(shape: tuple[int, ...]) -> Any:
        if not shape:
            return number(tensor.dtype, hints.value)
        return [build(shape[1:]) for _ in range(shape[0])]

    return build(tuple(tensor.shape))


def numpy(tensor: torch.Tensor) -> Any:
    """Return a numpy array of the tensor's values; for unknown ones an array of the value 1 that prints as `virtual`.

    Raises TypeError for a dtype that numpy lacks, as torch does.
    """
    known = read_known(tensor)
    if known is not None:
        # An array of its own: who writes to it does not write to the GPU.
        array = known.resolve_conj().resolve_neg().clone().numpy()
        return stand_ins(array) if _is_made_up(tensor) else array
    notes.assume("unknown values count as 1 in a numpy array")
    return stand_ins(real_tensors.full(tensor.shape, value_hints.of(tensor).value, dtype=tensor.dtype).numpy())


def text(tensor: torch.Tensor) -> str:
    """Return the text that a virtual tensor prints as: its values, or shape and dtype of unknown ones."""
    known = None if _is_made_up(tensor) else known_values.of(tensor)
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
