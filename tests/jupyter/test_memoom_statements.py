"""Post-mortems of cells of several statements, which IPython compiles one by one."""

from __future__ import annotations

import pytest

from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.held_types import WhyHeld
from memexplore.out_of_memory.value import PostMortem
from tests.jupyter.magics_shell import Shell


@pytest.fixture
def on_gpu(shell: Shell, found: list[PostMortem]) -> Shell:
    """A shell with a virtual GPU of 256 MiB and post-mortems."""
    shell.run("%memgpu 256MiB").raise_error()
    shell.run("%memoom on").raise_error()
    shell.run("import torch\ndef empty(mib): return torch.empty(mib << 20, dtype=torch.uint8, device='cuda')")
    return shell


@pytest.mark.parametrize("later", ["", "print(first, second)", "def use(): return first\nuse()"])
def test_a_variable_that_may_be_read_again_is_named_and_is_no_cause(
    on_gpu: Shell, found: list[PostMortem], later: str
) -> None:
    on_gpu.run(f"first = empty(100)\nsecond = empty(200)\n{later}")
    assert found[0].cause is Cause.TOO_MUCH, found[0].text
    assert found[0].held == ()
    assert [(holder.name, holder.size) for holder in found[0].holders] == [("first", 100 << 20)]
    assert found[0].suggestions[-1].text == "Delete `first` if nothing reads it any more."


def test_data_of_an_earlier_cell_is_named_and_is_no_cause(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run("first = empty(100)")
    on_gpu.run("second = empty(200)")
    assert found[0].cause is Cause.TOO_MUCH, found[0].text
    assert found[0].suggestions[-1].code == "del first"
    assert found[0].suggestions[-1].fits


def test_the_graph_of_an_earlier_cell_is_held(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run("model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(3)]).cuda()")
    on_gpu.run("features = model(torch.zeros(8192, 1024, device='cuda'))")
    on_gpu.run("model(torch.zeros(8192, 1024, device='cuda'))")
    assert found[0].cause is Cause.HELD, found[0].text
    assert [(each.what, each.holder) for each in found[0].held] == [(WhyHeld.BEFORE, "features")]
    assert found[0].suggestions[0].code == "del features"


def test_a_list_that_a_hook_of_an_earlier_cell_fills_is_a_leak(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run("model = torch.nn.Linear(1024, 1024).cuda(); kept = []")
    on_gpu.run("model.register_forward_hook(lambda layer, inputs, output: kept.append(output))")
    on_gpu.run(
        "for _ in range(40):\n    model(torch.zeros(2048, 1024, device='cuda')).sum().backward()\n    model.zero_grad()"
    )
    assert found[0].cause is Cause.LEAK, found[0].text
    assert [(each.what, each.holder) for each in found[0].held] == [(WhyHeld.GROWS, "kept")]
    assert found[0].suggestions[0].fits


def test_a_model_that_is_made_again_after_an_error_is_to_be_deleted(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run("def mlp(): return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).cuda()")
    make = "model = mlp()\noptimizer = torch.optim.Adam(model.parameters())"
    step = "model(torch.zeros(8, 2048, device='cuda')).sum().backward()\noptimizer.step()"
    on_gpu.run(make)
    on_gpu.run(f"{step}\nempty(100)")
    on_gpu.run(make)
    assert found[1].cause is Cause.HELD, found[1].text
    assert found[1].held[0].what is WhyHeld.BEFORE
    suggestion = found[1].suggestions[0]
    assert suggestion.fits
    assert "\n     %memoom free\n     del " in found[1].text
    assert "pre-wrap'>%memoom free\ndel " in found[1]._repr_html_()
    on_gpu.run(suggestion.code).raise_error()
    on_gpu.run(make).raise_error()


def test_a_model_in_its_backward_pass_is_not_to_be_deleted(on_gpu: Shell, found: list[PostMortem]) -> None:
    on_gpu.run(
        "model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).cuda()\n"
        "loss = model(torch.zeros(8192, 2048, device='cuda')).sum()\nloss.backward()"
    )
    assert len(found) == 1
    assert "model" not in [group.holder for group in found[0].held], found[0].text


MODELS = (
    "def mlp(): return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(3)]).cuda()\n"
    "def train():\n    model(torch.zeros(8, 2048, device='cuda')).sum().backward()\n    optimizer.step()"
)
MAKE = "model = mlp()\noptimizer = torch.optim.Adam(model.parameters(), foreach=False)"


@pytest.mark.parametrize("cells", [[f"{MAKE}\ntrain()"], [MAKE, "train()"]])
def test_a_model_of_an_earlier_cell_is_not_the_present_one_with_the_same_names(
    on_gpu: Shell, found: list[PostMortem], cells: list[str]
) -> None:
    on_gpu.run(MODELS)
    on_gpu.run("first = mlp()\nfirst(torch.zeros(8, 2048, device='cuda')).sum().item()")
    for cell in cells:
        on_gpu.run(cell)
    assert found[0].cause is Cause.HELD, found[0].text
    # Three layers of 2048 × 2048 weights and 2048 biases.
    assert [(each.what, each.holder, each.size) for each in found[0].held] == [
        (WhyHeld.BEFORE, "first", 3 * 2049 * 2048 * 4)
    ]
    assert found[0].suggestions[0].code == "del first"


def test_models_of_earlier_cells_with_the_same_names_may_be_used_in_turn(
    on_gpu: Shell, found: list[PostMortem]
) -> None:
    on_gpu.run(MODELS)
    for name in ("teacher", "student"):
        on_gpu.run(f"{name} = mlp()\n{name}(torch.zeros(8, 2048, device='cuda')).sum().item()")
    on_gpu.run(
        "for size in (8, 8, 16384):\n"
        "    batch = torch.zeros(size, 2048, device='cuda')\n"
        "    with torch.no_grad():\n        wanted = teacher(batch[:8])\n"
        "    student(batch).sum().backward()"
    )
    assert found[0].cause is Cause.TOO_MUCH, found[0].text
    assert "teacher" not in [group.holder for group in found[0].held], found[0].text
