"""`torch.compile` on the virtual GPU: compiled functions run eagerly, whatever stance the program sets."""

from __future__ import annotations

import pytest
import torch

import memexplore as mx

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile")


@pytest.mark.parametrize("stance", ["default", "fail_on_recompile", "eager_on_recompile"])
def test_a_stance_that_the_program_sets_compiles_nothing(stance: str) -> None:
    def run() -> list[torch.Tensor]:
        compiled = torch.compile(lambda tensor: tensor + 1)
        ones = torch.ones(3, device="cuda")
        with torch.compiler.set_stance(stance):
            inside = compiled(ones)
        decorated = torch.compiler.set_stance(stance)(lambda: compiled(ones))()
        torch.compiler.set_stance(stance)
        return [value.cpu() for value in (inside, decorated, compiled(ones))]

    with mx.virtual("T4"):
        assert [value.tolist() for value in run()] == [[2.0, 2.0, 2.0]] * 3


def test_the_stance_after_the_block_is_that_before_it() -> None:
    torch.compile(torch.sin)
    before = torch._dynamo.eval_frame._stance
    with mx.virtual("T4"):
        torch.compiler.set_stance("fail_on_recompile")
    assert torch._dynamo.eval_frame._stance == before
