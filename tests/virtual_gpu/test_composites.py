"""Composite ops by torch release: einsum's operands."""

import pytest
import torch

from memexplore.run.machine import virtual

EQUATIONS = [
    ("oi,...i->...o", (5, 7), (2, 3, 7)),
    ("oi,bsi->bso", (5, 7), (2, 3, 7)),
    ("kd,bqd->bqk", (1, 7), (2, 3, 7)),
    ("...qk,...kd->...qd", (2, 4, 3, 6), (2, 4, 6, 5)),
    ("bhd,bshd->bsh", (2, 4, 5), (2, 3, 4, 5)),
    ("dab,cd->bac", (2, 3, 4), (5, 2)),
]


@pytest.mark.parametrize(("equation", "first", "second"), EQUATIONS)
@pytest.mark.parametrize("release", ["2.6", "2.11"])
def test_einsum_gives_the_shape_of_its_equation(equation, first, second, release):
    expected = torch.einsum(equation, torch.ones(first), torch.ones(second)).shape
    with virtual("T4", release=release):
        result = torch.einsum(equation, torch.ones(first, device="cuda"), torch.ones(second, device="cuda"))
        assert result.shape == expected


def product(release: str) -> tuple[int, ...]:
    with virtual("T4", release=release):
        weight, x = torch.ones(5, 7, device="cuda"), torch.ones(2, 3, 7, device="cuda")
        return torch.einsum("oi,...i->...o", weight, x).stride()


def test_until_torch_2_8_einsum_never_swaps_its_operands():
    # weight times x transposed: (5, 6), seen as (2, 3, 5). Pull request 161755 came with 2.9.
    assert product("2.8") == (3, 1, 6)
    assert product("2.9") == (15, 5, 1)


def test_einsum_of_cpu_tensors_gives_values_while_a_virtual_gpu_is_on():
    weight, x = torch.randn(5, 7), torch.randn(2, 3, 7)
    expected = torch.einsum("oi,...i->...o", weight, x)
    with virtual("T4", release="2.6"):
        assert torch.equal(torch.einsum("oi,...i->...o", weight, x), expected)
