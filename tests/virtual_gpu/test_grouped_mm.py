"""Grouped matrix products: shapes as on the CPU, requests as on CUDA."""

from __future__ import annotations

import pytest
import torch

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action, Category

GROUPS, ROWS, INNER, COLUMNS = 4, 32, 16, 20
# A row of 20 numbers of 2 bytes is padded to 48 bytes: 24 numbers.
FORMS = {
    "rows by groups": lambda new: (new(ROWS, INNER), new(GROUPS, COLUMNS, INNER).transpose(1, 2), True),
    "groups by columns": lambda new: (new(GROUPS, ROWS, INNER), new(COLUMNS, INNER).t(), True),
    "both in groups": lambda new: (new(ROWS, INNER), new(COLUMNS, INNER).t(), True),
    "batches": lambda new: (new(GROUPS, ROWS, INNER), new(GROUPS, COLUMNS, INNER).transpose(1, 2), False),
}


def multiply(form, device, dtype=torch.bfloat16):
    first, second, ragged = FORMS[form](lambda *shape: torch.ones(shape, device=device, dtype=dtype))
    ends = torch.arange(1, GROUPS + 1, dtype=torch.int32, device=device) * 4 if ragged else None
    return first, second, ends


def requests(form="rows by groups", gpu="A100", release="2.13", dtype=torch.bfloat16):
    """Return bytes and category of each request of a product."""
    with virtual(gpu, release=release):
        first, second, ends = multiply(form, "cuda", dtype)
        with record() as recording:
            result = torch._grouped_mm(first, second, offs=ends)
        del result
    tape = recording.tape
    chosen = tape.action == Action.ALLOC
    return list(zip(tape.size[chosen].tolist(), tape.category[chosen].tolist(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_result_has_the_shape_and_padding_of_torch_s_kernel(form, dtype):
    first, second, ends = multiply(form, "cpu", dtype)
    real = torch._grouped_mm(first, second, offs=ends)
    with virtual("A100"):
        first, second, ends = multiply(form, "cuda", dtype)
        result = torch._grouped_mm(first, second, offs=ends)
        assert (result.shape, result.stride(), result.dtype) == (real.shape, real.stride(), real.dtype)
        assert result.untyped_storage().nbytes() == real.untyped_storage().nbytes()


WORKSPACE = 2 * 4 * 1024**2 + 8 * 16 * 1024
"""Workspace of cuBLAS on an A100: cublas_workspace.cublas_size."""


def test_groups_are_multiplied_one_by_one_before_hopper():
    # 31 rows of 24 numbers and one of 20, 2 bytes each; cuBLAS keeps one workspace for all products
    (result, _), (workspace, category) = requests()
    assert (result, workspace, category) == ((31 * 24 + 20) * 2, WORKSPACE, Category.WORKSPACE)


def test_from_torch_2_15_on_each_group_allocates_and_frees_a_workspace():
    assert [size for size, _ in requests(release="2.15")[1:]] == GROUPS * [WORKSPACE]


def test_hopper_has_one_kernel_for_bfloat16():
    # 4 groups of three pointers, three strides and three 32-bit extents; then tensor maps for 132 multiprocessors
    (_, _), (described, _), (maps, category) = requests(gpu="H100")
    assert described == 4 * (3 * 8 + 3 * 8 + 3 * 4)
    assert (maps, category) == (5 * 128 * 132, Category.WORKSPACE)


def test_the_kernel_of_hopper_takes_bfloat16_only():
    assert len(requests(gpu="H100", dtype=torch.float16)) == 2


def _gradients(device, expanded):
    rows = torch.ones(ROWS, INNER, device=device, requires_grad=True)
    experts = torch.ones(GROUPS, INNER, COLUMNS, device=device, requires_grad=True)
    ends = torch.arange(1, GROUPS + 1, dtype=torch.int32, device=device) * 8
    result = torch._grouped_mm(rows, experts, offs=ends)
    result.backward(torch.ones(()).to(device).expand_as(result) if expanded else torch.ones_like(result))
    return [(gradient.shape, gradient.stride()) for gradient in (rows.grad, experts.grad)]


def test_gradients_are_grouped_products():
    real = _gradients("cpu", expanded=False)
    with virtual("A100"):
        assert _gradients("cuda", expanded=False) == real


def test_an_expanded_gradient_raises_the_error_of_torch():
    # The gradient of a sum has strides (0, 0): check_valid_strides_and_return_transposed
    with pytest.raises(RuntimeError, match="Invalid strides/sizes"):
        _gradients("cpu", expanded=True)
    with virtual("A100"), pytest.raises(RuntimeError, match="Invalid strides/sizes"):
        _gradients("cuda", expanded=True)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((8, 16), (2, 16, 5), "multiple of 16 bytes"),
        ((8, 8), (2, 16, 8), "contraction dimension"),
    ],
)
def test_arguments_that_cuda_refuses_raise_its_error(first, second, message):
    with virtual("A100"):
        ends = torch.ones(2, dtype=torch.int32, device="cuda")
        matrices = (torch.ones(shape, device="cuda") for shape in (first, second))
        with pytest.raises(RuntimeError, match=message):
            torch._grouped_mm(*matrices, offs=ends)


def test_different_dtypes_raise_an_error():
    with virtual("A100"):
        ends = torch.ones(2, dtype=torch.int32, device="cuda")
        rows, experts = torch.ones(8, 16, device="cuda"), torch.ones(2, 16, 8, device="cuda", dtype=torch.float16)
        with pytest.raises(RuntimeError, match="same dtype"):
            torch._grouped_mm(rows, experts, offs=ends)
