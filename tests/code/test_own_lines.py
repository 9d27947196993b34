"""A person's own code with the lines of knobs: it keeps their names, runs, and requests what the knobs request."""

from __future__ import annotations

import difflib
import functools
import os
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import memexplore as mx
from memexplore.run.code.own_code import OwnCode
from memexplore.run.code.own_lines import changed_source
from memexplore.run.code.own_loop import Unclear
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_run import traced
from memexplore.tape import Tape
from tests.code.test_lines_tapes import rows

SAMPLES, STEPS = 64, 2


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment: lines of allocator settings change it when they run."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class Blocks(nn.Module):
    """Twelve equal blocks with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"h": nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(12))}
        )
        self.head = nn.Linear(32, 3)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.transformer["h"]:
            value = block(value)
        return self.head(value)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 32), torch.randint(3, (SAMPLES,))


PLAIN = """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for images, labels in loader:
    out = net(images)
    cost = F.cross_entropy(out, labels)   # the loss
    cost.backward()
    opt.step()
    opt.zero_grad()
"""
INLINE = """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for images, labels in loader:
    F.cross_entropy(net(images), labels).backward()
    opt.step()
    opt.zero_grad()
"""
FUNCTION = '''
opt = torch.optim.SGD(net.parameters(), lr=0.1)

def train_step(network, images, labels):
    """One step.

    Of training.
    """
    cost = F.cross_entropy(network(images), labels)
    cost.backward()
    opt.step()
    opt.zero_grad()

for images, labels in loader:
    train_step(network=net, images=images, labels=labels)
'''
MAIN = """
def main(network):
    opt = torch.optim.SGD(network.parameters(), lr=0.1)
    for epoch in range(1):
        for images, labels in loader:
            cost = F.cross_entropy(network(images), labels)
            cost.backward()
            opt.step()
            opt.zero_grad()
    return opt

opt = main(net)
"""
SCALED = """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
grad_scaler = torch.amp.GradScaler("cuda")
for images, labels in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        cost = F.cross_entropy(net(images), labels)
    grad_scaler.scale(cost).backward()
    grad_scaler.step(opt)
    grad_scaler.update()
    opt.zero_grad()
"""
SOURCES = {"plain": PLAIN, "inline": INLINE, "function": FUNCTION, "main": MAIN}
KNOBS = [
    Knobs(precision="bf16"),
    Knobs(precision="fp16"),
    Knobs(accumulation=4),
    Knobs(accumulation=4, precision="fp16"),
    Knobs(accumulation=2, precision="bf16", optimizer="AdamW"),
    Knobs(optimizer="Adam", update="fused"),
    Knobs(update="foreach"),
    Knobs(zero_grad="set to zero"),
    Knobs(offload="saved tensors on the CPU"),
    Knobs(frozen=("0",)),
    Knobs(checkpoint="layers 0"),
    Knobs(lora=("0",), precision="bf16"),
    Knobs(settings="max_split_size_mb:64"),
]


def requests(tape: Tape) -> list[tuple[str, int]]:
    """Return the sizes requested in order. When a tensor dies depends on the names of the code."""
    return [row for row in rows(tape) if row[0] == "ALLOC"]


def step_of(model: nn.Module) -> Step:
    return Step(model, batch(), loss=functional.cross_entropy, optimizer=functools.partial(torch.optim.SGD, lr=0.1))


def ran(source: str, model: nn.Module, loader: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """Run a source on a virtual GPU; return the rows of its tape, and its names."""
    with mx.virtual("T4"), mx.record() as recording:
        names: dict[str, Any] = {"torch": torch, "F": functional, "net": model.to("cuda")}
        names["loader"] = loader or (tuple(part.to("cuda") for part in batch()) for _ in range(STEPS))
        exec(source, names)
    kept = dict(names)
    names.clear()
    return requests(recording.tape), kept


def changed(source: str, knobs: Knobs, model: nn.Module) -> str:
    return changed_source(OwnCode(source, {"net": model, "torch": torch, "F": functional}), knobs)


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_changed_source_requests_what_the_knobs_request(source: str, knobs: Knobs) -> None:
    expected = requests(traced(step_of(small()), knobs, machine_of()).tape)
    model = small()
    assert ran(changed(source, knobs, model), model)[0] == expected


@pytest.mark.parametrize("knobs", [Knobs(precision="bf16"), Knobs(precision="fp16", accumulation=4)], ids=str)
def test_autocast_and_scaler_of_the_code_are_kept(knobs: Knobs) -> None:
    model = small()
    text = changed(SCALED, knobs, model)
    assert text.count("autocast") == text.count("GradScaler") == text.count("backward()") == 1
    assert ("torch.bfloat16" in text) == (knobs.precision.value == "bf16")
    ran(text, model)


def test_only_the_lines_that_change_are_changed() -> None:
    before, after = PLAIN.split("\n"), changed(PLAIN, Knobs(precision="fp16"), small()).split("\n")
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    assert [f"{line[0]} {line[1:]}" for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")] == [
        '+ scaler = torch.amp.GradScaler("cuda")',
        "-     out = net(images)",
        "-     cost = F.cross_entropy(out, labels)   # the loss",
        "-     cost.backward()",
        "-     opt.step()",
        '+     with torch.autocast("cuda", dtype=torch.float16):',
        "+         out = net(images)",
        "+         cost = F.cross_entropy(out, labels)   # the loss",
        "+     scaler.scale(cost).backward()",
        "+     scaler.step(opt)",
        "+     scaler.update()",
    ]


def test_batch_size_is_changed_where_it_is_written() -> None:
    source = """
    from torch.utils.data import DataLoader, TensorDataset
    batch_size = 16  # samples
    loader = DataLoader(TensorDataset(torch.ones(64, 32), torch.zeros(64, dtype=torch.long)), batch_size=batch_size)
    """
    source = textwrap.dedent(source) + PLAIN.replace("net(images)", "net(images.cuda())").replace(
        "labels)   #", "labels.cuda())   #"
    )
    model = small()
    text = changed(source, Knobs(batch=32), model)
    assert text == source.replace("batch_size = 16", "batch_size = 32")
    ran(text, model)
    inline = source.replace("batch_size=batch_size", "batch_size=8")
    assert changed(inline, Knobs(batch=4), model) == source.replace("batch_size=batch_size", "batch_size=4")


def test_checkpoints_of_repeated_blocks_are_a_loop_over_the_persons_model() -> None:
    model = Blocks()
    text = changed(PLAIN, Knobs(checkpoint="every 1"), model)
    assert "for block in net.transformer.h:" in text
    assert ran(text, model)[0] == requests(traced(step_of(Blocks()), Knobs(checkpoint="every 1"), machine_of()).tape)


def test_gradients_are_unscaled_before_they_are_clipped() -> None:
    source = PLAIN.replace("    opt.step()", "    nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n    opt.step()")
    model = small()
    text = changed("from torch import nn\n" + source, Knobs(precision="fp16"), model)
    assert text.index("scaler.unscale_(opt)") < text.index("clip_grad_norm_")
    ran(text, model)


def test_variable_of_a_cell_gets_its_value() -> None:
    source = "size = 8\nx = torch.ones(size)\n"
    assert changed_source(OwnCode(source), Knobs(variables={"size": 16})) == source.replace("8", "16")


@pytest.mark.parametrize(
    ("source", "knobs", "reason"),
    [
        ("x = 1\n", Knobs(precision="bf16"), "no call of backward"),
        (PLAIN + PLAIN, Knobs(precision="bf16"), r"calls backward\(\) 2 times"),
        (PLAIN.replace("net(", "self.net("), Knobs(precision="bf16"), "no call of a known model"),
        (PLAIN.replace("cost.backward()", "accelerator.backward(cost)"), Knobs(precision="bf16"), "a library"),
        (PLAIN, Knobs(batch=4), "that of one DataLoader"),
        (PLAIN, Knobs(update="in backward"), "update in the backward pass"),
        (PLAIN, Knobs(mode="inference"), "without training"),
        (PLAIN + "    print(len(images))\n", Knobs(accumulation=2), "uses images again"),
        (PLAIN.replace("images, labels in loader", "_ in range(2)"), Knobs(accumulation=2), "a new batch in each step"),
        (PLAIN.replace("    opt.step()", "    if True:\n        opt.step()"), Knobs(accumulation=2), "after every"),
        ("block = 4\n" + PLAIN, Knobs(checkpoint="layers 0"), "would change its name block"),
        ("%time x\n", Knobs(precision="bf16"), "no plain Python"),
    ],
)  # fmt: skip
def test_what_is_not_clear_is_said(source: str, knobs: Knobs, reason: str) -> None:
    with pytest.raises(Unclear, match=reason):
        changed(source, knobs, small())


def test_a_cell_with_checkpoints_may_be_run_again() -> None:
    calls = 0

    class Layer(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return super().forward(value).relu()

    net = nn.Sequential(*(nn.Sequential(Layer(8, 8)) for _ in range(4)))
    cell = """\
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    loss = net(torch.ones(2, 8)).sum()
    loss.backward()
    optimizer.step()
"""
    names = {"torch": torch, "net": net}
    changed = changed_source(OwnCode(cell, names), Knobs(checkpoint="every 1"))
    for _ in range(2):
        calls = 0
        exec(changed, names)
        # Two steps, in which each of 4 layers runs in the forward pass and once more in the backward pass.
        assert calls == 2 * 4 * 2
    # A forward of the user's own stays.
    net[0].forward = functools.partial(net[0].forward)
    assert "pop(" not in changed_source(OwnCode(cell, names), Knobs(checkpoint="every 1"))
