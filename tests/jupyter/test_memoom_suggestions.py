"""Suggestions of a post-mortem that need what earlier cells have left, in an IPython shell on the virtual GPU."""

from __future__ import annotations

from memexplore.out_of_memory.value import PostMortem
from tests.jupyter.magics_shell import Shell

MIB = 1 << 20


def test_the_state_of_an_optimizer_is_to_be_saved_before_it_is_emptied(shell: Shell, found: list[PostMortem]) -> None:
    shell.run("%memgpu 256MiB").raise_error()
    shell.run("%memoom on").raise_error()
    shell.run("model = torch.nn.Linear(2048, 2048).cuda(); optimizer = torch.optim.AdamW(model.parameters())")
    shell.run("model(torch.zeros(8, 2048, device='cuda')).sum().backward(); optimizer.step(); optimizer.zero_grad()")
    shell.run("with torch.no_grad():\n    model(torch.zeros(1 << 14, 2048, device='cuda'))")
    (post_mortem,) = found
    (suggestion,) = [one for one in post_mortem.suggestions if "`optimizer.state`" in one.text]
    # Both moments of a layer with 2048 x 2048 weights, and of its bias.
    assert 2 * 16 * MIB <= suggestion.frees < 2 * 16 * MIB + MIB
    assert suggestion.code == 'torch.save(optimizer.state_dict(), "optimizer.pt"); optimizer.state.clear()'


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
