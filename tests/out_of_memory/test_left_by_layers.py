"""What layers keep as an attribute from call to call, such as their last attention map."""

from __future__ import annotations

from memexplore.out_of_memory.cause import Cause
from memexplore.out_of_memory.evidence_types import VariableUse
from memexplore.out_of_memory.value import PostMortem
from tests.out_of_memory.cells import post_mortem, run

NET = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.attn = nn.Linear(256, 768), None
    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        self.attn = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + self.attn @ v
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention() for _ in range(12)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
model = Net().cuda()
"""
EVALUATION = f"""{NET}
model.eval()
with torch.no_grad():
    for length in (512, 512, 1024):
        model(torch.randn(4, length, 256, device="cuda"))
"""
TRAINING = f"""{NET}
optimizer = torch.optim.SGD(model.parameters())
for length in (512, 512, 900):
    model(torch.randn(4, length, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FOLLOWED = ("return x + self.attn @ v", "x = x + self.attn @ v; self.attn = None; return x")


def left(found: PostMortem) -> list[tuple[str, int, int]]:
    """Name, layers and bytes of what layers are said to leave."""
    return [(each.name, each.tensors, each.size) for each in found.holders if each.use is VariableUse.ATTRIBUTE]


def test_attention_maps_of_an_evaluation_are_named_with_owner_layers_and_bytes() -> None:
    found = post_mortem(EVALUATION, "200MiB")
    assert found.request is not None
    assert found.request.layer == "layers.5", found.text
    # Maps of 4 × 1024 × 1024 numbers of layers 0 to 4, and of 4 × 512 × 512 of the 7 others, which the call replaces.
    size = 5 * (16 << 20) + 7 * (4 << 20)
    assert left(found) == [("model.layers.*.attn", 12, size)], found.text
    assert "108 MiB  67 %  held by model.layers.*.attn (left by 12 layers until the next call)" in found.text
    assert found.cause is Cause.TOO_MUCH
    last = found.suggestions[-1]
    assert (last.frees, last.fits) == (size, True)
    assert last.code == "layer.attn = None"
    assert run(EVALUATION.replace(*FOLLOWED), "200MiB")[1] is None


def test_attention_maps_of_the_step_before_are_named() -> None:
    found = post_mortem(TRAINING, "240MiB")
    assert found.request is not None
    assert found.request.layer == "layers.2", found.text
    # Layers 0 and 1 have new maps, which the backward pass of this step needs; the others those of the step before.
    assert left(found) == [("model.layers.*.attn", 10, 10 * (4 << 20))], found.text


def test_attention_maps_that_the_backward_pass_needs_are_not_named() -> None:
    found = post_mortem(TRAINING.replace("512, 512, 900", "640,"), "200MiB")
    assert found.request is not None
    assert (found.request.step, left(found)) == (1, []), found.text


def test_a_model_is_not_to_be_deleted_for_what_its_layers_leave() -> None:
    found = post_mortem(
        f"""{NET}
def grid():
    return torch.empty(160 << 20, dtype=torch.uint8, device="cuda")
with torch.no_grad():
    model(torch.randn(4, 512, 256, device="cuda"))
grid()
""",
        "200MiB",
    )
    assert left(found) == [("model.layers.*.attn", 12, 12 * (4 << 20))], found.text
    assert not any(each.code == "del model" for each in found.suggestions), found.text
