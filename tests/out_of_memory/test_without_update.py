"""Graphs and gradients for weights that no optimizer updates: the cause, the suggestion, and the cell that fits."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.evidence_types import State
from memexplore.out_of_memory.held_types import WhyHeld
from memexplore.out_of_memory.optimizer_state import state_of
from memexplore.out_of_memory.untrained import optimizers_in
from tests.out_of_memory.cells import post_mortem, run

MIB = 1 << 20
MLP = """
def mlp(depth=4):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
"""
PREFERENCES = (
    MLP
    + """
policy, reference = mlp(), mlp()
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
# before
for _ in range(3):
    batch = torch.randn(4096, 1024, device="cuda")
    logp = policy(batch).log_softmax(-1)
    ref_logp = reference(batch).log_softmax(-1)
    loss = -F.logsigmoid(logp - ref_logp).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)


class Idle(NamedTuple):
    source: str
    gpu: str
    holder: str
    changes: tuple[tuple[str, str], ...]
    """Each change alone makes the cell fit."""


IDLE = {
    "reference values of a preference loss": Idle(
        PREFERENCES,
        "280MiB",
        "reference",
        (
            ("# before", "reference.requires_grad_(False)"),
            (
                "    ref_logp = reference(batch).log_softmax(-1)",
                "    with torch.no_grad():\n        ref_logp = reference(batch).log_softmax(-1)",
            ),
        ),
    ),
    "the teacher of a distillation": Idle(
        MLP
        + """
class Trainer:
    def __init__(self):
        self.student, self.teacher = mlp(2), mlp(8).eval()
        self.optimizer = torch.optim.AdamW(self.student.parameters())
    def step(self, batch):
        target = self.teacher(batch)
        loss = F.mse_loss(self.student(batch), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
trainer = Trainer()
# before
for _ in range(3):
    trainer.step(torch.randn(4096, 1024, device="cuda"))
""",
        "240MiB",
        "self.teacher",
        (
            ("# before", "trainer.teacher.requires_grad_(False)"),
            (
                "        target = self.teacher(batch)",
                "        with torch.no_grad():\n            target = self.teacher(batch)",
            ),
        ),
    ),
    "a network for the loss, through which a gradient passes": Idle(
        MLP
        + """
vgg, model = mlp(), mlp()
optimizer = torch.optim.AdamW(model.parameters())
# before
for _ in range(3):
    batch = torch.randn(4096, 1024, device="cuda")
    loss = F.mse_loss(vgg(model(batch)), vgg(batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        "320MiB",
        "vgg",
        (("# before", "vgg.requires_grad_(False)"),),
    ),
    "a body that is not trained": Idle(
        MLP
        + """
model = nn.Sequential(mlp(8), nn.Linear(1024, 10).cuda())
optimizer = torch.optim.AdamW(model[1].parameters())
labels = torch.zeros(4096, dtype=torch.long, device="cuda")
# before
for _ in range(3):
    loss = F.cross_entropy(model(torch.randn(4096, 1024, device="cuda")), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        "150MiB",
        "model[0]",
        (("# before", "model[0].requires_grad_(False)"),),
    ),
    "layers that are not trained": Idle(
        MLP
        + """
model = mlp(12)
optimizer = torch.optim.AdamW([*model[20].parameters(), *model[22].parameters()])
# before
for _ in range(3):
    loss = model(torch.randn(4096, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
        "240MiB",
        "",
        (
            (
                "# before",
                'updated = {id(weight) for group in optimizer.param_groups for weight in group["params"]}\n'
                "for weight in model.parameters():\n    weight.requires_grad_(id(weight) in updated)",
            ),
        ),
    ),
}


@pytest.mark.parametrize("name", IDLE)
def test_what_no_optimizer_updates_is_to_have_no_graph(name: str) -> None:
    idle = IDLE[name]
    found = post_mortem(idle.source, idle.gpu)
    assert found.cause is Cause.HELD, found.text
    assert (found.held[0].what, found.held[0].holder) == (WhyHeld.NO_UPDATE, idle.holder), found.text
    first = found.suggestions[0]
    assert first.fits
    # The code of the suggestion is the first line of a change, but for the name of the object that has the model.
    assert first.code.partition("  #")[0].replace("self.", "trainer.") == idle.changes[0][1]
    assert "torch.no_grad()" in first.text or not idle.holder


@pytest.mark.parametrize(("name", "change"), [(name, each) for name, idle in IDLE.items() for each in idle.changes])
def test_the_cell_fits_without_that_graph(name: str, change: tuple[str, str]) -> None:
    idle = IDLE[name]
    assert change[0] in idle.source
    assert run(idle.source.replace(*change), idle.gpu)[1] is None


def test_gradients_of_an_earlier_step_are_part_of_it() -> None:
    # No `zero_grad` of the optimizer reaches the gradients of 4 layers of 1024 × 1024 weights and their biases.
    found = post_mortem(PREFERENCES, "308MiB")
    gradients = [row for row in found.held[0].rows if found.tape.size[row] == 4 * MIB]
    assert found.request is not None
    assert (found.request.step, len(gradients)) == (2, 4)


ADVERSARIES = f"""{MLP}
generator, critic = mlp(), mlp()
optimizer, of_critic = (torch.optim.Adam(model.parameters()) for model in (generator, critic))
for _ in range(3):
    fake = generator(torch.randn(4096, 1024, device="cuda"))
    of_critic.zero_grad()
    (critic(fake.detach()) - critic(torch.randn(4096, 1024, device="cuda"))).mean().backward()
    of_critic.step()
    optimizer.zero_grad()
    critic(fake).mean().neg().backward()
    optimizer.step()
"""
GRADIENT_OF_THE_INPUT = f"""{MLP}
model, other = mlp(), mlp(1)
optimizer = torch.optim.Adam(other.parameters())
image = torch.randn(4096, 1024, device="cuda", requires_grad=True)
model(image).sum().backward()
other(image.grad).sum().backward()
optimizer.step()
"""
WITHOUT_OPTIMIZER = f"""{MLP}
model = mlp()
model(torch.randn(4096, 1024, device="cuda")).sum().backward()
"""


@pytest.mark.parametrize(
    ("source", "gpu"), [(ADVERSARIES, "320MiB"), (GRADIENT_OF_THE_INPUT, "120MiB"), (WITHOUT_OPTIMIZER, "110MiB")]
)
def test_graphs_that_are_needed_are_not_named(source: str, gpu: str) -> None:
    found = post_mortem(source, gpu)
    assert WhyHeld.NO_UPDATE not in [group.what for group in found.held], found.text


def test_the_optimizer_inside_another_one_is_the_one_that_counts() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    inner = torch.optim.SGD([weight])
    outer = torch.optim.Adam([weight])
    outer.optimizer = inner  # type: ignore[attr-defined]
    assert optimizers_in([outer, inner, weight]) == [inner]


def test_an_optimizer_has_state_from_its_first_step_on() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    weight.grad = torch.zeros(4)
    optimizer = torch.optim.SGD([weight], momentum=0.9)
    assert state_of([optimizer]) is State.KEPT
    optimizer.step()
    assert state_of([optimizer]) is State.KEPT
