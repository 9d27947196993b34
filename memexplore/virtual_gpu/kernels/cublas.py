"""Request the memory of matrix products: copies of operands that cuBLAS cannot read, and workspaces of a call.

cublas_workspace.py has the workspaces that a handle keeps. Grouped products multiply all experts of a mixture at once;
their requests do not depend on how the rows are distributed over the groups. Sources are below aten/src/ATen/native
unless they say otherwise.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch

from memexplore.tape import Category
from memexplore.virtual_gpu.kernels import cuda_build
from memexplore.virtual_gpu.kernels.composite_dispatch import decomposed
from memexplore.virtual_gpu.kernels.cublas_workspace import (
    EPILOGUE,
    NONE,
    PRODUCT,
    Library,
    Workspaces,
    cublas_size,
)
from memexplore.virtual_gpu.kernels.plan import (
    Free,
    NewTensor,
    Output,
    Plan,
    Requests,
    Scratch,
    argument,
    is_contiguous,
    nbytes,
    new_outputs,
)
from memexplore.virtual_gpu.kernels.table import Kind, rule
from memexplore.virtual_gpu.values import notes

_aten = torch.ops.aten

_PRODUCTS = [
    *(_aten.mm.default, _aten.bmm.default, _aten.mv.default, _aten.dot.default, _aten.vdot.default),
    *(_aten.baddbmm.default, _aten.baddbmm_.default, _aten.addbmm.default, _aten.addmv.default),
]
_BIASED_PRODUCTS = [_aten.addmm.default, _aten.addmm_.default, _aten._addmm_activation.default]


@rule(Kind.TF32, "cuda/Blas.cpp", *_PRODUCTS, *_BIASED_PRODUCTS)
def tf32_allowed_in_matmul() -> bool:
    """Return whether matrix products may: not by default."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


# --- workspaces -----------------------------------------------------------------------------------------------------


@rule(Kind.CUBLAS, "cuda/Blas.cpp", *_PRODUCTS)
def product_workspace(
    args: Any, kwargs: Any, requests: Requests | None, outputs: list[Any], workspaces: Workspaces
) -> tuple[Requests | None, tuple[Library, ...]]:
    """Return an op's requests with a transient workspace, and the libraries whose workspaces its thread must have."""
    if not workspaces.transient:
        return requests, PRODUCT
    return [*(requests or new_outputs(outputs)), Scratch(workspaces.size, Category.WORKSPACE)], NONE


def has_epilogue(args: Any, kwargs: Any) -> bool:
    """Return whether cuBLASLt adds the bias of an addmm (addmm_out_cuda_impl in cuda/Blas.cpp).

    Not where the second matrix has one row or column; a first matrix of one row does not matter.
    """
    bias, _, second = args[:3]
    if bias.dim() != 1 or not bias.is_contiguous():
        return False
    return min(second.shape) > 1 and kwargs.get("beta", 1) == 1


@rule(Kind.CUBLAS, "cuda/Blas.cpp", *_BIASED_PRODUCTS)
def biased_product_workspaces(
    args: Any, kwargs: Any, requests: Requests | None, outputs: list[Any], workspaces: Workspaces
) -> tuple[Requests | None, tuple[Library, ...]]:
    """addmm: as `product_workspace`; with an epilogue cuBLASLt's workspace too."""
    requests, libraries = product_workspace(args, kwargs, requests, outputs, workspaces)
    return requests, EPILOGUE if libraries and has_epilogue(args, kwargs) else libraries


# --- copies of operands ---------------------------------------------------------------------------------------------


def _copies(args: Sequence[Any], outputs: list[Any]) -> Requests:
    """Copies of operands that cuBLAS cannot read as row-major or column-major, such as an expanded gradient.

    Source: prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas in cuda/Blas.cpp; order as recorded with torch
    2.6.
    """
    copies: Requests = []
    for tensor in args:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            continue
        rows, columns = tensor.shape[-2:]
        down, right = tensor.stride()[-2:]
        by_column = down == 1 and right >= max(1, rows)
        by_row = right == 1 and down >= max(1, columns)
        dense = tensor.is_contiguous() or (tensor.dim() == 2 and is_contiguous(tensor, (1, 0)))
        if not (by_column or by_row or (dense and 0 not in (down, right))):
            copies.append(Scratch(nbytes(tensor)))
    return [*new_outputs(outputs), *copies] if copies else []


@rule(Kind.REQUESTS, "cuda/Blas.cpp", _aten.mm.default, _aten.bmm.default)
def two_operands(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """mm and bmm: copies of their operands."""
    return _copies(args[:2], outputs) or None


@rule(Kind.REQUESTS, "cuda/Blas.cpp", _aten.baddbmm.default)
def added(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """baddbmm, and addmm without an epilogue: copies of the second and third argument."""
    return _copies(args[1:3], outputs) or None


@rule(Kind.REQUESTS, "cuda/Blas.cpp", _aten.addmm.default, _aten._addmm_activation.default)
def with_bias(args: Any, kwargs: Any, outputs: list[Any]) -> Requests | None:
    """addmm with a bias, which cuBLASLt's epilogue adds: until torch 2.8 with a workspace of 1 MiB for the call.

    Source: gemm_and_bias in aten/src/ATen/cuda/CUDABlas.cpp. The 1 MiB as recorded with torch 2.1 and 2.2. Later
    releases keep a workspace (`cublas_workspace.cublaslt_size`).
    """
    if cuda_build.current().release >= (2, 9) or not has_epilogue(args, kwargs):
        return added(args, kwargs, outputs)
    copies = _copies(args[1:3], outputs) or new_outputs(outputs)
    return [*copies, Scratch(1024**2, Category.WORKSPACE)]


# --- grouped products: cuda/GroupedBlas.cpp, GroupedMMUtils.h, cuda/GroupMM.cu --------------------------------------

GROUPED_NOTE = "the workspace of a fused grouped matrix product is an estimate: 640 bytes for each multiprocessor"

_GROUPED_TYPES = (torch.bfloat16, torch.float32, torch.float16)


def _check_strides(matrix: torch.Tensor) -> None:
    """Raise RuntimeError unless rows or columns start at multiples of 16 bytes.

    Source: check_valid_strides_and_return_transposed.
    """
    (rows, columns), (down, right) = matrix.shape[-2:], matrix.stride()[-2:]
    if down == 1 and right >= max(1, rows):
        leading = right
    elif right == 1 and down >= max(1, columns):
        leading = down
    else:
        raise RuntimeError(
            f"Invalid strides/sizes, got {list(matrix.stride())} for strides and {list(matrix.shape)} for sizes"
        )
    if leading * matrix.dtype.itemsize % 16:
        raise RuntimeError("strides should be multiple of 16 bytes")


def _grouped_output(first: torch.Tensor, second: torch.Tensor, groups: int) -> NewTensor:
    """Return the output, each row padded to a multiple of 16 bytes: create_grouped_gemm_output_tensor."""
    columns = second.shape[-1]
    aligned = 16 // first.dtype.itemsize
    padded = -(-columns // aligned) * aligned
    rows = first.shape[-2]
    shape: tuple[int, ...] = (rows, columns)
    stride: tuple[int, ...] = (padded, 1)
    if first.dim() == second.dim():
        shape, stride = (groups, rows, columns), (rows * padded, padded, 1)
    # empty_strided allocates up to the last element, without the padding of the last row.
    count = sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True)) + 1 if 0 not in shape else 0
    return NewTensor(shape, stride, 0, first.dtype, count * first.dtype.itemsize, False)


@rule(Kind.PLAN, "cuda/GroupedBlas.cpp", _aten._grouped_mm.default)
def grouped_product(args: Any, kwargs: Any) -> Plan:
    """_grouped_mm: one kernel for bfloat16 on Hopper and Blackwell (9.0, 10.0), else one product per group."""
    first, second = args[:2]
    offsets = argument(args, kwargs, 2, "offs")
    for matrix in (first, second):
        if matrix.dtype not in _GROUPED_TYPES:
            raise RuntimeError(f"Expected Float32, BFloat16 or Float16 matrix, got {matrix.dtype}")
        _check_strides(matrix)
    if first.dtype is not second.dtype:
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {first.dtype} != {second.dtype}")
    ragged = first.dim() == 2 or second.dim() == 2
    if not (first.dim() == second.dim() == 2) and first.shape[-1] != second.shape[-2]:
        raise RuntimeError("contraction dimension of mat_a and mat_b must match")
    if (offsets is not None) != ragged:
        raise RuntimeError("Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d")
    groups = offsets.shape[0] if offsets is not None else first.shape[0]
    output = _grouped_output(first, second, groups)
    rules = cuda_build.current()
    if first.dtype is torch.bfloat16 and rules.compute_capability in ((9, 0), (10, 0)):
        notes.add(GROUPED_NOTE)
        even = -(-groups // 2) * 2
        # Per group: three pointers, three 32-bit extents, three strides of 8 bytes.
        problems = even * 3 * 8 + groups * 3 * 4 + groups * 3 * 8
        # Tensor maps of 128 bytes for two operands and the epilogue, for each multiprocessor.
        workspace = 5 * 128 * rules.multiprocessors
        fused: Requests = [Output(0), Scratch(problems), Scratch(workspace, Category.WORKSPACE)]
        return Plan([output], None, fused)
    if rules.release < (2, 15):
        return Plan([output], None, libraries=PRODUCT)
    # _grouped_mm_fallback multiplies the groups one after the other, each with a transient workspace.
    size = cublas_size(rules.compute_capability, rules.release)
    workspaces = ((Scratch(size, Category.WORKSPACE), Free(number)) for number in range(groups))
    return Plan([output], None, [Output(0), *(request for pair in workspaces for request in pair)])


# --- composite ops: Linear.cpp --------------------------------------------------------------------------------------


@rule(Kind.COMPOSITE, "Linear.cpp", _aten.linear.default)
def linear(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Add the bias in place where bias and product are not a single addmm: Linear.cpp."""
    if bias is None or tensor.dim() == 2 or (tensor.dim() == 3 and tensor.is_contiguous()) or weight.dim() != 2:
        return decomposed(_aten.linear.default, tensor, weight, bias)
    return torch.matmul(tensor, weight.t()).add_(bias)


@rule(Kind.COMPOSITE, "Linear.cpp", _aten.einsum.default)
def einsum(equation: str, operands: list[torch.Tensor], *, path: list[int] | None = None) -> torch.Tensor:
    """Swap no operands until torch 2.8: sumproduct_pair in Linear.cpp, pull request 161755.

    The installed C++ swaps them where all dimensions that only the second operand has come first in the result. With
    the dimensions of the first operand in front it does not swap, and a view restores the order of the result.
    """
    labels = None if cuda_build.current().release >= (2, 9) or len(operands) != 2 else _labels(equation, operands)
    if labels is None:
        return decomposed(_aten.einsum.default, equation, operands, path=path)
    (first, second), result = labels
    pairs = zip((first, second), operands, strict=True)
    sizes = [dict(zip(names, operand.shape, strict=True)) for names, operand in pairs]
    first_only = [label for label in result if sizes[0].get(label, 1) != 1 and sizes[1].get(label, 1) == 1]
    order = first_only + [label for label in result if label not in first_only]
    ordered = f"{''.join(first)},{''.join(second)}->{''.join(order)}"
    return decomposed(_aten.einsum.default, ordered, operands).permute([order.index(label) for label in result])


def _labels(equation: str, operands: list[torch.Tensor]) -> tuple[list[list[str]], list[str]] | None:
    """Return the labels of an equation's operands and result, with letters for ellipses.

    None for an equation without a result, with a diagonal, or with another number of operands.
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    explicit = [names.replace("...", "") for names in inputs.split(",")]
    if not arrow or len(explicit) != len(operands) or any(len(set(names)) < len(names) for names in explicit):
        return None
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    ellipsis_dims = [tensor.dim() - len(names) for tensor, names in zip(operands, explicit, strict=True)]
    if max(ellipsis_dims) > len(unused):
        return None
    letters = unused[: max(ellipsis_dims)]

    def expand(names: str, count: int) -> list[str]:
        return list(names.replace("...", "".join(letters[len(letters) - count :])))

    operand_labels = [expand(*pair) for pair in zip(inputs.split(","), ellipsis_dims, strict=True)]
    return operand_labels, expand(result, len(letters))
