"""What to change: the optimizer where it has state, else the weights."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import memexplore
from memexplore import capture
from memexplore.postmortem.html import html
from memexplore.postmortem.value import post_mortem
from tests.postmortem import cells

LESS_STATE = "Use an optimizer with less state"
FEWER_WEIGHTS = "Keep the weights in 16 bits, or train fewer of them"


def suggested(optimizer: type[torch.optim.Optimizer], steps: int) -> list[str]:
    """The texts for a model that runs out of memory after some steps with a small batch."""
    with memexplore.virtual("64MiB"), capture.record() as recording, pytest.raises(torch.OutOfMemoryError):
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


def test_before_the_first_update_the_state_is_unknown() -> None:
    assert any(text.startswith(LESS_STATE) for text in suggested(torch.optim.SGD, 0))


def test_what_a_run_uses_is_not_suggested() -> None:
    with memexplore.virtual("64MiB"), capture.record() as recording, pytest.raises(torch.OutOfMemoryError):
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


def test_a_forward_pass_without_gradients_is_not_to_be_checkpointed() -> None:
    with memexplore.virtual("64MiB"), capture.record() as recording, pytest.raises(torch.OutOfMemoryError):
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


@pytest.mark.parametrize("update", ["total += F.mse_loss(model(x), x)", "total = total + F.mse_loss(model(x), x)"])
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


def test_names_between_backticks_are_code_on_a_page() -> None:
    source = """
def train():
    for _ in range(2):
        kept = torch.zeros(14, 1 << 18, device="cuda")

train()
"""
    found = cells.post_mortem(source, "24MiB")
    assert any("`kept`" in suggestion.text for suggestion in found.suggestions)
    page = html(found)
    assert "<code>kept</code>" in page
    assert "`" not in page
