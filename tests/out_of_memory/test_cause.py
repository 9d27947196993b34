"""Free memory in pieces: the cause of a failed pass only where the rest of the pass is known to fit too."""

from __future__ import annotations

import pytest

from memexplore.out_of_memory.cause import Cause
from tests.out_of_memory.cells import post_mortem, run

# From step `first` on, 10 segments of 20 MiB have a gap of 9 MiB each: an activation takes 16 MiB.
IN_PIECES = """
def gaps():
    warm = [torch.empty(20 << 20, dtype=torch.uint8, device="cuda") for _ in range(10)]
    del warm
    return [torch.empty(11 << 20, dtype=torch.uint8, device="cuda") for _ in range(10)]

model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.ReLU())]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = None
for step in range(3):
    if step == {first}:
        kept = gaps()
    model(torch.randn(4096, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(len(kept))
"""


@pytest.mark.parametrize(
    ("first", "gpu", "cause"),
    [
        # With expandable segments the backward pass fails, or the one of the next step.
        (0, "280MiB", Cause.TOO_MUCH),
        (0, "300MiB", Cause.TOO_MUCH),
        (2, "280MiB", Cause.TOO_MUCH),
        (2, "340MiB", Cause.FRAGMENTATION),
    ],
)
def test_fragmentation_is_the_cause_where_the_rest_of_the_pass_fits(
    first: int, gpu: str, cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = IN_PIECES.format(first=first)
    found = post_mortem(source, gpu)
    assert found.cause is cause, found.text
    assert found.fits_expandable
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert (run(source, gpu)[1] is None) is (cause is Cause.FRAGMENTATION)
