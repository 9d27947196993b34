"""Real ways to run out of memory, each with the cause, and a first suggestion with which the same cell fits."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest

from memexplore.hardware import catalogue
from memexplore.hardware.catalogue import Gpu
from memexplore.out_of_memory.cause import Cause
from tests.out_of_memory.cells import post_mortem, run

MLP = """
def mlp():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
"""


class Way(NamedTuple):
    """A cell that runs out of memory, and the change of its source that the first suggestion asks for."""

    source: str
    gpu: str
    cause: Cause
    suggestion: str
    """Part of the first suggestion or its code."""
    change: tuple[str, str]


WAYS = {
    "the batch is too large": Way(
        MLP
        + """
model, batch = mlp(), 16384
model(torch.randn(batch, 1024, device="cuda")).sum().backward()
""",
        "512MiB",
        Cause.TOO_MUCH,
        "smaller batch",
        ("16384", "4096"),
    ),
    "the sequence is long": Way(
        """
layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True).cuda()
model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
precision = torch.float32
with torch.autocast("cuda", torch.bfloat16, enabled=precision is torch.bfloat16):
    model(torch.randn(1, 24576, 256, device="cuda")).sum().backward()
""",
        "1.8GiB",
        Cause.TOO_MUCH,
        "mixed precision",
        ("precision = torch.float32", "precision = torch.bfloat16"),
    ),
    "a fully connected layer behind a feature map": Way(
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1)
        self.pool = nn.Identity()
        self.fc = nn.LazyLinear(128)
    def forward(self, x):
        return self.fc(self.pool(self.conv(x).relu()).flatten(1))
model = Net().cuda()
model(torch.randn(4, 3, 64, 64, device="cuda")).sum().backward()
torch.optim.Adam(model.parameters()).step()
""",
        "400MiB",
        Cause.TOO_MUCH,
        "the layer fc",
        ("nn.Identity()", "nn.AdaptiveAvgPool2d(1)"),
    ),
    "Adam's state at the first step": Way(
        MLP
        + """
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), foreach=False)
model(torch.randn(64, 1024, device="cuda")).sum().backward()
optimizer.step()
""",
        "70MiB",
        Cause.TOO_MUCH,
        "torch.optim.SGD",
        ("Adam(model.parameters(), foreach=False)", "SGD(model.parameters(), lr=0.1, foreach=False)"),
    ),
    "the temporaries of the foreach update": Way(
        """
model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for _ in range(2):
    model(torch.randn(64, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        "330MiB",
        Cause.TOO_MUCH,
        "foreach=False",
        ("foreach=True", "foreach=False"),
    ),
    "a second forward pass before the first graph is freed": Way(
        MLP
        + """
model = mlp()
first = model(torch.randn(4096, 1024, device="cuda")).sum()
# between
second = model(torch.randn(4096, 1024, device="cuda")).sum()
second.backward()
""",
        "230MiB",
        Cause.HELD,
        "first.backward()",
        ("# between", "first.backward()"),
    ),
    "the losses are summed with their graphs": Way(
        MLP
        + """
model, total_loss = mlp(), 0.0
for _ in range(8):
    loss = model(torch.randn(1024, 1024, device="cuda")).sum()
    total_loss += loss
""",
        "200MiB",
        Cause.LEAK,
        ".item()",
        ("+= loss", "+= loss.item()"),
    ),
    "outputs are kept in a list": Way(
        MLP
        + """
model, outputs = mlp(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    output = model(torch.randn(2048, 1024, device="cuda"))
    output.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    outputs.append(output)
""",
        "180MiB",
        Cause.LEAK,
        ".detach().cpu()",
        ("append(output)", "append(output.detach().cpu())"),
    ),
    "validation without no_grad": Way(
        MLP
        + """
import contextlib
model = mlp().eval()
with contextlib.nullcontext():
    for _ in range(3):
        output = model(torch.randn(4096, 1024, device="cuda"))
""",
        "180MiB",
        Cause.HELD,
        "with torch.no_grad():",
        ("contextlib.nullcontext()", "torch.no_grad()"),
    ),
    "fragmentation": Way(
        """
warm = [torch.empty(20 << 20, dtype=torch.uint8, device="cuda") for _ in range(10)]
del warm
blocks = [torch.empty(11 << 20, dtype=torch.uint8, device="cuda") for _ in range(10)]
large = torch.empty(80 << 20, dtype=torch.uint8, device="cuda")
kept = blocks, large
""",
        "220MiB",
        Cause.FRAGMENTATION,
        "expandable_segments:True",
        ("", ""),
    ),
    "another process on the GPU": Way(
        MLP
        + """
model = mlp()
model(torch.randn(4096, 1024, device="cuda")).sum().backward()
""",
        "shared",
        Cause.ANOTHER_PROCESS,
        "nvidia-smi",
        ("", ""),
    ),
    "autocast's cache of weights": Way(
        """
model = nn.Sequential(*[nn.Linear(4096, 4096, bias=False) for _ in range(8)]).cuda()
model.train()
with torch.autocast("cuda", torch.bfloat16, cache_enabled=True), torch.no_grad():
    model(torch.randn(64, 4096, device="cuda"))
""",
        "700MiB",
        Cause.HELD,
        "cache_enabled=False",
        ("cache_enabled=True", "cache_enabled=False"),
    ),
    "a retained graph": Way(
        """
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.randn(4096, 1024, device="cuda")).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
""",
        "330MiB",
        Cause.HELD,
        "without retain_graph=True",
        ("retain_graph=True", ""),
    ),
    "gradients are set to None only after the forward pass": Way(
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])
    def forward(self, x):
        scratch = torch.empty(160 << 20, dtype=torch.uint8, device="cuda")
        return self.layers(x)
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
for _ in range(2):
    # before
    loss = model(torch.randn(64, 2048, device="cuda")).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del loss
""",
        "275MiB",
        Cause.HELD,
        "optimizer.zero_grad(set_to_none=True)",
        ("# before", "optimizer.zero_grad(set_to_none=True)"),
    ),
    "an output of the notebook": Way(
        """
Out = {3: torch.empty(100 << 20, dtype=torch.uint8, device="cuda")}
x = torch.empty(60 << 20, dtype=torch.uint8, device="cuda")
""",
        "150MiB",
        Cause.HELD,
        "%memoom free --out",
        ("x =", "Out.clear(); x ="),
    ),
}


def _gpu(name: str) -> str | Gpu:
    if name == "shared":
        # 14 913 MiB of a T4, of which another process has all but 90 MiB
        t4 = catalogue.find("T4")
        return dataclasses.replace(t4, key="shared T4", outside=t4.total - (90 << 20), outside_range=(0, 0))
    return name


@pytest.mark.parametrize("name", WAYS)
def test_cause_and_first_suggestion(name: str) -> None:
    way = WAYS[name]
    found = post_mortem(way.source, _gpu(way.gpu))
    assert found.cause is way.cause, found.text
    first = found.suggestions[0]
    assert way.suggestion in f"{first.text}\n{first.code}", found.text
    assert len(found.sentences) <= 3


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.change[0]])
def test_cell_fits_with_the_first_suggestion(name: str) -> None:
    way = WAYS[name]
    assert way.change[0] in way.source
    tape, evidence = run(way.source.replace(*way.change), _gpu(way.gpu))
    assert evidence is None, evidence
    assert tape.peak()[0] > 0


def test_fragmented_cell_fits_with_expandable_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    way = WAYS["fragmentation"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert run(way.source, way.gpu)[1] is None


def test_cell_fits_without_the_other_process() -> None:
    assert run(WAYS["another process on the GPU"].source, "T4")[1] is None
