"""Errors of ops that are computed on the CPU besides: those of their values, with which they end on a GPU too.

In: an op and its error on the CPU. Out: whether the program ends; with any other error the values are unknown.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from memexplore.virtual_gpu.dispatch import cpu_ops

_aten = torch.ops.aten

_ASSERTIONS = frozenset({_aten._assert_async.default, _aten._assert_async.msg, _aten._functional_assert_async.msg})
"""Ops that raise an error for values by design."""
_CHECKS_OF_VALUES = re.compile(
    "|".join(
        (
            r"index \S+ is out of bounds for dimension",  # gather, scatter: cuda/ScatterGatherKernel.cu
            "probability tensor contains either|invalid multinomial distribution",  # cuda/MultinomialKernel.cu
            "all elements of (input|target) should be between 0 and 1",  # binary_cross_entropy: cuda/Loss.cu
            "Expected p_in >= 0 && p_in <= 1",  # bernoulli: cuda/DistributionBernoulli.cu
            "Number of elements of source < number of ones in mask",  # masked_scatter: cuda/IndexKernel.cu
            "repeats can not be negative",  # repeat_interleave: cuda/Repeat.cu
            "only supports 1-d non-negative integral inputs",  # bincount: cuda/SummaryOps.cu
        )
    )
)
"""Messages of CPU kernels about values that end the program on a GPU too, most of them by a device-side assert; beside
each the file below aten/src/ATen/native."""


def ends_on_gpu(func: Any, error: Exception) -> bool:
    """Return whether an error of an op on the CPU is one of its values, with which it ends on a GPU too.

    An IndexError of a function of `cpu_ops.OPS`, or of an operator that is not torch's, is no check of an index.
    """
    if isinstance(error, torch.linalg.LinAlgError) or func in _ASSERTIONS:
        return True
    if isinstance(error, IndexError):
        return func.namespace == "aten" and func not in cpu_ops.OPS
    return isinstance(error, RuntimeError) and _CHECKS_OF_VALUES.search(str(error)) is not None
