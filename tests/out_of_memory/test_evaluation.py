"""Whether a model is evaluated or trained is judged by what has run, and growth by what survives an iteration."""

from __future__ import annotations

import textwrap

import pytest

from memexplore.out_of_memory.cause import Cause
from tests.out_of_memory.cells import post_mortem, run

FINE_TUNED = """
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda().eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    losses = []
    for part in range(4):
        loss = model(torch.randn(4096 * (1 + step), 1024, device="cuda")).square().mean()
        {backward}
    optimizer.step()
    optimizer.zero_grad()
"""
ACCUMULATED = FINE_TUNED.format(backward="loss.backward()")
TOGETHER = FINE_TUNED.format(backward="losses.append(loss) if part < 3 else sum([*losses, loss]).backward()")


@pytest.mark.parametrize(
    ("source", "gpu"),
    [(ACCUMULATED, "150MiB"), (ACCUMULATED, "350MiB"), (TOGETHER, "500MiB"), (TOGETHER, "900MiB")],
    ids=["its first pass", "its second step", "passes with one backward", "passes with one backward, second step"],
)
def test_a_model_that_is_trained_with_dropout_off_needs_its_graphs(source: str, gpu: str) -> None:
    found = post_mortem(source, gpu)
    assert not any("no_grad" in each.code for each in found.suggestions), found.text


EVALUATED = """
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda(){mode}
loader = [torch.zeros(1024, 1024, device="cpu") for _ in range(40)]
outputs = torch.cat([model(x.cuda()) for x in loader])
"""


@pytest.mark.parametrize("mode", ["", ".eval()"])
def test_outputs_of_an_evaluation_are_first_to_have_no_graphs(mode: str) -> None:
    source = EVALUATED.format(mode=mode)
    found = post_mortem(source, "370MiB")
    assert (found.cause, found.suggestions[0].fits) == (Cause.HELD, True), found.text
    assert found.suggestions[0].code.startswith("with torch.no_grad():"), found.text
    # 40 outputs of 4 MiB, and as much again where they are joined; with its graph a pass keeps 20 MiB.
    assert run(f"with torch.no_grad():\n{textwrap.indent(source, '    ')}", "370MiB")[1] is None


def test_outputs_without_a_graph_that_a_list_keeps_are_a_leak() -> None:
    source = """
model, results = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)]).cuda().eval(), []
for _ in range(400):
    results.append(model(torch.zeros(1024, 1024, device="cuda")).detach())
"""
    found = post_mortem(source, "300MiB")
    assert found.cause is Cause.LEAK, found.text
    assert found.suggestions[0].text.startswith("`results` keeps"), found.text


GENERATES = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(512, 1536)

    def forward(self, x, cache):
        query, key, value = self.project(x).chunk(3, -1)
        if cache is not None:
            key, value = torch.cat([cache[0], key], 1), torch.cat([cache[1], value], 1)
        return F.scaled_dot_product_attention(query, key, value), (key, value)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, caches):
        longer = []
        for block, cache in zip(self.blocks, caches):
            x, cache = block(x, cache)
            longer.append(cache)
        return x, longer

model, kept = Model().cuda().eval(), []
with torch.no_grad():
    x, caches = torch.zeros(64, 32, 512, device="cuda"), [None] * 4
    for _ in range(1000):
        x, caches = model(x, caches)
        {then}
"""


def test_keys_and_values_that_each_call_replaces_are_no_leak() -> None:
    found = post_mortem(GENERATES.format(then="pass"), "500MiB")
    assert found.cause is Cause.TOO_MUCH, found.text
    assert "make the whole before the loop" in found.suggestions[0].text
    assert not any("`caches` keep" in each.text for each in found.suggestions), found.text
    found = post_mortem(GENERATES.format(then="kept.append(caches)"), "2GiB")
    assert found.cause is Cause.LEAK, found.text
