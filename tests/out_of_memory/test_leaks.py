"""Leaks in places that no variable of the loop names: the cause, its holder, and a change with which the cell fits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.held_types import WhyHeld
from tests.out_of_memory.cells import post_mortem, run

MLP = """
def mlp():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
"""
LOOP = """
for _ in range(40):
    loss = model(torch.randn(1024, 1024, device="cuda")).square().mean()
    loss.backward()
    model.zero_grad()
"""


class Leak(NamedTuple):
    source: str
    holder: str
    change: tuple[str, str]


LEAKS = {
    "an attribute of a class": Leak(
        MLP
        + """
class Trainer:
    hidden = {}
    @classmethod
    def step(cls, number):
        y = model(torch.randn(1024, 1024, device="cuda"))
        Trainer.hidden[number] = y
        y.square().mean().backward()
        model.zero_grad()
model = mlp()
for number in range(40):
    Trainer.step(number)
""",
        "cls.hidden",
        ("= y\n", "= y.detach().cpu()\n"),
    ),
    "a closure of a forward hook": Leak(
        MLP
        + """
def watch(layer):
    seen = []
    layer.register_forward_hook(lambda layer, inputs, output: seen.append(output))
model = mlp()
watch(model[1])
"""
        + LOOP,
        "model.1._forward_hooks",
        ("append(output)", "append(output.detach().cpu())"),
    ),
    "an attribute of the model": Leak(
        MLP
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.history = mlp(), []
    def forward(self, x):
        y = self.body(x)
        self.history.append(y)
        return y
model = Net()
"""
        + LOOP,
        "model.history",
        ("append(y)", "append(y.detach().cpu())"),
    ),
    "a list with the graphs of a generator": Leak(
        MLP
        + """
model, critic, history = mlp(), mlp(), []
for _ in range(10):
    fake = model(torch.randn(1024, 1024, device="cuda"))
    critic(fake.detach()).mean().backward()
    loss = -critic(fake).mean()
    loss.backward(retain_graph=True)
    history.append(loss)
    model.zero_grad()
    critic.zero_grad()
""",
        "history",
        ("append(loss)", "append(loss.item())"),
    ),
    "values computed from the model's results": Leak(
        MLP
        + """
model, probabilities = mlp(), []
with torch.no_grad():
    for _ in range(60):
        logits = model(torch.randn(1024, 1024, device="cuda"))
        probabilities.append(logits.softmax(-1))
""",
        "probabilities",
        ("softmax(-1))", "softmax(-1).cpu())"),
    ),
    "the trainers of a search": Leak(
        """
class Trainer:
    def __init__(self, rate):
        self.model = nn.Linear(1024, 1024).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
    def fit(self):
        for _ in range(2):
            loss = self.model(torch.randn(256, 1024, device="cuda")).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.score = loss.item()
        return self
results = {}
for number in range(40):
    results[number] = Trainer(0.1 ** number).fit()
""",
        "results",
        (".fit()", ".fit().score"),
    ),
    "an attribute beside models": Leak(
        MLP
        + """
class Agent:
    def __init__(self):
        self.model, self.target, self.memory = mlp(), mlp(), []
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
    def learn(self, state):
        self.memory.append(state)
        self.model(state).square().mean().backward()
        self.optimizer.step()
agent = Agent()
for _ in range(60):
    agent.learn(torch.randn(1024, 1024, device="cuda"))
""",
        "self.memory",
        ("append(state)", "append(state.cpu())"),
    ),
    "copies of the weights": Leak(
        MLP
        + """
import copy
model, best = mlp(), []
for _ in range(20):
    model(torch.randn(64, 1024, device="cuda")).mean().backward()
    model.zero_grad()
    best.append(copy.deepcopy(model.state_dict()))
""",
        "best",
        ("copy.deepcopy(model.state_dict())", "{name: value.cpu() for name, value in model.state_dict().items()}"),
    ),
    "a hidden state that is not detached": Leak(
        """
cell = nn.GRUCell(1024, 1024).cuda()
optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
hidden = torch.zeros(64, 1024, device="cuda")
for _ in range(40):
    # before
    for _ in range(8):
        hidden = cell(torch.randn(64, 1024, device="cuda"), hidden)
    loss = hidden.square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
""",
        "",
        ("# before", "hidden = hidden.detach()"),
    ),
}


@pytest.mark.parametrize("name", LEAKS)
def test_the_holder_of_a_leak_is_named(name: str) -> None:
    leak = LEAKS[name]
    found = post_mortem(leak.source, "220MiB")
    assert found.cause is Cause.LEAK, found.text
    assert found.held[0].holder == leak.holder, found.text
    assert found.suggestions[0].fits
    assert run(leak.source.replace(*leak.change), "220MiB")[1] is None


def test_a_graph_over_several_steps_is_to_be_detached() -> None:
    found = post_mortem(LEAKS["a hidden state that is not detached"].source, "220MiB")
    assert found.held[0].what is WhyHeld.LONG_GRAPH
    assert found.suggestions[0].code == "hidden = hidden.detach()"


def test_a_graph_over_a_few_steps_is_found_before_growth_can_be_measured() -> None:
    found = post_mortem(LEAKS["a hidden state that is not detached"].source, "160MiB")
    assert found.request is not None
    assert found.request.step == 3
    assert found.held[0].what is WhyHeld.LONG_GRAPH, found.text
    # Of the 2 steps before.
    assert found.held[0].blocks == 2


def test_the_graphs_behind_the_outputs_that_a_hook_keeps_are_counted_too() -> None:
    source = LEAKS["a closure of a forward hook"].source.replace("model[1]", "model[-1]")
    found = post_mortem(source.replace(".backward()", ".backward(retain_graph=True)"), "220MiB")
    assert found.cause is Cause.LEAK, found.text
    # A graph keeps the input and the 4 results of the layers, each of 1024 × 1024 numbers.
    first = found.held[0]
    assert first.size == first.blocks * 5 * (4 << 20), found.text


def test_copies_of_all_weights_are_counted_as_copies() -> None:
    found = post_mortem(LEAKS["copies of the weights"].source, "220MiB")
    # Each copy has 4 layers of 1024 × 1024 weights and 1024 biases.
    assert found.held[0].size == found.held[0].blocks * 4 * (1025 * 1024 * 4)


SUMMED = {
    "a sum": "total = total + loss",
    "a list": "losses.append(loss)",
}


@pytest.mark.parametrize("name", SUMMED)
def test_losses_that_wait_for_one_backward_pass_are_to_have_their_own(name: str) -> None:
    keep = SUMMED[name]
    source = f"""{MLP}
model, total, losses = mlp(), 0, []
for _ in range(12):
    loss = model(torch.randn(1024, 1024, device="cuda")).square().mean() / 12
    {keep}
(total + sum(losses)).backward()
"""
    found = post_mortem(source, "220MiB")
    assert found.held[0].what is WhyHeld.SUMMED_GRAPHS, found.text
    assert found.suggestions[0].code.startswith("loss.backward()")
    followed = source.replace(keep, "loss.backward()").replace("(total + sum(losses)).backward()", "")
    assert run(followed, "220MiB")[1] is None


def test_values_that_one_loss_compares_are_to_be_kept_for_its_backward_pass() -> None:
    source = f"""{MLP}
model, views = mlp(), []
for _ in range(12):
    views.append(model(torch.randn(1024, 1024, device="cuda")))
torch.stack(views).var(0).mean().backward()
"""
    found = post_mortem(source, "220MiB")
    # Whether a backward pass follows is not known.
    assert found.suggestions[0].text == "Evaluate without a graph, if no backward pass follows."
    assert "`views` keeps tensors of every step with their graphs: if no backward" in found.suggestions[1].text


def test_a_leak_of_two_variables_is_named_once() -> None:
    source = (
        MLP
        + """
model, kept = mlp(), []
same = kept
for _ in range(40):
    y = model(torch.randn(1024, 1024, device="cuda"))
    kept.append(y)
    y.mean().backward()
    model.zero_grad()
print(same)
"""
    )
    found = post_mortem(source, "220MiB")
    assert [group.what for group in found.held].count(WhyHeld.GROWS) == 1, found.text


def test_derivatives_on_the_way_of_one_step_are_no_leak() -> None:
    """The inner steps of meta-learning take derivatives, and the outer backward pass needs the graph of all of them."""
    source = """
weights = torch.zeros(1024, 1024, device="cuda", requires_grad=True)
fast = weights
for _ in range(20):
    loss = torch.relu(torch.randn(1024, 1024, device="cuda") @ fast).square().mean()
    (gradient,) = torch.autograd.grad(loss, fast, create_graph=True)
    fast = fast - 0.1 * gradient
fast.sum().backward()
"""
    found = post_mortem(source, "150MiB")
    assert found.cause is not Cause.LEAK
    assert {WhyHeld.GROWS, WhyHeld.LONG_GRAPH}.isdisjoint(group.what for group in found.held), found.text


def test_the_outer_losses_of_meta_learning_are_to_have_a_backward_pass_each() -> None:
    source = """
weights, total = torch.zeros(1024, 1024, device="cuda", requires_grad=True), 0
for task in range(20):
    loss = torch.relu(torch.randn(1024, 1024, device="cuda") @ weights).square().mean()
    (gradient,) = torch.autograd.grad(loss, weights, create_graph=True)
    outer = torch.relu(torch.randn(1024, 1024, device="cuda") @ (weights - gradient)).square().mean()
    total += outer
total.backward()
"""
    found = post_mortem(source, "150MiB")
    assert (found.held[0].what, found.held[0].holder) == (WhyHeld.SUMMED_GRAPHS, "total"), found.text
    assert found.suggestions[0].code.startswith("loss.backward()")
    followed = source.replace("total += outer", "outer.backward()").replace("total.backward()", "")
    assert run(followed, "150MiB")[1] is None


def test_a_list_of_a_module_of_the_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_statistics.py").write_text("kept = []\ndef keep(value):\n    kept.append(value)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = f"{MLP}\nimport own_statistics\nmodel = mlp()\n{LOOP}".replace("loss = ", "y = ").replace(
        ".square().mean()\n", "\n    own_statistics.keep(y)\n    loss = y.square().mean()\n"
    )
    found = post_mortem(source, "220MiB")
    assert (found.cause, found.held[0].holder) == (Cause.LEAK, "own_statistics.kept"), found.text
    monkeypatch.delitem(sys.modules, "own_statistics")


def test_a_list_of_losses_and_their_sum_keep_the_same_graphs_and_are_one_leak() -> None:
    source = (
        MLP
        + """
model, history, total = mlp(), [], 0
for _ in range(40):
    loss = model(torch.randn(1024, 1024, device="cuda")).square().mean()
    history.append({"loss": loss})
    total = total + loss
    loss.backward(retain_graph=True)
    model.zero_grad()
"""
    )
    found = post_mortem(source, "220MiB")
    assert found.cause is Cause.LEAK, found.text
    summed = [group.holder for group in found.held if group.what is WhyHeld.SUMMED_GRAPHS]
    assert summed == ["history, total"], found.text
    assert "keep numbers (`.item()`) in `history`, `total`" in found.suggestions[0].text
    one = source.replace('{"loss": loss}', '{"loss": loss.item()}')
    # The sum alone keeps the graphs.
    assert post_mortem(one, "220MiB").held[0].holder == "total"
    assert run(one.replace("total + loss", "total + loss.item()"), "220MiB")[1] is None


# --- loops without steps ---------------------------------------------------------------------------------------------


def test_two_lists_of_a_metric_are_counted_in_full() -> None:
    found = post_mortem(
        """
class Metric:
    def __init__(self):
        self.preds, self.target = [], []

    def update(self, preds, target):
        self.preds.append(preds)
        self.target.append(target)

model, metric = nn.Linear(1024, 1024).cuda(), Metric()
with torch.no_grad():
    for _ in range(100):
        batch, target = torch.zeros(1024, 1024, device="cuda"), torch.ones(1024, 1024, device="cuda")
        metric.update(model(batch), target)
""",
        "256MiB",
    )
    assert found.cause is Cause.LEAK, found.text
    # Each iteration keeps two tensors of 1024 x 1024 numbers.
    first = found.held[0]
    assert (first.holder, found.growth, found.period) == ("metric.preds, metric.target", 8 << 20, "iteration")
    assert first.size > 0.8 * found.memory.allocated
    assert "grow by 8.00 MiB an iteration" in found.sentences[-1]


def test_a_state_that_is_not_detached_is_a_long_graph_although_no_optimizer_ends_a_step() -> None:
    found = post_mortem(
        """
cell = nn.GRUCell(1024, 1024).cuda()
state = torch.zeros(64, 1024, device="cuda")
for _ in range(200):
    state = cell(torch.zeros(64, 1024, device="cuda"), state)
    state.sum().backward(retain_graph=True)
    with torch.no_grad():
        for weight in cell.parameters():
            weight.data.add_(weight.grad, alpha=-0.1)
""",
        "200MiB",
    )
    assert found.cause is Cause.LEAK, found.text
    assert found.held[0].what is WhyHeld.LONG_GRAPH, found.text
    assert "detach()" in found.suggestions[0].code


def test_an_evaluation_is_not_suggested_to_a_loop_that_goes_backward() -> None:
    found = post_mortem(
        f"""{MLP}
model, kept = mlp().eval(), []
model[1].register_forward_hook(lambda module, given, result: kept.append(result))
for _ in range(100):
    model(torch.zeros(1024, 1024, device="cuda")).sum().backward()
""",
        "256MiB",
    )
    assert found.cause is Cause.LEAK, found.text
    assert not any("no backward pass follows" in suggestion.text for suggestion in found.suggestions)


def test_models_that_are_trained_in_turns_are_no_leak() -> None:
    found = post_mortem(
        MLP
        + """
models = {name: mlp() for name in ("generator", "critic", "encoder", "decoder")}
optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
for batch in (256, 256, 256, 256, 256, 256, 4096):
    for name, model in models.items():
        model(torch.randn(batch, 1024, device="cuda")).square().mean().backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
""",
        "320MiB",
    )
    # Weights and two states of four layers of 4 MiB: 48 MiB for each model without gradients, 192 in all.
    assert found.cause is Cause.TOO_MUCH, found.text
    assert not found.held, found.text


@pytest.mark.parametrize(
    ("kept", "suggested", "costs", "change"),
    [
        ("loss", "value.item()", "", "loss.item()"),
        (
            "(loss, y)",
            "value.detach().cpu()",
            "It costs: copies to the CPU.",
            "(loss.detach().cpu(), y.detach().cpu())",
        ),
    ],
)
def test_losses_that_are_kept_after_their_backward_pass_are_to_be_numbers(
    kept: str, suggested: str, costs: str, change: str
) -> None:
    source = f"""{MLP}
model, losses = mlp(), []
optimizer = torch.optim.SGD(model.parameters())
for _ in range(60):
    y = model(torch.randn(1024, 1024, device="cuda"))
    loss = y.square().mean()
    loss.backward(retain_graph=True)
    losses.append({kept})
    optimizer.step()
    optimizer.zero_grad()
"""
    found = post_mortem(source, "256MiB")
    assert found.cause is Cause.LEAK, found.text
    first = found.suggestions[0]
    assert (first.code, first.costs, first.fits) == (suggested, costs, True), found.text
    assert run(source.replace(f"append({kept})", f"append({change})"), "256MiB")[1] is None


@pytest.mark.parametrize(("kept", "has_graphs"), [("y", True), ("y.detach()", False)])
def test_only_results_that_have_graphs_are_said_to_have_them(kept: str, has_graphs: bool) -> None:
    found = post_mortem(
        f"""{MLP}
model, results = mlp(), []
for _ in range(60):
    y = model(torch.randn(1024, 1024, device="cuda"))
    results.append({kept})
""",
        "256MiB",
    )
    of_results = [each.text for each in found.suggestions if each.text.startswith("`results` keeps tensors")]
    assert ["with their graphs" in text for text in of_results] == [has_graphs], found.text
