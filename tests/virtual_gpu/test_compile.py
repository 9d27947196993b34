"""`torch.compile` on the virtual GPU: compiled functions run eagerly, whatever stance the program sets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

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


def _notes(run: Callable[[], object]) -> tuple[str, ...]:
    with mx.virtual("T4"), mx.record() as recording:
        run()
    return recording.tape.meta.notes


def _attention(compiled: bool) -> None:
    query = torch.ones(1, 2, 128, 16, device="cuda")
    attention = torch.compile(flex_attention) if compiled else flex_attention
    attention(query, query, query)


def test_what_is_compiled_and_never_runs_makes_no_note() -> None:
    def run() -> None:
        @torch.compile(dynamic=False)
        def function(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        torch.compile(torch.nn.Linear(3, 3))
        torch.nn.Linear(3, 3).compile()
        torch.compile(torch.sin, disable=True)(torch.ones(3, device="cuda"))

    assert _notes(run) == ()


def test_compiled_code_that_runs_makes_one_note_with_the_line() -> None:
    compiled = torch.compile(torch.sin)

    def run() -> None:
        x = torch.ones(3, device="cuda")
        for function in (torch.compile(torch.cos), compiled):
            function(x)

    (note,) = _notes(run)
    line = run.__code__.co_firstlineno + 3
    assert note.startswith("assumed: torch.compile runs the eager code, ")
    assert note.endswith(f"({__file__}:{line})")


def test_a_function_that_was_compiled_before_is_noted_too() -> None:
    compiled = torch.compile(torch.sin)
    (note,) = _notes(lambda: compiled(torch.ones(3, device="cuda")))
    assert "torch.compile runs the eager code" in note


def test_a_module_that_compiles_itself_is_noted_when_it_runs() -> None:
    module = torch.nn.Linear(3, 3)

    def run() -> None:
        module.cuda().compile()
        module(torch.ones(1, 3, device="cuda"))

    assert [note.partition(",")[0] for note in _notes(run)] == ["assumed: torch.compile runs the eager code"]


@pytest.mark.parametrize("compiled", [False, True])
def test_what_torch_compiles_by_itself_makes_no_note(compiled: bool) -> None:
    notes = _notes(lambda: _attention(compiled))
    assert any("torch.compile runs" in note for note in notes) is compiled
