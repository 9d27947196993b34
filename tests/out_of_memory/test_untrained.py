"""Models that no optimizer trains beside one that is trained: what is kept of them, and what is not to be deleted."""

from __future__ import annotations

import pytest
import torch

from memexplore.out_of_memory.untrained import untrained
from tests.out_of_memory.cells import post_mortem, run

MIB = 1 << 20
MLP = """
def mlp(depth):
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(2048, 2048), nn.ReLU())]).cuda()
"""
DISTILLATION = f"""{MLP}
teacher, student = mlp(12).requires_grad_(False), mlp(2)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
# before
for _ in range(2):
    batch = torch.randn(1024, 2048, device="cuda")
    output = student(batch)
    target = teacher(batch)
    F.mse_loss(output, target).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_weights_of_a_frozen_model_are_to_be_kept_in_16_bits() -> None:
    # 14 layers of 16 MiB of weights, 12 of these frozen.
    found = post_mortem(DISTILLATION, "275MiB")
    first = found.suggestions[0]
    assert "`teacher`" in first.text, found.text
    # Half of 12 × (2048 × 2048 weights + a bias that takes 8 KiB) × 4 bytes.
    assert first.frees == 12 * (2048 * 2048 + 2048) * 4 // 2
    line, _, around = first.code.partition("  # and ")
    assert around == 'with torch.autocast("cuda", torch.bfloat16): around its call'
    source = DISTILLATION.replace("# before", line)
    call = "    target = teacher(batch)"
    source = source.replace(call, f'    with torch.autocast("cuda", torch.bfloat16):\n    {call}')
    assert run(source, "275MiB")[1] is None


def objects(*names: str) -> tuple[list[object], list[tuple[str, object]]]:
    models = {name: torch.nn.Linear(2, 2) for name in names}
    return list(models.values()), list(models.items())


def test_models_on_the_cpu_take_no_gpu_memory() -> None:
    assert untrained(*objects("reference")) is None


WITHOUT_OPTIMIZER = f"""{MLP}
policy, reference = mlp(4), mlp(4)
batch = torch.randn(4096, 2048, device="cuda")
logp = policy(batch).log_softmax(-1)
ref_logp = reference(batch).log_softmax(-1)
(logp - ref_logp).mean().backward()
"""


def test_a_model_whose_graph_waits_for_backward_is_not_to_be_deleted() -> None:
    found = post_mortem(WITHOUT_OPTIMIZER, "380MiB")
    assert found.request is not None
    assert found.request.phase == "forward"
    assert not any("del policy" in each.code for each in found.suggestions), found.text


def test_a_model_that_the_failing_call_does_not_use_is_named_with_its_bytes() -> None:
    source = f"""{MLP}
first = mlp(8)
first(torch.randn(8, 2048, device="cuda")).sum().backward()
second = mlp(4)
second(torch.randn(4096, 2048, device="cuda")).mean().backward()
"""
    found = post_mortem(source, "420MiB")
    (first,) = [holder for holder in found.holders if holder.name == "first"]
    # Weights and gradients of 8 layers of 2048 × 2048 numbers.
    assert first.size >= 2 * 8 * 16 << 20
    # It may be read again.
    assert not any("`first`" in each.text for each in found.suggestions), found.text


@pytest.mark.parametrize("optimizer", ["", "optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)"])
def test_a_frozen_part_of_a_trained_model_keeps_its_precision(optimizer: str) -> None:
    source = f"""{MLP}
model = nn.Sequential(mlp(8).requires_grad_(False), mlp(1))
body = model[0]
{optimizer}
for _ in range(2):
    model(torch.randn(1024, 2048, device="cuda")).mean().backward()
"""
    found = post_mortem(source, "170MiB")
    assert not any("no optimizer trains" in each.text for each in found.suggestions), found.text
