"""Bytes of the workspaces that this release of torch keeps on a T4 for each thread with matrix products."""

from __future__ import annotations

import torch

from memexplore.virtual_gpu.device import release_of
from memexplore.virtual_gpu.kernels.cublas_workspace import cublaslt_size

CUBLAS = 8_519_680
CUBLASLT = cublaslt_size(release_of(torch.__version__), CUBLAS, {})
"""Kept where a product adds a bias, in torch 2.9 to 2.11."""
