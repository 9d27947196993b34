"""Operators that take functions: `torch.cond`, `while_loop`, `scan`, and flex_attention, compiled and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._higher_order_ops import map, scan, while_loop
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from memexplore.recorder.recording import record
from memexplore.tape import Action
from tests.small import on_a_t4

ROWS, HEADS, WIDTH = 256, 2, 64
QUERY, NUMBERS, SCORES = HEADS * ROWS * WIDTH * 4, HEADS * ROWS * 4, HEADS * ROWS * ROWS * 4


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Any]:
    yield from on_a_t4()


def query() -> torch.Tensor:
    return torch.randn(1, HEADS, ROWS, WIDTH, device="cuda", requires_grad=True)


def causal() -> BlockMask:
    return create_block_mask(lambda b, h, row, column: row >= column, None, None, ROWS, ROWS)


def sizes(function: Callable[[], Any]) -> list[int]:
    with record() as recording:
        result = function()
    del result
    tape = recording.tape
    return tape.size[tape.action == Action.ALLOC].tolist()


def test_compiled_flex_attention_allocates_the_output_and_a_number_for_each_row() -> None:
    q, mask, attend = query(), causal(), torch.compile(flex_attention)
    assert sizes(lambda: attend(q, q, q, block_mask=mask)) == [QUERY, NUMBERS]


def test_its_backward_allocates_a_number_for_each_row_and_three_gradients() -> None:
    q, k, v = query(), query(), query()
    loss = torch.compile(flex_attention)(q, k, v, block_mask=causal()).sum()
    assert sizes(loss.backward) == [4, NUMBERS, QUERY, QUERY, QUERY]  # 4: the gradient of the loss


def test_without_compilation_it_holds_the_scores() -> None:
    q, mask = query(), causal()
    requests = sizes(lambda: flex_attention(q, q, q, block_mask=mask))
    assert requests.count(SCORES) >= 2


@pytest.mark.parametrize("module", [False, True])
def test_a_compiled_module_fuses_it(module: bool) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, mask: BlockMask) -> torch.Tensor:
            return flex_attention(q, q, q, block_mask=mask)

    layer: Any = Attention()
    if module:
        layer.compile()
    else:
        layer = torch.compile(layer)
    q, mask = query(), causal()
    assert SCORES not in sizes(lambda: layer(q, mask))


@pytest.mark.parametrize("compiled", [False, True])
def test_scores_may_use_tensors_of_the_program(compiled: bool) -> None:
    bias = torch.zeros(HEADS, device="cuda", requires_grad=True)
    attend: Any = torch.compile(flex_attention) if compiled else flex_attention
    q = query()
    output = attend(q, q, q, score_mod=lambda score, b, h, row, column: score + bias[h])
    output.sum().backward()
    assert output.shape == q.grad.shape
    assert bias.grad is not None


def test_the_output_lies_in_memory_as_the_query() -> None:
    q = torch.randn(1, ROWS, HEADS, WIDTH, device="cuda").transpose(1, 2)
    assert torch.compile(flex_attention)(q, q, q).stride() == q.stride() == flex_attention(q, q, q).stride()


def test_cond_runs_one_branch_and_trains_through_it() -> None:
    x = torch.ones(1000, device="cuda", requires_grad=True)
    result = torch.cond(torch.tensor(False), lambda x: torch.cat([x, x]), lambda x: x * 2, (x,))
    result.sum().backward()
    assert (result.shape, x.grad.shape) == ((1000,), (1000,))


def test_a_while_loop_runs_as_long_as_a_counter_on_the_cpu_says() -> None:
    count = torch.tensor(0)
    x = torch.ones(1000, device="cuda")
    requests = sizes(lambda: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (count, x)))
    assert requests == [4000] * 3


def test_map_stacks_the_outputs_of_a_function_of_each_row() -> None:
    rows = torch.arange(6.0, device="cuda").view(3, 2)
    assert map(lambda row: row * 2, rows).tolist() == (rows * 2).tolist()
    double, total = map(lambda row, more: (row * 2, row.sum() + more), rows, torch.ones((), device="cuda"))
    assert (double.tolist(), total.tolist()) == ((rows * 2).tolist(), [2, 6, 10])


def test_scan_stacks_the_outputs_of_all_rows() -> None:
    rows = torch.ones(5, 3, device="cuda")
    carried, outputs = scan(lambda carry, row: (carry + row, carry * row), torch.zeros(3, device="cuda"), rows)
    assert (carried.shape, outputs.shape) == ((3,), (5, 3))


def test_foreach_map_calls_its_function_on_each_tensor() -> None:
    module = pytest.importorskip("torch._higher_order_ops.foreach_map")
    ones = [torch.ones(256, device="cuda"), torch.ones(128, device="cuda")]
    assert sizes(lambda: module.foreach_map(torch.add, ones, ones)) == [1024, 512]  # of 256 and 128 numbers of 4 bytes
