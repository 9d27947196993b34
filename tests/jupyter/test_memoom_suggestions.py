"""Suggestions of a post-mortem that need what earlier cells have left, in an IPython shell on the virtual GPU."""

from __future__ import annotations

from memexplore.out_of_memory.value import PostMortem
from tests.jupyter.magics_shell import Shell


def test_a_reference_model_of_an_earlier_cell_is_frozen_by_the_suggestion(
    shell: Shell, found: list[PostMortem]
) -> None:
    shell.run("%memgpu 280MiB").raise_error()
    shell.run("%memoom on").raise_error()
    shell.run(
        "from torch import nn\n"
        "def mlp(): return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())])\n"
        "policy, reference = mlp().cuda(), mlp().cuda()\n"
        "optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)"
    ).raise_error()
    shell.run(
        "def train():\n"
        "    for _ in range(3):\n"
        "        batch = torch.zeros(4096, 1024, device='cuda')\n"
        "        margin = policy(batch).log_softmax(-1) - reference(batch).log_softmax(-1)\n"
        "        (-nn.functional.logsigmoid(margin)).mean().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()"
    ).raise_error()
    shell.run("train()")
    (post_mortem,) = found
    assert post_mortem.suggestions[0].code.startswith("reference.requires_grad_(False)"), post_mortem.text
    shell.run(post_mortem.suggestions[0].code).raise_error()
    shell.run("%memoom free").raise_error()
    shell.run("train()").raise_error()
