"""Raise errors for what a virtual GPU cannot simulate: kinds of tensors without a fake kernel, and single ops.

Each names the line of the user's code, what cannot be simulated and what to do.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from memexplore.virtual_gpu.tensors.tensor import is_virtual
from memexplore.virtual_gpu.values.value_reads import NotSimulated, user_frame

QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
"""Dtypes of `torch.quantize_per_tensor` and its like, whose tensors have a scale beside their values."""

_KINDS = (
    (
        r"sparse_(csr|csc|bsr|bsc|compressed)|Sparse (CSR|CSC|BSR|BSC)",
        "a sparse tensor of layout CSR, CSC, BSR or BSC",
        "use layout torch.sparse_coo, as Tensor.to_sparse() makes it",
    ),
    (
        r"[Nn]ested_?[Tt]ensor",
        "a nested tensor of layout torch.strided",
        "make it with layout=torch.jagged",
    ),
    (
        r"[Qq]uantize",
        "a tensor of a quantized dtype",
        "use tensors of int8 with a scale of their own, as torchao does",
    ),
    (r"mkldnn|Mkldnn", "a tensor of layout torch._mkldnn", "leave it out: it is for the CPU only"),
)
"""Pattern of an op or an error, the kind of tensor that it belongs to, and what to use instead."""


_MAY_READ_REAL = ("detach", "alias", "view", "_to_copy", "copy_", "_local_scalar_dense", "set_", "clone")
"""Ops that may have tensors of a real GPU on a virtual one: such as those that copy them to the CPU."""


def refuse_real_gpu(func: Any, values_of_op: tuple[Any, ...]) -> None:
    """Raise RuntimeError for an op that computes with a tensor of the real GPU, which would use its memory."""
    if func.overloadpacket.__name__ in _MAY_READ_REAL:
        return
    for value in values_of_op:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and is_on_real_gpu(tensor):
                frame = user_frame()
                line = f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame is not None else ""
                raise RuntimeError(
                    f"{line}{func} has a tensor of shape {tuple(tensor.shape)} on the real GPU, and this code runs on "
                    "a virtual one. Run it on copies with --dry-run (%%memprofile --dry-run --gpu NAME), or make the "
                    "model and its inputs after the virtual GPU is on (%memgpu NAME)"
                )


def is_on_real_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of a real GPU."""
    return tensor.is_cuda and not is_virtual(tensor)


def kind_of(func: Any, error: Exception | str = "") -> tuple[str, str] | None:
    """Return the unsupported kind of tensor that an op or its error speaks of, and what to use instead, or None.

    >>> kind_of("aten._to_sparse_csr.default")[0]
    'a sparse tensor of layout CSR, CSC, BSR or BSC'
    """
    text = f"{func} {error}"
    return next(((kind, instead) for pattern, kind, instead in _KINDS if re.search(pattern, text)), None)


def not_simulated(func: Any, error: Exception | str) -> NotSimulated:
    """Return the error for an op that cannot be simulated, with the line of the user's code."""
    frame = user_frame()
    line = f"{frame.f_code.co_filename}:{frame.f_lineno}: " if frame is not None else ""
    kind = kind_of(func, error)
    if kind is not None:
        unsupported, instead = kind
        return NotSimulated(
            f"{line}{unsupported} cannot be simulated on a virtual GPU ({func}): {instead}, or profile it on a real GPU"
        )
    # torch adds paragraphs of advice for the authors of ops.
    reason = re.split(r"\. |\n|, but there was no fake impl", str(error), maxsplit=1)[0]
    return NotSimulated(
        f"{line}{func} cannot be simulated on a virtual GPU ({type(error).__name__}: {reason}); profile it on a real "
        "GPU, or replace it by an op whose output shape does not depend on values"
    )
