"""The source of a training loop among the cells of a notebook, and the code of explorers in a person's own lines."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from memexplore.jupyter import tabs
from memexplore.jupyter.own_source import own_code_of
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.programs.step import Step
from tests.jupyter.magics_shell import Shell

LOOP = """
net = torch.nn.Linear(8, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
def train_step(x, y):
    opt.zero_grad()
    cost = torch.nn.functional.cross_entropy(net(x), y)
    cost.backward()
    opt.step()
"""
CELL = """%%memprofile --gpu T4 --explore
net = torch.nn.Linear(1024, 1024).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    cost = net(torch.ones(4, 1024, device="cuda")).sum()
    cost.backward()
    opt.step()
"""


def step(model: Any) -> Step:
    return Step(model, (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)), loss=functional.cross_entropy)


def test_cell_with_a_loop_of_the_model_is_found(shell: Shell) -> None:
    shell.run(LOOP)
    shell.run("other = 1")
    own = own_code_of(step(shell.shell.user_ns["net"]))
    assert own is not None
    assert own.source.strip() == LOOP.strip()
    added = [line for line in tabs.code(None, Knobs(precision="bf16"), own)["diff"].split("\n") if line[0] == "+"]
    assert added == [
        '+     with torch.autocast("cuda", dtype=torch.bfloat16):',
        "+         cost = torch.nn.functional.cross_entropy(net(x), y)",
    ]


def test_loop_of_another_model_is_not_taken(shell: Shell) -> None:
    shell.run(LOOP)
    assert own_code_of(step(torch.nn.Linear(8, 3))) is None


def test_explored_cell_shows_its_own_lines(shell: Shell, explored: list[Any]) -> None:
    shell.run(CELL)
    (explorer,) = explored
    explorer.knobs = Knobs(precision="bf16")
    code = tabs.code(None, explorer.knobs, explorer._own)
    number = shell.shell.execution_count - 1
    assert code["diff"].startswith(f"@ Cell In[{number}], line 2\n")
    assert '+     with torch.autocast("cuda", dtype=torch.bfloat16):' in code["diff"].split("\n")
