"""Values of virtual tensors as user code reads them: `item()`, `if tensor:`, `tolist()`, `numpy()`, printing.

Known values (known_values.py) are read as they are. For unknown ones there is one rule: **every unknown value counts as
1**, so that guards such as `isfinite(loss)` pass, nothing divides by zero and
GradScaler steps (its `found_inf` counts as 0). Printed values read `virtual`. A `while` loop whose end depends on a
value cannot be simulated and ends in one clear error.

In: a virtual tensor. Out: Python numbers that stand for its values. Assumptions made and notes for the tape are
collected in `assumptions`.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from memexplore.torch_internals.tensors import PARAMETER_MARK
from memexplore.virtual_gpu.tensors import known_values, real_tensors, value_hints, value_loops
from memexplore.virtual_gpu.tensors.value_loops import NotSimulated as NotSimulated
from memexplore.virtual_gpu.tensors.value_loops import user_frame as user_frame
from memexplore.virtual_gpu.tensors.virtual_array import VirtualArray
from memexplore.virtual_gpu.tensors.virtual_numbers import VirtualInt, decide_by, number

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
        assume(SENT_BY_ANOTHER.format(sender))
    return known


SENT_BY_ANOTHER = "what rank {} has broadcast counted as what this rank had in the tensor before"


def item(tensor: torch.Tensor) -> Any:
    """Return the value of a one-element virtual tensor.

    Raises RuntimeError for several elements, NotSimulated in a loop that cannot end.
    """
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    if not getattr(tensor, "host", True):
        on_read()
    known = read_known(tensor)
    if known is not None:
        return known.item()
    hints = value_hints.of(tensor)
    value = number(tensor.dtype, hints.value, hints.choices)
    if type(value) is bool:
        return decide_by(value)
    value_loops.count_read(decides=False)
    if isinstance(value, VirtualInt):
        assume(f"the value of an integer tensor counted as {int(value)}")
    return value


def truth(tensor: torch.Tensor) -> bool:
    """Return the truth value of a one-element virtual tensor.

    Raises RuntimeError for several elements, NotSimulated in a loop that cannot end.
    """
    if tensor.numel() != 1:
        raise RuntimeError("Boolean value of Tensor with more than one value is ambiguous")
    known = read_known(tensor)
    return bool(known) if known is not None else decide_by(bool(value_hints.of(tensor).value))


def tolist(tensor: torch.Tensor) -> Any:
    """Return nested lists of the tensor's values, of virtual numbers for unknown ones."""
    known = read_known(tensor)
    if known is not None:
        return known.tolist()
    if not tensor.is_floating_point():
        assume("the values of an integer tensor counted as 1")

    hints = value_hints.of(tensor)

    def build(shape: tuple[int, ...]) -> Any:
        if not shape:
            return number(tensor.dtype, hints.value, hints.choices)
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
    assume("unknown values count as 1 in a numpy array")
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
    name = "Parameter containing:\n" if getattr(tensor, PARAMETER_MARK, False) else ""
    return f"{name}virtual(shape={tuple(tensor.shape)}, dtype={tensor.dtype}, device='{tensor.device}'{extra})"


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
    name = "Parameter containing:\n" if getattr(tensor, PARAMETER_MARK, False) else ""
    return f"{name}{body}{device}{suffixes}{history})"


assumptions: dict[str, None] = {}
"""Assumptions and notes of the run, in order, for the tape."""
recent_notes: list[str] = []
"""Notes since the dispatch mode emptied it: a plan repeats the notes of its making whenever it is carried out."""


def reset() -> None:
    """Forget assumptions, notes and counts of loops, when a virtual GPU is turned on."""
    assumptions.clear()
    recent_notes.clear()
    value_loops.reset()


def note(text: str) -> None:
    """Add a note to the tape, once, such as that a workspace is an estimate."""
    assumptions.setdefault(text)
    recent_notes.append(text)


def assume(text: str) -> None:
    """Add an assumption to the tape, with the line of the user's code that needs it."""
    frame = value_loops.user_frame()
    line = f" ({value_loops.file_and_line(frame)})" if frame is not None else ""
    assumptions.setdefault(f"assumed: {text}{line}")
