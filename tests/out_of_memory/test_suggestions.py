"""What to change: the optimizer where it has state, else the weights."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memexplore
from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.held_types import WhyHeld
from memexplore.out_of_memory.html import html
from memexplore.out_of_memory.value import post_mortem
from memexplore.recorder.recording import record
from tests.out_of_memory import cells

LESS_STATE = "Use an optimizer with less state"
FEWER_WEIGHTS = "Keep the weights in 16 bits, or train fewer of them"


def suggested(optimizer: Callable[..., torch.optim.Optimizer], steps: int) -> list[str]:
    """The texts for a model that runs out of memory after some steps with a small batch."""
    with memexplore.virtual("64MiB"), record() as recording, pytest.raises(torch.OutOfMemoryError):
        model = torch.nn.Linear(1024, 1024, device="cuda")
        update = optimizer(model.parameters(), lr=0.1)
        for batch in [8] * steps + [1 << 13]:
            model(torch.zeros(batch, 1024, device="cuda")).sum().backward()
            update.step()
            update.zero_grad()
    found = post_mortem(recording.tape)
    assert found is not None
    return [one.text for one in found.suggestions]


def test_an_optimizer_with_state_is_to_have_less() -> None:
    texts = suggested(torch.optim.AdamW, 2)
    assert any(text.startswith(LESS_STATE) for text in texts)


def test_an_optimizer_without_state_is_not_replaced() -> None:
    texts = suggested(torch.optim.SGD, 2)
    assert any(text.startswith(FEWER_WEIGHTS) for text in texts)
    assert not any(text.startswith(LESS_STATE) for text in texts)


def test_before_the_first_update_the_state_is_unknown_to_a_tape() -> None:
    texts = suggested(torch.optim.AdamW, 0)
    assert any(text.endswith("An optimizer with less state lowers what the first update adds.") for text in texts)


TRAINED = """
model = nn.Linear(1024, 1024).cuda()
{optimizer}
model(torch.zeros(1 << 13, 1024, device="cuda")).sum().backward()
{update}
"""


@pytest.mark.parametrize(
    ("optimizer", "update", "expected"),
    [
        ("", "", FEWER_WEIGHTS),
        ("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "optimizer.step()", FEWER_WEIGHTS),
        ("optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "optimizer.step()", LESS_STATE),
        ("optimizer = torch.optim.AdamW(model.parameters())", "optimizer.step()", LESS_STATE),
    ],
)
def test_the_optimizer_of_a_cell_is_known_before_its_first_update(optimizer: str, update: str, expected: str) -> None:
    found = cells.post_mortem(TRAINED.format(optimizer=optimizer, update=update), "64MiB")
    of_model = [one.text for one in found.suggestions if "16 bits" in one.text or "state" in one.text]
    assert [text.startswith(expected) for text in of_model] == [True], found.text


def test_weights_in_16_bits_are_not_to_be_kept_in_16_bits() -> None:
    source = TRAINED.format(optimizer="model.bfloat16()", update="").replace(
        "1024, device", "1024, dtype=torch.bfloat16, device"
    )
    found = cells.post_mortem(source.replace("1 << 13", "1 << 14"), "64MiB")
    assert not any("16 bits" in one.text for one in found.suggestions), found.text


def test_what_a_run_uses_is_not_suggested() -> None:
    with memexplore.virtual("64MiB"), record() as recording, pytest.raises(torch.OutOfMemoryError):
        layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()).cuda() for _ in range(2)]
        for batch in (64, 1 << 15):  # a GELU of the second batch takes 2¹⁵ × 512 × 2 bytes = 32 MiB
            value = torch.zeros(batch, 512, device="cuda", requires_grad=True)
            with torch.autocast("cuda", torch.bfloat16):
                for layer in layers:
                    value = checkpoint(layer, value, use_reentrant=False)
            value.sum().backward()
    found = post_mortem(recording.tape)
    assert found is not None
    texts = [one.text for one in found.suggestions]
    assert "Take a smaller batch or micro-batches." in texts
    assert not any("checkpoint" in text or "mixed precision" in text for text in texts)
    costs = "batch (noisier gradients), accumulation (equal results but for batch norm, a little slower)"
    for page in (found.text, found._repr_html_()):
        assert f"It costs: {costs}." in page


def test_a_forward_pass_without_gradients_is_not_to_be_checkpointed() -> None:
    with memexplore.virtual("64MiB"), record() as recording, pytest.raises(torch.OutOfMemoryError):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024)).cuda()
        results = []
        with torch.no_grad():
            while True:
                results.append(model(torch.zeros(1 << 11, 1024, device="cuda")))
    found = post_mortem(recording.tape)
    assert found is not None
    texts = [one.text for one in found.suggestions]
    assert "Take a smaller batch, keep results on the CPU, or run the model in 16 bits." in texts
    assert not any("checkpoint" in text or "optimizer" in text for text in texts)


# The first two fail in the loss, the last one in the model.
@pytest.mark.parametrize(
    "update",
    [
        "total += F.mse_loss(model(x), x)",
        "total = total + F.mse_loss(model(x), x)",
        "total = total + nn.MSELoss()(model(x), x)",
        "total = total + model(x).sum()",
    ],
)
def test_a_variable_that_the_failing_statement_reads_is_not_to_be_deleted(update: str) -> None:
    source = f"""
def validate():
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda().eval()
    total = 0
    for _ in range(10):
        x = torch.randn(32768, 256, device="cuda")
        {update}
    return total

validate()
"""
    texts = [suggestion.text for suggestion in cells.post_mortem(source, "1GiB").suggestions]
    assert any("without a graph" in text for text in texts)
    assert not any("`total`" in text for text in texts)


REPLACED = """
def load():
    scale = torch.ones(1, device="cuda")
    return torch.zeros(14, 1 << 18, device="cuda")

def train():
    for _ in range(2):
        kept = load()

train()
"""


def test_a_result_that_the_failing_call_makes_again_is_held() -> None:
    found = cells.post_mortem(REPLACED, "24MiB")
    assert (found.cause, found.held[0].holder, found.held[0].size) == (Cause.HELD, "kept", 14 << 20), found.text
    assert found.suggestions[0].code == "del kept"
    assert cells.run(REPLACED.replace("kept = load()", "kept = load(); del kept"), "24MiB")[1] is None


def test_what_the_failing_op_may_read_itself_is_named_and_is_no_cause() -> None:
    # An op of C++ has no frame with its inputs.
    found = cells.post_mortem('h = torch.zeros(14, 1 << 18, device="cuda")\nfor _ in range(3):\n    h = h * 2', "24MiB")
    assert found.cause is Cause.TOO_MUCH, found.text
    assert [holder.name for holder in found.holders] == ["h"]
    assert not any("`h`" in suggestion.text for suggestion in found.suggestions), found.text


def test_names_between_backticks_are_code_on_a_page() -> None:
    found = cells.post_mortem(REPLACED, "24MiB")
    assert any("`kept`" in suggestion.text for suggestion in found.suggestions)
    page = html(found)
    assert "<code>kept</code>" in page
    assert "`" not in page


@pytest.mark.parametrize("follows", ["print(loss)", "loss.backward()"])
def test_a_model_in_evaluation_mode_loses_its_graph_only_if_no_backward_pass_follows(follows: str) -> None:
    source = f"""
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda().eval()
for _ in range(2):
    loss = model(torch.randn(4096, 1024, device="cuda")).mean()
    {follows}
"""
    first = cells.post_mortem(source, "150MiB").suggestions[0]
    assert first.text == "Evaluate without a graph, if no backward pass follows."


EVALUATION_WITHIN_AN_EPOCH = """
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def evaluate():
    model.eval()
    for _ in range(3):
        output = model(torch.randn(6144, 1024, device="cuda"))
    model.train()

for epoch in range(2):
    for _ in range(2):
        model(torch.randn(1024, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        evaluate()
"""


def test_a_function_that_evaluates_needs_no_graph_whatever_its_caller_does() -> None:
    found = cells.post_mortem(EVALUATION_WITHIN_AN_EPOCH, "280MiB")
    assert found.suggestions[0].text.startswith("Evaluate without a graph"), found.text
    followed = EVALUATION_WITHIN_AN_EPOCH.replace("def evaluate", "@torch.no_grad()\ndef evaluate")
    assert cells.run(followed, "280MiB")[1] is None


def test_the_first_layer_of_a_training_step_does_not_evaluate() -> None:
    source = """
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()).cuda()
model(torch.randn(16384, 1024, device="cuda")).mean().backward()
"""
    found = cells.post_mortem(source, "140MiB")
    assert found.request is not None
    assert (found.request.layer, found.request.phase) == ("0", "forward")
    assert not any("results" in each.text for each in found.suggestions), found.text


def test_samples_between_training_steps_are_an_evaluation() -> None:
    source = """
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    loss = model(torch.randn(256, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.randn(32768, 1024, device="cuda"))
"""
    found = cells.post_mortem(source, "420MiB")
    assert found.suggestions[0].text.startswith("Take a smaller batch, keep results on the CPU"), found.text


@pytest.mark.parametrize(("end", "is_freed"), [(".sum()", True), ("", False)])
def test_only_the_graph_of_a_loss_is_to_be_freed_before_another_pass(end: str, is_freed: bool) -> None:
    source = f"""
model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
first = model(torch.randn(4096, 1024, device="cuda")){end}
second = model(torch.randn(4096, 1024, device="cuda")){end}
(first - second).square().mean().backward()
"""
    codes = [one.code for one in cells.post_mortem(source, "180MiB").suggestions]
    assert any("first.backward()" in code for code in codes) is is_freed


def test_a_result_that_a_list_keeps_is_not_to_be_deleted_alone() -> None:
    source = """
body = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda().eval()
features = []
for _ in range(6):
    result = body(torch.randn(4096, 1024, device="cuda"))
    features.append(result.mean(1))
head = nn.Linear(6, 1).cuda()
head(torch.stack(features, 1).detach()).sum().backward()
"""
    found = cells.post_mortem(source, "280MiB")
    # The list keeps the graph to which the result belongs: 16 MiB at most come back.
    assert all(each.frees <= 16 << 20 for each in found.suggestions if "`result`" in each.text), found.text
    assert not any("result.backward" in each.code for each in found.suggestions), found.text


def test_a_little_that_is_held_is_no_cause_where_the_rest_of_the_step_needs_more() -> None:
    source = """
critic = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
optimizer = torch.optim.Adam(critic.parameters())
for _ in range(2):
    image = torch.randn(2048, 1024, device="cuda", requires_grad=True)
    output = critic(image).sum()
    (gradient,) = torch.autograd.grad(output, image, create_graph=True)
    (output + (gradient.norm(2, 1) - 1).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = cells.post_mortem(source, "180MiB")
    # The request of 8 MiB would fit without `gradient`, also 8 MiB.
    assert found.request is not None
    assert (found.request.size, found.request.step) == (8 << 20, 2)
    # Under torch 2.11, which frees in another order, the request fits with expandable segments.
    assert found.cause in (Cause.TOO_MUCH, Cause.FRAGMENTATION), found.text
    assert "gradient" not in found.suggestions[0].text


def test_a_model_that_is_little_beside_its_activations_is_not_to_be_smaller() -> None:
    source = """
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.zeros(16, 3, 128, 128, device="cuda")).sum().backward()
"""
    # 2 768 weights are 11 KiB, and an activation of 16 × 16 × 128 × 128 numbers has 16 MiB.
    found = cells.post_mortem(source, "48MiB")
    assert [one.text.split()[:4] for one in found.suggestions] == [["Take", "a", "smaller", "batch"]], found.text


def test_little_weights_are_not_to_be_shorter_where_results_are_concatenated() -> None:
    source = """
model, results = nn.Linear(8, 1024).cuda(), []
with torch.no_grad():
    for _ in range(10):
        results.append(model(torch.zeros(1024, 8, device="cuda")))
    torch.cat(results)
"""
    # 10 results of 1024 × 1024 × 4 B are 40 MiB, twice that is more than 64 MiB, and 9 × 1024 weights are 36 KiB.
    found = cells.post_mortem(source, "64MiB")
    assert "on the CPU" in found.suggestions[0].text, found.text
    assert not any("16 bits" in one.text for one in found.suggestions), found.text


@pytest.mark.parametrize(("image", "evaluates"), [("image", True), ("image.requires_grad_()", False)])
def test_a_model_whose_inputs_want_gradients_does_not_evaluate(image: str, evaluates: bool) -> None:
    source = f"""
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda().eval()
image = torch.zeros(8192, 1024, device="cuda")
attributions = torch.autograd.grad(model({image}).sum(), image)
"""
    found = cells.post_mortem(source, "250MiB")
    assert found.suggestions[0].text.startswith("Evaluate without a graph") == evaluates, found.text
    assert found.cause is (Cause.HELD if evaluates else Cause.TOO_MUCH)


TILES = """
class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])

    def decode(self, latents):
        tiles = []
        for tile in latents.split(256):
            tile = tile / 2
            tiles.append(self.decoder(tile))
        return torch.cat(tiles)

model = Autoencoder().cuda()
latents = torch.zeros(6144, 1024, device="cuda")
model.decode(latents)
"""


def test_passes_with_a_graph_in_a_program_that_does_not_train_need_none() -> None:
    found = cells.post_mortem(TILES, "120MiB")
    first = found.suggestions[0]
    assert first.text == "Evaluate without a graph, if no backward pass follows."
    assert "the program has no optimizer and has run no backward pass" in found.sentences[-1]
    assert cells.run(f"{first.code.splitlines()[0]}\n{textwrap.indent(TILES, '    ')}", "120MiB")[1] is None
    # With an optimizer the graphs are those of a loss to come.
    trains = TILES.replace("latents =", "optimizer = torch.optim.SGD(model.parameters())\nlatents =")
    assert cells.post_mortem(trains, "120MiB").cause is not Cause.HELD


SWITCHES = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4096, 1024, bias=False, device="cuda") for _ in range(10)])

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)

class Manager:
    def switch(self):
        {before}
        self.model = Model()

manager = Manager()
for _ in range(3):
    manager.switch()
    with torch.no_grad():
        manager.model(torch.zeros(8, 4096, device="cuda"))
"""


def test_a_model_that_is_kept_while_the_next_is_built_is_named() -> None:
    found = cells.post_mortem(SWITCHES.format(before="pass"), "250MiB")
    # A layer has 16 MiB: 10 of the model before, 4 of the one that is being built.
    assert dict(found.by_category)["parameter"] == 14 * 16 << 20
    assert "unknown" not in dict(found.by_category)
    first = found.suggestions[0]
    assert (first.code, first.frees, first.fits) == ("del self.model, manager.model", 160 << 20, True)
    assert not any("batch" in each.text or "train" in each.text for each in found.suggestions), found.text
    assert cells.run(SWITCHES.format(before="self.model = None"), "250MiB")[1] is None


@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        ("model[-1]", "Keep the weights in 16 bits."),
        ("model", "Use an optimizer with less state, such as SGD, Adafactor or 8-bit Adam, or weights in 16 bits."),
    ],
)
def test_little_that_is_trained_needs_no_other_optimizer(trained: str, expected: str) -> None:
    source = f"""
model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)], nn.Linear(2048, 8)).cuda().requires_grad_(False)
optimizer = torch.optim.Adam({trained}.requires_grad_().parameters())
for _ in range(2):
    model(torch.zeros(512, 2048, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.zeros(96, 1024, 1024, device="cuda")
"""
    # 128 MiB of weights; all of them trained have as much of gradients, and twice of state.
    found = cells.post_mortem(source, "160MiB" if trained != "model" else "450MiB")
    assert expected in [each.text for each in found.suggestions], found.text


RESUMED = """
import io

def model_and_optimizer():
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).cuda()
    return model, torch.optim.Adam(model.parameters())

def train(model, optimizer, batch):
    model(torch.zeros(batch, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

file = io.BytesIO()
model, optimizer = model_and_optimizer()
train(model, optimizer, 8)
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, file)
file.seek(0)
del model, optimizer
checkpoint = torch.load(file, map_location="cuda")
model, optimizer = model_and_optimizer()
model.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
{then}
train(model, optimizer, 1024)
"""


def test_a_checkpoint_that_a_variable_keeps_counts_with_all_its_weights() -> None:
    found = cells.post_mortem(RESUMED.format(then=""), "192MiB")
    # 8 weights of 4 MiB in the model and in the checkpoint. The optimizer has taken over the checkpoint's two averages
    # of each, and its step, which `map_location` has moved to the GPU: a block of 512 bytes.
    categories = dict(found.by_category)
    assert (categories["parameter"], categories["optimizer state"]) == (64 << 20, (64 << 20) + 8 * 512)
    assert found.cause is Cause.HELD, found.text
    first = found.suggestions[0]
    assert (first.code, first.frees, first.fits) == ("del checkpoint", 32 << 20, True)
    assert cells.run(RESUMED.format(then=first.code), "192MiB")[1] is None


def test_a_model_with_an_optimizer_is_not_to_be_deleted_while_another_is_built() -> None:
    source = """
def network():
    return nn.Sequential(*[nn.Linear(1024, 4096, bias=False, device="cuda") for _ in range(6)])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network()

generator = Net()
optimizer = torch.optim.Adam(generator.parameters())
discriminator = Net()
"""
    # A network has 6 x 16 MiB.
    found = cells.post_mortem(source, "170MiB")
    assert not any("generator" in each.code for each in found.suggestions), found.text
    without = source.replace("optimizer =", "# optimizer =")
    assert cells.post_mortem(without, "170MiB").suggestions[0].code == "del generator"


def test_gradients_of_one_backward_pass_are_no_leak() -> None:
    source = """
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
weights = dict(model.named_parameters())
for _ in range(20):
    output = torch.func.functional_call(model, weights, (torch.randn(256, 1024, device="cuda"),))
    gradients = torch.autograd.grad(output.square().mean(), list(weights.values()), create_graph=True)
    weights = {name: weight - 0.1 * each for (name, weight), each in zip(weights.items(), gradients)}
torch.func.functional_call(model, weights, (torch.randn(256, 1024, device="cuda"),)).mean().backward()
optimizer.step()
"""
    found = cells.post_mortem(source, "300MiB")
    assert found.cause is not Cause.LEAK, found.text


def test_the_little_that_grows_is_no_cause() -> None:
    source = """
cell, head = nn.GRUCell(128, 1024).cuda(), nn.Linear(1024, 64).cuda()
optimizer = torch.optim.Adam([*cell.parameters(), *head.parameters()])
sequence = torch.randn(200, 256, 128, device="cuda")
state, outputs = torch.zeros(256, 1024, device="cuda"), []
for part in sequence:
    state = cell(part, state)
    outputs.append(head(state))
torch.stack(outputs).square().mean().backward()
optimizer.step()
"""
    # An output has 64 KiB, and the graph of a call of the cell more than 4 MiB.
    found = cells.post_mortem(source, "200MiB")
    assert found.cause is Cause.TOO_MUCH, found.text


def test_models_that_a_list_collects_are_not_to_be_deleted() -> None:
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4096, 2048, device="cuda")

models = []
for _ in range(10):
    models.append(Net())
"""
    found = cells.post_mortem(source, "200MiB")
    assert found.cause is Cause.TOO_MUCH, found.text
    assert not any("models" in each.code for each in found.suggestions)


PIPELINE = """
class Pipeline:
    def __init__(self):
        self.encoder = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(20)]).cuda()
        self.decoder = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 1024)).cuda()
    @torch.no_grad()
    def __call__(self, batch):
        code = self.encoder(batch)
        {between}
        return self.decoder(code.repeat(256, 1))
pipeline = Pipeline()
pipeline(torch.zeros(32, 1024, device="cuda"))
"""


def test_a_model_of_which_the_failing_call_uses_nothing_is_to_wait_on_the_cpu() -> None:
    found = cells.post_mortem(PIPELINE.format(between="pass"), "256MiB")
    # 80 MiB and 32 MiB of weights; 32 MiB of inputs of the decoder, and 128 MiB between its layers.
    assert found.cause is Cause.TOO_MUCH, found.text
    first = found.suggestions[0]
    assert (first.code, first.fits) == ("self.encoder.cpu()", True), found.text
    assert cells.run(PIPELINE.format(between=first.code), "256MiB")[1] is None


FOLDS = """
def split(data, fold):
    rows = torch.cat([torch.arange(fold), torch.arange(fold + 1, 8)]).cuda()
    return data[rows], data[fold].clone()
data, folds = torch.randn(8, 1 << 20, device="cuda"), []
for fold in range(8):
    folds.append(split(data, fold))
for train, test in folds:
    print(train.mean(), test.mean())
"""


# The data are 32 MiB and each fold as much: the third or the fourth does not fit any more.
@pytest.mark.parametrize(("gpu", "collected"), [("120MiB", 2), ("150MiB", 3)])
def test_a_list_that_is_being_filled_is_not_to_be_deleted(gpu: str, collected: int) -> None:
    found = cells.post_mortem(FOLDS, gpu)
    assert found.cause is Cause.TOO_MUCH, found.text
    assert not any("del folds" in each.code for each in found.suggestions), found.text
    first = found.suggestions[0]
    assert first.text.startswith("Keep what `folds` collects on the CPU")
    assert (first.frees, first.fits) == (collected << 25, True), found.text
    followed = FOLDS.replace("data[rows], data[fold].clone()", "data[rows].cpu(), data[fold].cpu()")
    assert cells.run(followed.replace("train.mean()", "train.cuda().mean()"), gpu)[1] is None


def test_values_and_indices_of_an_earlier_call_are_no_list_that_is_being_filled() -> None:
    found = cells.post_mortem(
        """
data = torch.randn(4, 1 << 20, device="cuda")
def highest():
    return (2 * data).cummax(0)
for _ in range(3):
    pair = highest()
""",
        "90MiB",
    )
    # The data are 16 MiB, and so are their doubles and the values; the indices are 32. That makes 80 MiB in the first
    # call. In the second one, which still has the results of the first, the doubles fit and the values do not.
    assert [(each.what, each.holder) for each in found.held] == [(WhyHeld.OLD_VALUE, "pair")], found.text
