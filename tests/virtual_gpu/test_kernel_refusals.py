"""Arguments that kernels refuse: a program that raises on a GPU raises on the virtual one, in torch's words.

Two sources: the inputs with errors of torch's own database of ops, and its ordinary inputs with one tensor of another
dtype or shape, for which the CPU says whether they are wrong.
"""

# ruff: noqa: E501, texts of torch
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

import memexplore as mx
from tests.virtual_gpu.every_op import database

ACCEPTED_ERROR_INPUTS = Counter(
    {
        # An `out` that overlaps the input, or of another dtype.
        "cat": 4,
        "take": 3,
        "index_select": 1,
        "kthvalue": 1,
        "bernoulli": 1,
        "aminmax": 1,
        "complex": 1,
        "as_strided_scatter": 1,  # a place outside of the storage, written by an op that copies
        "median": 1,  # a tensor of 25 dimensions
        # Torch's database expects errors that CUDA does not raise, or tensors where it passes numbers.
        "clamp_max": 1,
        "clamp_min": 1,
        "__rmod__": 1,
        "__rpow__": 1,
        "__rsub__": 1,
    }
)
"""Inputs with an error that the virtual GPU takes, by op. Of 690 it refuses all others."""
ACCEPTED_CALLS = Counter(
    {
        # Internal ops, which programs do not call with other dtypes.
        "_unsafe_masked_index_put_accumulate": 9,
        "_softmax_backward_data": 7,
        "_segment_reduce": 6,
        # The CPU takes other ways: a bias added by addmm for a vector, losses whose result is their input's dtype.
        "nn.functional.linear": 3,
        "nn.functional.soft_margin_loss": 2,
        "nn.functional.huber_loss": 1,
        # What is not checked: a new op of chunks, a bias of three dimensions, values, a row of targets too many.
        "nn.functional.linear_cross_entropy": 12,
        "addmm": 2,
        "lu_unpack": 1,
        "index_select": 1,
        "nn.functional.ctc_loss": 1,
    }
)
"""Calls that the CPU refuses and the virtual GPU takes, by op: 45 of 1 042."""
SKIPPED = ("linalg", "_refs", "special", "sparse", "jiterator", "masked", "signal", "nn.functional.instance_norm")
"""Ops that are not compared with the CPU: kinds that no model uses, and one whose CPU kernel crashes on such input."""
CPU_ONLY = ("not implemented for", "out of bounds", "out of range")
"""Parts of errors of the CPU alone: missing kernels, and values, which a virtual GPU does not know."""


def raised(work: Callable[[], object]) -> Exception | None:
    """Return the exception that a function raises."""
    try:
        work()
    except Exception as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore")
def test_inputs_with_errors_of_the_op_database_are_refused() -> None:
    accepted: Counter[str] = Counter()
    count = same = 0
    for op in database():
        if op.error_inputs_func is None:
            continue
        with mx.virtual("A100"):
            for case in op.error_inputs("cuda"):
                sample = case.sample_input
                error = raised(lambda op=op, sample=sample: op(sample.input, *sample.args, **sample.kwargs))
                count += 1
                if error is None:
                    accepted[op.name] += 1
                else:
                    same += isinstance(error, case.error_type) and bool(re.search(case.error_regex, str(error)))
    assert accepted - ACCEPTED_ERROR_INPUTS == Counter()
    assert count > 600  # 690 in torch 2.13
    assert same > 0.9 * count


def changed(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor with other dtypes and shapes."""
    if tensor.dtype is torch.float32:
        yield from (tensor.half(), tensor.double(), tensor.long())
    elif tensor.dtype is torch.int64:
        yield from (tensor.int(), tensor.float())
    else:
        return
    if tensor.dim():
        yield torch.cat([tensor, tensor])
    yield tensor[None]


@pytest.mark.filterwarnings("ignore")
def test_calls_that_the_cpu_refuses_are_refused() -> None:
    accepted: Counter[str] = Counter()
    refused = 0
    for op in database():
        if op.name.startswith(SKIPPED) or not op.supports_dtype(torch.float32, "cpu"):
            continue
        sample = next(iter(op.sample_inputs("cpu", torch.float32)), None)
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs) if sample else ())
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for place in places if len(places) > 1 else ():
            for other in changed(leaves[place].detach()):
                values = [*leaves[:place], other, *leaves[place + 1 :]]

                def call(device: str, values: list[Any] = values, op: Any = op, spec: Any = spec) -> object:
                    moved = [
                        value.detach().to(device) if isinstance(value, torch.Tensor) else value for value in values
                    ]
                    first, args, kwargs = tree_unflatten(moved, spec)
                    return op(first, *args, **kwargs)

                error = raised(lambda call=call: call("cpu"))
                if error is None or any(text in str(error) for text in CPU_ONLY):
                    continue
                refused += 1
                with mx.virtual("A100"):
                    if raised(lambda call=call: call("cuda")) is None:
                        accepted[op.name] += 1
    assert refused > 1000
    assert accepted - ACCEPTED_CALLS == Counter(), accepted


def half(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", dtype=torch.float16)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


def longs(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="cuda", dtype=torch.int64)


SENTENCES: dict[str, tuple[Callable[[], object], str]] = {
    "linear": (
        lambda: nn.Linear(4, 2).cuda().half()(ones(3, 4)),
        "mat1 and mat2 must have the same dtype, but got Float and Half",
    ),
    "matmul": (
        lambda: ones(3, 4) @ half(4, 2),
        "expected mat1 and mat2 to have the same dtype, but got: float != c10::Half",
    ),
    "batched product": (lambda: ones(2, 3, 4) @ half(2, 4, 2), "expected scalar type Float but found Half"),
    "matrix and vector": (
        lambda: ones(3, 4) @ half(4),
        "addmv input tensors must have the same dtype, but got Half, Float, and Half",
    ),
    "convolution": (
        lambda: F.conv2d(ones(1, 3, 8, 8), half(2, 3, 3, 3)),
        "Input type (float) and weight type (c10::Half) should be the same",
    ),
    "layer norm": (
        lambda: F.layer_norm(ones(8, 96), (64,)),
        "Given normalized_shape=[64], expected input with shape [*, 64], but got input of size[8, 96]",
    ),
    "layer norm in float16": (lambda: nn.LayerNorm(4).cuda()(half(2, 4)), "expected scalar type Half but found Float"),
    "batch norm": (lambda: F.batch_norm(ones(4, 3), ones(2), ones(2)), "running_mean should contain 3 elements not 2"),
    "classes": (
        lambda: F.cross_entropy(ones(4, 3), longs(4).int()),
        "expected target dtype to be Long or Byte, but got Int",
    ),
    "embedding": (
        lambda: F.embedding(ones(4), ones(9, 2)),
        "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got torch.cuda.FloatTensor instead (while checking arguments for embedding)",
    ),
    "attention": (
        lambda: F.scaled_dot_product_attention(half(1, 1, 4, 8), ones(1, 1, 4, 8), ones(1, 1, 4, 8)),
        "Expected query, key, and value to have the same dtype, but got query.dtype: c10::Half key.dtype: float and value.dtype: float instead.",
    ),
    "assignment": (
        lambda: ones(4, 2).__setitem__(longs(3), half(3, 2)),
        "Index put requires the source and destination dtypes match, got Float for the destination and Half for the source.",
    ),
    "assignment of another shape": (
        lambda: ones(4, 2).__setitem__(longs(3), ones(3, 1, 2)),
        "shape mismatch: value tensor of shape [3, 1, 2] cannot be broadcast to indexing result of shape [3, 2]",
    ),
    "sampling": (
        lambda: torch.multinomial(ones(3), 4),
        "cannot sample n_sample > prob_dist.size(-1) samples without replacement",
    ),
    "view": (
        lambda: torch.as_strided(ones(4), (5,), (1,)),
        "setStorage: sizes [5], strides [1], storage offset 0, and itemsize 4 requiring a storage size of 20 are out of bounds for storage of size 16",
    ),
    "lengths": (
        lambda: F.ctc_loss(ones(50, 2, 5), longs(2, 9), longs(2).cpu() + 60, longs(2).cpu() + 9),
        "Expected input_lengths to have value at most 50, but got value 60 (while checking arguments for ctc_loss_gpu)",
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_text_is_that_of_cuda(case: str) -> None:
    work, text = SENTENCES[case]
    with mx.virtual("T4"):
        assert str(raised(work)) == text


def test_mixed_precision_that_cuda_has_is_accepted() -> None:
    with mx.virtual("A100"):
        assert nn.BatchNorm2d(3).cuda()(half(2, 3, 4, 4)).dtype is torch.float16
        with torch.autocast("cuda"):
            assert nn.Linear(4, 2).cuda()(ones(3, 4)).dtype is torch.float16
            assert nn.LayerNorm(4).cuda()(half(3, 4)).dtype is torch.float32


def test_an_error_that_the_program_catches_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with mx.virtual("T4"):
        assert raised(lambda: F.pad(ones(1, 4, 4), (9, 9), mode="reflect")) is not None
    assert capfd.readouterr().err == ""
