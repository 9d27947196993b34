"""Whether ops on float32 may be computed in TF32: settings of torch, by the library that computes them.

Not `allow_tf32` and `torch.get_float32_matmul_precision()`, which raise an error where a program mixes them with
`fp32_precision`.
"""

from __future__ import annotations

import torch


def of_products() -> bool:
    """Return whether matrix products may: not by default."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def of_convolutions() -> bool:
    """Return whether convolutions may: by default they do."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def of_recurrent() -> bool:
    """Return whether recurrent layers of cuDNN may: by default they do."""
    return bool(torch.backends.cudnn.rnn.fp32_precision == "tf32")  # type: ignore[attr-defined]
