"""Requests of single ops compared with those of an H100 under torch 2.11, op by op (tests/gpu/op_requests.py).

A sample of what was measured: each op of the database with its first input, and cases with small inputs. Convolutions,
recurrent layers, sparse tensors and linear algebra are left out: their libraries choose workspaces.
"""

from __future__ import annotations

import pytest
import torch

from memexplore.run.simulate import simulate
from memexplore.tape import Action
from tests.gpu import op_requests

_VALUES = "memory depends on values: how many elements a mask keeps, whether a number is zero"
_SOLVER = "cuSOLVER's workspaces and the temporaries of linear algebra are not modelled"
_DOUBLE = "the formula accumulates in double precision on devices other than CUDA"
_FORMULA = "the formula allocates for subclasses of tensors, works in place on CUDA, or changed after torch 2.11"
_CALLS = "the implementation calls other ops, which is not modelled"
_ORDER = "cuBLAS's workspace of the backward pass falls into another part, as the sample is smaller"
_BILINEAR = ("bilinear", "nn.functional.bilinear. float32")
_SEGMENTS_AND_MASKS = (
    *("_segment_reduce.lengths", "_segment_reduce.offsets"),
    *("_unsafe_masked_index.", "_unsafe_masked_index_put_accumulate."),
)
KNOWN = {
    **dict.fromkeys(("masked_select|f", "masked_select|b", "nonzero|f", "masked_scatter. float32|b"), _VALUES),
    **dict.fromkeys(("prod f32|b", "prod -1 f32|b", "prod None f32|b", "prod. float32|b"), _VALUES),
    **dict.fromkeys(("cumprod. float32|b", "masked.cumprod. float32|b", "logcumsumexp. float32|b"), _VALUES),
    **dict.fromkeys(("logdet. float32|f", "norm.nuc float32|f", "qr. float32|f", "qr. float32|b"), _SOLVER),
    **dict.fromkeys(("pca_lowrank. float32|f", "pca_lowrank. float32|b"), _SOLVER),
    **dict.fromkeys(("svd_lowrank. float32|f", "svd_lowrank. float32|b"), _SOLVER),
    **dict.fromkeys(("renorm|b", "renorm. float32|b"), _DOUBLE),
    **dict.fromkeys(("__getitem__. float32|b", "atan2. float32|b", "clamp. float32|b", "trace. float32|b"), _FORMULA),
    **dict.fromkeys(("std_mean. float32|b", "std_mean.unbiased float32|b", "sgn. float32|b"), _FORMULA),
    **dict.fromkeys(("var_mean. float32|b", "var_mean.unbiased float32|b", "special.i1e. float32|b"), _FORMULA),
    **dict.fromkeys((f"pad reflect nhwc {dtype}|b" for dtype in ("f32", "f16", "bf16")), _FORMULA),
    **dict.fromkeys((f"scatter_reduce.{kind} float32|b" for kind in ("mean", "prod")), _FORMULA),
    **dict.fromkeys(("index_reduce.prod float32|b", "nn.functional.linear. float32|b", "complex mm|b"), _FORMULA),
    **dict.fromkeys(("nn.functional.binary_cross_entropy. float32|b", "histc. float32|f"), _FORMULA),
    "nn.functional.binary_cross_entropy_with_logits. float32|b": _FORMULA,
    **dict.fromkeys(("isin|f", "isin small|f", "isin. float32|f", "ldexp. float32|f", "mode f32|f", "pack|f"), _CALLS),
    **dict.fromkeys((f"mvlgamma.mvlgamma_p_{p} float32|f" for p in (1, 3, 5)), _CALLS),
    **dict.fromkeys(("normal|f", "normal. float32|f", "_chunk_cat. float32|f", "pdist|b"), _CALLS),
    **dict.fromkeys(("unique dim|f", "unique inverse|f", "fft.hfft2. float32|f", "fft.hfftn. float32|f"), _CALLS),
    **dict.fromkeys(("index_reduce.mean float32|f", "scatter_reduce.mean float32|f"), _CALLS),
    **dict.fromkeys((f"nn.functional.soft_margin_loss. float32|{way}" for way in "fb"), _CALLS),
    **dict.fromkeys((f"{name}|{way}" for name in _BILINEAR for way in "fb"), _CALLS),
    **dict.fromkeys((f"{name} float32|{way}" for name in _SEGMENTS_AND_MASKS for way in "fb"), _CALLS),
    "addmm bf16|b": _ORDER,
}  # fmt: skip
"""Ops whose requests differ, with the reason."""


def _op(part: str) -> str:
    """Return the op or case of a part, without the numbers of its shape, and its pass."""
    name, _, direction = part.rpartition("|")
    words = name.split(" [")[0].split()
    return " ".join(word for word in words if not word[0].isdigit()) + f"|{direction}"


@pytest.mark.skipif(
    not (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 13),
    reason="autograd's formulas and the composition of ops are those of the installed torch: as in 2.11 until 2.13",
)
@pytest.mark.timeout(900)
def test_ops_request_what_was_measured():
    measured = op_requests.read(op_requests.FILE)
    chosen = {part.rpartition("|")[0].split(" [")[0] for part in measured}
    marks = op_requests.Marks()
    tape = simulate(lambda: op_requests.run(marks, chosen.__contains__), gpu="H100", release="2.11")
    predicted = marks.parts(tape.size[tape.action == Action.ALLOC].tolist())
    compared = [part for part in measured if part in predicted]
    different = {part: (measured[part], predicted[part]) for part in compared if predicted[part] != measured[part]}
    unknown = {part: sizes for part, sizes in different.items() if _op(part) not in KNOWN}
    assert len(compared) > 0.95 * len(measured)
    assert unknown == {}
