"""Which variables are the program's: those around the failing call, whatever functions of libraries are in between."""

from __future__ import annotations

import pytest

from memexplore.out_of_memory.evidence_types import VariableUse
from tests.out_of_memory.cells import post_mortem

MODEL = """
import contextlib
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
history = []
while True:
    output = model(torch.randn(4096, 1024, device="cuda"))
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(output.detach())
"""
AROUND = {
    "a function": "def train():{loop}\ntrain()",
    "a decorator of torch": "@torch.enable_grad()\ndef train():{loop}\ntrain()",
    "a context manager as a decorator": """
@contextlib.contextmanager
def timed():
    yield

@timed()
def train():{loop}
train()
""",
    "a method of a module": """
class Model(nn.Module):
    def fit(self):{loop}

Model().fit()
""",
    "a closure of an optimizer": """
def train():{loop}
torch.optim.LBFGS([torch.zeros(1, requires_grad=True)]).step(train)
""",
}


@pytest.mark.parametrize("name", AROUND)
def test_variables_of_the_program_are_holders(name: str) -> None:
    loop = LOOP.replace("\n", "\n        " if "method" in name else "\n    ")
    found = post_mortem(MODEL + AROUND[name].format(loop=loop), "400MiB")
    holders = {holder.name: holder.use for holder in found.holders}
    assert holders["history"] is holders["output"] is VariableUse.NOT_REACHED, found.text
    assert found.suggestions[0].text.startswith("`history` keeps tensors of every step"), found.text


def test_variables_of_a_model_that_is_called_are_in_use() -> None:
    source = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))

    def forward(self, x):
        outputs = []
        for layer in self.layers:
            outputs.append(layer(x))
        return torch.cat(outputs)

model = Model().cuda()
x = torch.randn(4096, 1024, device="cuda")
{call}(x).sum().backward()
"""
    for call in ("model", "model.forward"):
        found = post_mortem(source.format(call=call), "200MiB")
        assert "outputs" not in {holder.name for holder in found.holders}, found.text
