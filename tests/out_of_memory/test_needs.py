"""Steps that need too much: the first suggestion names what takes the most, and the cell fits with it."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from memexplore.out_of_memory.cause import Cause
from tests.out_of_memory.cells import post_mortem, run


class Need(NamedTuple):
    source: str
    gpu: str
    suggestion: str
    changes: tuple[tuple[str, str], ...]
    cause: Cause = Cause.TOO_MUCH


NEEDS = {
    "a list of batches on the GPU": Need(
        """
model = nn.Linear(1024, 1024).cuda()
batches = [torch.zeros(4096, 1024).cuda() for _ in range(16)]
for batch in batches:
    model(batch).sum().backward()
""",
        "256MiB",
        "Keep the data on the CPU",
        ((").cuda() for", ") for"), ("model(batch)", "model(batch.cuda())")),
    ),
    "a result that is concatenated again with each call": Need(
        """
features = torch.zeros(0, 1024, device="cuda")
for _ in range(40):
    features = torch.cat([features, torch.zeros(1024, 1024, device="cuda")])
""",
        "200MiB",
        "join them after the loop",
        (
            ('torch.zeros(0, 1024, device="cuda")', "[]"),
            (
                'features = torch.cat([features, torch.zeros(1024, 1024, device="cuda")])',
                'features.append(torch.zeros(1024, 1024, device="cuda").cpu())',
            ),
        ),
    ),
    "results that are concatenated at last": Need(
        """
model = nn.Linear(1024, 1024).cuda()
outputs = []
with torch.no_grad():
    for _ in range(24):
        batch = torch.zeros(1024, 1024, device="cuda")
        outputs.append(model(batch))
predictions = torch.cat(outputs)
""",
        "160MiB",
        "`outputs` keeps tensors of every step",
        (("model(batch))", "model(batch).cpu())"),),
        Cause.LEAK,
    ),
    "results of a function that are stacked": Need(
        """
@torch.inference_mode()
def evaluate(model):
    results = [model(torch.zeros(1024, 1024, device="cuda")) for _ in range(24)]
    return torch.stack(results)
evaluate(nn.Linear(1024, 1024).cuda())
""",
        "160MiB",
        "`results` keeps tensors of every step",
        (('device="cuda"))', 'device="cuda")).cpu()'),),
        Cause.LEAK,
    ),
    "data that is concatenated on the GPU": Need(
        """
parts = [torch.zeros(1024, 1024).cuda() for _ in range(24)]
data = torch.cat(parts)
""",
        "160MiB",
        "Keep the data on the CPU",
        ((").cuda() for", ") for"), ("torch.cat(parts)", "torch.cat(parts).cuda()")),
    ),
    "one tensor of data on the GPU": Need(
        """
data = torch.zeros(60000, 1024).cuda()
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).cuda()
for number in range(3):
    model(data[number * 4096 : (number + 1) * 4096]).sum().backward()
""",
        "330MiB",
        "batch = data[first:last].cuda()",
        ((").cuda()\nmodel", ")\nmodel"), ("4096])", "4096].cuda())")),
    ),
    "distances of all pairs": Need(
        """
data = torch.randn(20000, 64, device="cuda")
nearest = torch.cdist(data, data).topk(5, largest=False).indices
""",
        "1GiB",
        "for part in data.split(rows): ...",
        (
            (
                "torch.cdist(data, data).topk(5, largest=False).indices",
                "[torch.cdist(part, data).topk(5, largest=False).indices for part in data.split(1000)]",
            ),
        ),
    ),
    "an embedding with its optimizer": Need(
        """
model = nn.Sequential(nn.Embedding(100_000, 256, sparse=False), nn.Linear(256, 1)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.0, foreach=False)
for _ in range(2):
    model(torch.zeros(64, 50, dtype=torch.long, device="cuda")).sum().backward()
    optimizer.step()
""",
        "180MiB",
        "sparse gradients",
        (("sparse=False", "sparse=True"),),
    ),
    "attention matrices in the first forward pass": Need(
        """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(512, 1536), nn.Linear(512, 512)
    def forward(self, x):
        query, key, value = self.project(x).view(*x.shape[:2], 3, 8, 64).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / 8
        weights = F.dropout(scores.softmax(-1), 0.1)
        return x + self.out((weights @ value).transpose(1, 2).reshape(x.shape))
model = nn.Sequential(*[Attention() for _ in range(4)]).cuda()
model(torch.zeros(4, 4096, 512, device="cuda")).sum().backward()
""",
        "T4",
        "smaller batch",
        (("(4, 4096", "(1, 4096"),),
    ),
}


@pytest.mark.parametrize("name", NEEDS)
def test_first_suggestion(name: str) -> None:
    need = NEEDS[name]
    found = post_mortem(need.source, need.gpu)
    assert found.cause is need.cause, found.text
    assert need.suggestion in f"{found.suggestions[0].text}\n{found.suggestions[0].code}", found.text
    source = need.source
    for change in need.changes:
        assert change[0] in source
        source = source.replace(*change)
    assert run(source, need.gpu)[1] is None


def test_a_tensor_that_a_layer_reads_whole_is_not_to_be_moved_in_parts() -> None:
    source = """
nodes = torch.zeros(60000, 1024).cuda()
model = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 1024)).cuda()
model(nodes).sum().backward()
"""
    assert not any("on the CPU" in each.text for each in post_mortem(source, "400MiB").suggestions)


def test_a_cache_inside_a_layer_is_to_be_made_before_the_loop() -> None:
    source = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.keys = nn.Linear(512, 512), torch.zeros(0, 32, 512, device="cuda")
    def forward(self, x):
        self.keys = torch.cat([self.keys, self.project(x)])
        return x + self.keys.mean(0)
model = nn.Sequential(*[Attention() for _ in range(4)]).cuda().eval()
x = torch.zeros(1, 32, 512, device="cuda")
with torch.no_grad():
    for _ in range(400):
        x = model(x)
"""
    first = post_mortem(source, "150MiB").suggestions[0]
    assert "make the whole before the loop and write each part into it" in first.text
    written = source.replace("torch.zeros(0, 32", "torch.empty(400, 32").replace(
        "self.keys = torch.cat([self.keys, self.project(x)])", "self.keys[0:1] = self.project(x)"
    )
    assert run(written, "150MiB")[1] is None


def test_parts_that_a_graph_needs_stay_where_they_are() -> None:
    found = post_mortem(
        """
cell, state = nn.RNNCell(1024, 1024).cuda(), torch.zeros(1024, 1024, device="cuda")
states = []
for _ in range(20):
    state = cell(state, state)
    states.append(state)
torch.stack(states).sum().backward()
""",
        "180MiB",
    )
    assert found.request is not None
    assert found.request.op == "aten::stack"
    assert not any(".cpu()" in each.code for each in found.suggestions[:1]), found.text


def test_little_that_is_held_is_no_suggestion() -> None:
    source = """
small = torch.zeros(8, device="cuda")
model = nn.Linear(1024, 1024).cuda()
model(torch.zeros(65536, 1024, device="cuda")).sum().backward()
"""
    assert not any("small" in each.code for each in post_mortem(source, "256MiB").suggestions)


def test_copies_of_one_call_are_no_growth() -> None:
    # Attention copies query, key and value at one place: 3 blocks of a layer, in the only call of `reference`.
    found = post_mortem(
        """
def layers():
    return nn.Sequential(*[nn.TransformerEncoderLayer(128, 4, 512, batch_first=True) for _ in range(2)]).cuda()

reference, policy = layers(), layers()
batch = torch.zeros(64, 128, 128, device="cuda")
target = reference(batch)
loss = F.mse_loss(policy(batch), target)
""",
        "200MiB",
    )
    assert found.cause is Cause.TOO_MUCH, found.sentences


def test_gaps_below_a_cache_that_grows_are_no_fragmentation() -> None:
    # Each token adds 64 KiB to each of the 8 tensors, so that no gap is large enough for long.
    found = post_mortem(
        """
cache = [torch.zeros(16, 0, 1024, device="cuda") for _ in range(8)]
for token in range(1000):
    for layer in range(8):
        cache[layer] = torch.cat([cache[layer], torch.zeros(16, 1, 1024, device="cuda")], 1)
""",
        "130MiB",
    )
    assert found.cause is Cause.TOO_MUCH, found.sentences


def test_gaps_beside_a_history_that_grows_are_no_fragmentation() -> None:
    # LBFGS keeps two vectors of 8 MiB for each of up to 100 iterations.
    found = post_mortem(
        """
model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024)).cuda()
optimizer = torch.optim.LBFGS(model.parameters(), history_size=100)
batch = torch.randn(64, 1024, device="cuda")

def closure():
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    return loss

for _ in range(20):
    optimizer.step(closure)
""",
        "200MiB",
    )
    assert found.cause is Cause.TOO_MUCH, found.sentences


def test_a_request_is_compared_with_those_of_earlier_iterations() -> None:
    found = post_mortem(
        """
model = nn.Linear(1024, 1024).cuda()
for boxes in (16, 32, 16, 32, 4096):
    anchors = model(torch.zeros(1024, 1024, device="cuda"))
    distances = torch.zeros(boxes, 1, 1024, device="cuda") + anchors[:64]
    distances.sum().backward()
""",
        "512MiB",
    )
    assert found.cause is Cause.TOO_MUCH, found.text
    # 32 x 64 x 1024 float32 numbers.
    assert "Before, the same call asked for at most 8.00 MiB" in found.sentences[-1]
    assert "earlier rounds asked for at most 8.00 MiB here" in found.suggestions[0].text


def test_a_step_is_compared_with_those_before_it_and_so_is_its_input() -> None:
    found = post_mortem(
        """
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 4).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for length in (128, 140, 100, 120, 900):
    optimizer.zero_grad()
    model(torch.randn(16, length, 256, device="cuda")).sum().backward()
    optimizer.step()
""",
        "600MiB",
    )
    assert found.cause is Cause.TOO_MUCH, found.text
    assert "input of float32[16, 140, 256] instead of float32[16, 900, 256]" in found.sentences[-1]
    assert "earlier inputs were at most float32[16, 140, 256]" in found.suggestions[0].text


def test_a_step_that_does_more_with_the_same_input_is_compared_with_those_before_it() -> None:
    found = post_mortem(
        """
model = nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batch = torch.randn(1024, 1024, device="cuda")
for depth in (4, 400):
    optimizer.zero_grad()
    result = batch
    for _ in range(depth):
        result = model(result).relu()
    result.sum().backward()
    optimizer.step()
""",
        "256MiB",
    )
    assert found.cause is Cause.TOO_MUCH, found.text
    # Of each call 4 MiB are kept: the ReLU's result. The linear layer's is alive while it is made.
    assert "This step is larger than those before it" in found.sentences[-1]
    assert "with an input" not in found.sentences[-1]


def test_a_step_that_fails_for_the_state_that_the_first_one_has_made_is_not_called_larger() -> None:
    found = post_mortem(
        """
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
""",
        "460MiB",
    )
    assert found.request.step == 2, found.text
    assert "larger than those before" not in found.text


def test_what_a_generator_expression_goes_through_is_in_use() -> None:
    found = post_mortem(
        """
def features(layers, value):
    values = []
    for layer in layers:
        value = layer(value)
        values.append(value)
    return values

layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8)).cuda()
optimizer = torch.optim.SGD(layers.parameters(), 0.1)
first = features(layers, torch.randn(2048, 1024, device="cuda"))
second = features(layers, torch.randn(2048, 1024, device="cuda"))
loss = sum((one - other).square().mean() for one, other in zip(first, second))
""",
        "210MiB",
    )
    # Weights 32 MiB, two inputs and sixteen values of 8 MiB each: 176 MiB; the third term of the sum fails.
    assert found.cause is Cause.TOO_MUCH, found.text
    assert "del first" not in found.text
