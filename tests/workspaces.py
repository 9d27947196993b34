"""Workspaces of matrix products that this release of torch keeps on a T4, and an op whose workspace is an estimate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memexplore.tape import Action, Category, Tape
from memexplore.virtual_gpu import device
from memexplore.virtual_gpu.device import release_of
from memexplore.virtual_gpu.kernels import table
from memexplore.virtual_gpu.kernels.cublas_workspace import cublaslt_size
from memexplore.virtual_gpu.kernels.plan import OptionalScratch, Output, PossibleWorkspace, Requests, Scratch

CUBLAS = 8_519_680
CUBLASLT = cublaslt_size(release_of(torch.__version__), CUBLAS, {})
"""Kept where a product adds a bias, in torch 2.9 to 2.11; bytes, like `CUBLAS`, for each thread."""


def estimate_workspaces_of_relu(monkeypatch: pytest.MonkeyPatch, scratch_from: int | None = None) -> None:
    """Give `relu` a workspace as large as its output that may also be missing, or be twice as large.

    With `scratch_from` it has none, but may have one, and takes other scratch memory from so many bytes on.
    """

    def requests(args: Any, kwargs: Any, outputs: list[Any]) -> Requests:
        size = outputs[0].size
        if scratch_from is not None:
            return [Output(0), PossibleWorkspace((0, size)), *([Scratch(size)] if size >= scratch_from else [])]
        return [Output(0), PossibleWorkspace((size, 0, 2 * size)), OptionalScratch(size, Category.WORKSPACE)]

    monkeypatch.setattr(device, "_plans", {})  # they are kept for all runs of the process
    op, kind = torch.ops.aten.relu.default, table.Kind.REQUESTS
    monkeypatch.setitem(table.TABLE, op, table.TABLE.get(op, {}) | {kind: table.Entry(kind, requests, "a test")})


def possible_workspaces(tape: Tape) -> list[tuple[int, tuple[int, ...]]]:
    """Return size and possible workspaces of each request that may have one; no other row has one."""
    rows = tape.workspace >= 0
    assert set(tape.action[rows].tolist()) <= {Action.ALLOC}
    sizes = tape.size[rows].tolist()
    return [(size, tape.workspaces[number]) for size, number in zip(sizes, tape.workspace[rows].tolist(), strict=True)]
