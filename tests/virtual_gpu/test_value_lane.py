"""A value is what the CPU computes or unknown: after errors, through aliases and copies, under another setting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore.virtual_gpu.dispatch import cpu_ops
from memexplore.virtual_gpu.values import known_values

_aten = torch.ops.aten


@pytest.fixture(params=["known", "real"])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with mx.virtual("T4", values=request.param):
        yield "cuda"


def _unknown(count: int, device: str) -> torch.Tensor:
    """Return a tensor that was written to and whose values are unknown."""
    tensor = torch.ones(count, device=device)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(4 * count)
    return tensor


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "function"),
    [
        (RuntimeError, lambda x, i: x.gather(0, i)),
        (RuntimeError, lambda x, i: x.scatter_(0, i, 1.0)),
        (IndexError, lambda x, i: x.index_select(0, i)),
        (IndexError, lambda x, i: functional.embedding(i, x[:, None])),
        (RuntimeError, lambda x, i: functional.binary_cross_entropy(x - 2, x)),
        (RuntimeError, lambda x, i: torch.multinomial(x - 2, 1)),
        (RuntimeError, lambda x, i: torch.bernoulli(x - 2)),
        (RuntimeError, lambda x, i: torch.repeat_interleave(-i)),
        (RuntimeError, lambda x, i: torch.bincount(-i)),
        (RuntimeError, lambda x, i: x.masked_scatter_(x > 0, x[:1])),
        (RuntimeError, lambda x, i: torch._assert_async(x[0] - 1)),
        (torch.linalg.LinAlgError, lambda x, i: torch.linalg.inv(torch.diag(x - 1))),
        (torch.linalg.LinAlgError, lambda x, i: torch.linalg.cholesky(torch.diag(-x))),
    ],
)
def test_values_that_end_a_program_on_a_gpu_end_it(
    device: str, error: type[Exception], function: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    with pytest.raises(error):
        function(torch.ones(3, device=device), torch.tensor([5], device=device))


def test_a_division_by_zero_is_unknown_and_ends_no_program(device: str) -> None:
    # The CPU refuses it, CUDA does not.
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    assert not known_values.is_known(torch.ones_like(zero) // zero)


@pytest.mark.parametrize("error", [AttributeError, IndexError, KeyError, AssertionError, MemoryError])
def test_a_computation_that_fails_for_its_own_reasons_makes_values_unknown(
    device: str, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*args: Any) -> Any:
        raise error("no such attribute of a real tensor")

    monkeypatch.setitem(cpu_ops.OPS, _aten._softmax.default, fail)
    monkeypatch.setitem(cpu_ops.OPS, _aten.mul_.Tensor, fail)
    monkeypatch.setitem(cpu_ops.OPS, _aten.nonzero.default, fail)
    tensor = torch.ones(3, device=device)
    assert not known_values.is_known(tensor.softmax(0))
    assert tensor.nonzero().shape == (3, 1)
    tensor.mul_(tensor)
    assert not known_values.is_known(tensor)


def test_an_interrupted_computation_makes_what_it_writes_to_unknown(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(target: torch.Tensor, *args: Any) -> Any:
        target[0] = 9
        raise KeyboardInterrupt

    monkeypatch.setitem(cpu_ops.OPS, _aten.mul_.Tensor, interrupt)
    tensor = torch.ones(3, device=device)
    with pytest.raises(KeyboardInterrupt):
        tensor.mul_(2)
    assert not known_values.is_known(tensor)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.copy_(torch.zeros(3)),
        lambda x: x.view(2, 2).copy_(torch.zeros(3, device=x.device)),
        lambda x: torch._foreach_copy_([x], [torch.zeros(3, device=x.device)]),
    ],
)
def test_a_write_that_raises_an_error_leaves_an_unknown_tensor_unknown(
    device: str, write: Callable[[torch.Tensor], object]
) -> None:
    tensor = _unknown(4, device)
    with pytest.raises(RuntimeError):
        write(tensor)
    assert not known_values.is_known(tensor)


# --- aliases --------------------------------------------------------------------------------------------------------


def test_a_write_to_elements_that_overlap_leaves_the_others_unknown(device: str) -> None:
    # As many elements as the storage has, but the last one of the storage is not among them: 0, 1, 1, 2.
    tensor = _unknown(4, device)
    tensor.as_strided((2, 2), (1, 1)).fill_(3)
    assert not known_values.is_known(tensor)


def test_an_output_that_is_a_part_of_a_storage_leaves_the_rest_as_it_was(device: str) -> None:
    # The storage grows for the third element.
    tensor = torch.tensor([3.0, 4, 7], device=device)
    part = tensor[1:]
    torch.full((3,), 5.0, out=part)
    assert (tensor.tolist(), part.tolist()) == ([3, 5, 5], [5, 5, 5])


def test_a_list_of_targets_may_name_a_storage_twice(device: str) -> None:
    tensor, ones = torch.empty(2, 2, device=device), torch.ones(2, 2, device=device)
    torch._foreach_copy_([tensor, tensor.t(), tensor], [ones, ones * 2, ones * 3])
    assert tensor.tolist() == [[3, 3], [3, 3]]


def test_an_array_of_a_gpu_tensor_is_a_copy(device: str) -> None:
    tensor = torch.zeros(2, device=device)
    tensor.numpy(force=True)[0] = 5
    assert tensor.tolist() == [0, 0]


def test_conjugates_and_their_parts_are_views_with_the_values_of_the_cpu(device: str) -> None:
    def run(device: str) -> list[Any]:
        number = torch.tensor([1 + 2j, 3 - 1j], device=device)
        conjugate = number.conj()
        imaginary = conjugate.imag
        imaginary.add_(1)
        conjugate.mul_(1j)
        return [
            number.tolist(),
            conjugate.tolist(),
            imaginary.tolist(),
            (conjugate @ number).item(),
            imaginary.is_neg(),
        ]

    assert run(device) == run("cpu")


def test_a_storage_that_was_freed_and_allocated_again_is_unknown(device: str) -> None:
    tensor = torch.ones(3, device=device)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(12)
    assert not known_values.is_known(tensor)


# --- copies ---------------------------------------------------------------------------------------------------------


def test_a_shallow_copy_shares_the_storage(device: str) -> None:
    weight = nn.Parameter(torch.zeros(2, device=device))
    before = torch.cuda.memory_allocated()
    copied = copy.copy(weight)
    assert torch.cuda.memory_allocated() == before
    copied.data.add_(1)
    assert (weight.tolist(), isinstance(copied, nn.Parameter), copied.requires_grad) == ([1, 1], True, True)


def test_a_deep_copy_of_views_has_one_copy_of_their_whole_storage(device: str) -> None:
    base = torch.arange(1000, device=device)
    before = torch.cuda.memory_allocated()
    first, second = copy.deepcopy([base[:3], base[2:5]])
    assert torch.cuda.memory_allocated() - before == 8192  # 1000 * 8, in blocks of 512
    first[2] = 7
    assert (second.tolist(), base[2].item()) == ([7, 3, 4], 2)


# --- settings -------------------------------------------------------------------------------------------------------


def test_a_tensor_of_an_earlier_virtual_gpu_is_unknown_where_nothing_is_followed() -> None:
    with mx.virtual("T4"):
        tensor = torch.zeros(3, device="cuda")
    with mx.virtual("T4", values="none"):
        tensor.add_(1)
        assert not known_values.is_known(tensor)


@pytest.mark.parametrize("name", ["cauchy_", "exponential_", "geometric_", "log_normal_"])
def test_a_distribution_draws_from_the_users_generator(device: str, name: str) -> None:
    numbers = () if name != "geometric_" else (0.5,)
    draws = [
        getattr(torch.zeros(4, device=where), name)(*numbers, generator=torch.Generator(where).manual_seed(1)).tolist()
        for where in (device, device, "cpu")
    ]
    assert draws[0] == draws[1] == draws[2]


def test_second_derivatives_are_exact(device: str) -> None:
    # (x^3)'' = 6x
    assert torch.func.hessian(lambda x: (x**3).sum())(torch.ones(2, device=device)).tolist() == [[6, 0], [0, 6]]


def test_a_tensor_computed_with_an_unknown_number_is_unknown() -> None:
    with mx.virtual("T4"):
        unknown = torch.ones(300, 300, device="cuda").sum().item()  # 360 KB are more than a known float tensor has
        known = torch.arange(3, device="cuda")
        filled, written = torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda")
        filled.fill_(unknown)
        written[0] = unknown
        made = [known * unknown, torch.full((2,), unknown, device="cuda"), torch.tensor([unknown], device="cuda")]
        assert not any(known_values.is_known(tensor) for tensor in [filled, written, *made])
        assert known_values.is_known(known * 2)


def test_a_cpu_tensor_made_of_unknown_numbers_prints_as_virtual() -> None:
    with mx.virtual("T4"):
        loss = torch.ones(300, 300, device="cuda").sum().item()
        mean = torch.tensor([loss, loss]).mean()
        assert mean.device.type == "cpu"
        assert f"{mean.item():.3f}" == "virtual"
        assert torch.tensor([0.5, 1.5]).mean().item() == 1.0
