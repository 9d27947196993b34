"""Verdicts in a real JupyterLab: a cell without the GPU, a cell that raises, and a caught out-of-memory error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

CHOICE = """import torch
%load_ext memexplore
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 8).to(device)"""
TRAINING = """%%memprofile --gpu T4
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 8, device=device)).sum().backward()
optimizer.step()"""
RAISING = """%%memprofile --gpu T4
x = torch.ones(3, device="cuda")
raise ValueError(f"{int(x.long().max())} is wrong")"""
CAUGHT = """%%memprofile --gpu T4
try:
    torch.empty(2**36, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    torch.empty(2**30, dtype=torch.uint8, device="cuda")"""


def test_verdicts(notebook: Callable[..., Any]) -> None:
    book = notebook(CHOICE, TRAINING, RAISING, CAUGHT)
    for number in range(4):
        book.run(number)
    book.page.wait_for_function("document.querySelectorAll('.memexplore-sentence').length === 3")
    book.page.wait_for_function(
        "[...document.querySelectorAll('.memexplore-sentence')].every(line => line.textContent.trim())"
    )
    read = "name => [...document.querySelectorAll(name)].map(line => line.textContent)"
    sentences, second, more = (book.page.evaluate(read, f".memexplore-{name}") for name in ("sentence", "fits", "oom"))
    assert sentences[0] == "Nothing trained on the Tesla T4: Linear trained on the CPU"
    assert second[0].startswith(
        "device is the CPU, set by a cell that ran before the virtual GPU was on: write %memgpu T4"
    )
    assert sentences[1].startswith("Ended by an error: ValueError: ")
    assert sentences[1].endswith("(In[3], line 3)")
    assert second[1].startswith("Peak so far ")
    assert second[2].startswith("Fits a Tesla T4")
    assert "after 1 out-of-memory error that the program caught" in second[2]
    # 2**36 bytes are 64 GiB.
    assert more[2].startswith("The program went on after 1 out-of-memory error: aten::empty requested 64.0 GiB")
