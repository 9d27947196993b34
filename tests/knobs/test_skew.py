"""The knob `skew`: routing by unknown scores is even, or sends many tokens to the same experts."""

from __future__ import annotations

import torch
from torch import nn

from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knobs import Knobs, hidden_in
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.run import run
from memexplore.tape import Tape

TOKENS, EXPERTS, WIDTH, NARROW = 512, 8, 4096, 16
"""The scores are unknown: the weights of the gate, 128 KiB, are too large to be computed."""


rows: list[int] = []


class Experts(nn.Module):
    """Top-1 routing; `rows` gets the number of tokens of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, NARROW) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = self.gate(x).argmax(-1), x.new_zeros(TOKENS, NARROW)
        rows.clear()
        for number, expert in enumerate(self.experts):
            tokens = (chosen == number).nonzero().squeeze(-1)
            rows.append(len(tokens))
            if len(tokens):
                out = out.index_add(0, tokens, expert(x[tokens]))
        return out


def tape_with(**knobs: str) -> Tape:
    step = Step(Experts(), torch.zeros(TOKENS, WIDTH), compute_loss=lambda model, x: model(x).sum())
    return run(step, Knobs(**knobs), machine_of("T4")).tape


def rows_with(**knobs: str) -> list[int]:
    tape_with(**knobs)
    return list(rows)


def test_tokens_that_go_to_the_same_expert_are_as_many_as_the_knob_says() -> None:
    assert rows_with() == [TOKENS // EXPERTS] * EXPERTS
    # The middle expert gets half of the tokens, and its share of the others.
    assert rows_with(skew="half") == [32, 32, 32, 32, 256 + 32, 32, 32, 32]
    assert rows_with(skew="all") == [0, 0, 0, 0, TOKENS, 0, 0, 0]


def test_what_is_assumed_is_noted_with_its_line() -> None:
    (even,) = [note for note in tape_with().meta.notes if "unknown scores" in note]
    (uneven,) = [note for note in tape_with(skew="all").meta.notes if "unknown scores" in note]
    assert "is spread evenly over all candidates (" in even
    assert "is the same in 100% of the rows (" in uneven
    assert "test_skew.py:" in even


def test_explorer_shows_it_for_a_program_that_chooses_by_unknown_scores() -> None:
    dense = Step(nn.Linear(4, 4), torch.zeros(2, 4), compute_loss=lambda model, x: model(x).sum())
    machine = machine_of("T4")
    for tape, is_hidden in ((tape_with(), False), (run(dense, Knobs(), machine).tape, True)):
        assert ("skew" in hidden_in(Explored(machine, tape=tape))) == is_hidden
