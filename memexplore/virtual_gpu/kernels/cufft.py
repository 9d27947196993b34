"""Request the memory of Fourier transforms in cuFFT.

Source: cuda/SpectralOps.cpp below aten/src/ATen/native.
"""

from __future__ import annotations

from typing import Any

import torch

from memexplore.virtual_gpu.kernels.plan import (
    Requests,
    Scratch,
    nbytes,
    new_outputs,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule

_aten = torch.ops.aten

_FFT_DIMS = 3
"""cufft_max_ndim in cuda/SpectralOps.cpp."""


def _in_one_transform(dims: Any) -> bool:
    """Return whether cuFFT transforms all dimensions at once: use_optimized_cufft_path in cuda/SpectralOps.cpp."""
    return len(dims) <= _FFT_DIMS and not (len(dims) >= 2 and list(dims[:2]) == [0, 1])


def _rearranged(source: torch.Tensor, dims: Any) -> Requests:
    """A copy with the transformed dimensions last, where they are not: _exec_fft in cuda/SpectralOps.cpp."""
    rank = source.dim()
    last = [dim % rank for dim in dims]
    others = sorted((dim for dim in range(rank) if dim not in last), key=lambda dim: (-source.stride()[dim], dim))
    ordered = torch.empty_strided(source.shape, source.stride(), device="meta").permute(*others, *last)
    try:
        ordered.view(-1, *(source.shape[dim] for dim in last))
    except RuntimeError:
        return [Scratch(nbytes(source))]
    return []


@rule(Kind.REQUESTS, "cuda/SpectralOps.cpp", _aten._fft_r2c.default)
def real_to_complex(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """_fft_r2c: a second buffer for transforms of further dimensions (_fft_r2c_cufft in cuda/SpectralOps.cpp)."""
    if not outputs[0].size:
        return None
    further = _rearranged(args[0], args[1] if _in_one_transform(args[1]) else args[1][-1:])
    if not _in_one_transform(args[1]):
        further.append(Scratch(outputs[0].size))
    return [*new_outputs(outputs), *further] if further else None


@rule(Kind.REQUESTS, "cuda/SpectralOps.cpp", _aten._fft_c2r.default)
def complex_to_real(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """_fft_c2r: a copy of the input, which cuFFT overwrites (_fft_c2r_cufft in cuda/SpectralOps.cpp)."""
    copy = nbytes(args[0])
    if not copy:
        return None
    return [*new_outputs(outputs), Scratch(copy), *_rearranged(args[0], args[1])]


@rule(Kind.REQUESTS, "cuda/SpectralOps.cpp", _aten._fft_c2c.default)
def complex_to_complex(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """_fft_c2c: a copy of input whose dimensions are in another order (_fft_c2c_cufft in cuda/SpectralOps.cpp)."""
    copy = _rearranged(args[0], args[1][-_FFT_DIMS:]) if args[1] and outputs[0].size else []
    return [*new_outputs(outputs), *copy] if copy else None
