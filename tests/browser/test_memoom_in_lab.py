"""Out of memory in a real JupyterLab: the post-mortem, its buttons, and the kernel afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import Notebook
from tests.browser.waiting import expect

pytestmark = pytest.mark.browser

SET_UP = """%load_ext memexplore
import torch
%memgpu 256MiB
%memoom on"""
MODEL = """class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        blocks = (torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU()) for _ in range(8))
        self.blocks = torch.nn.ModuleList(blocks)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(batch):
    optimizer.zero_grad()
    loss = model(torch.randn(batch, 1024, device="cuda"))
    loss.backward()
    optimizer.step()
before = torch.cuda.memory_allocated()"""
# 8 blocks keep 2 * 3000 * 1024 * 4 bytes each: 188 MiB, with 32 MiB of weights and 32 MiB of gradients.
FAILS = "step(3000)"
ROW = ".memexplore-memoom .widget-hbox"


def open_failed(notebook: Callable[..., Any], *cells: str) -> Any:
    book = notebook(SET_UP, MODEL, FAILS, *cells)
    for number in range(3):
        book.run(number)
    assert [error.partition(":")[0] for error in book.errors()] == ["OutOfMemoryError"]
    book.page.get_by_role("button", name="Free what the failed cell holds").scroll_into_view_if_needed()
    return book


def note_of(book: Any, text: str) -> str:
    """Wait until the last line of the buttons has a text, and return it."""
    found = book.page.locator(".memexplore-memoom [role=status]", has_text=text)
    found.wait_for(timeout=120_000)
    return found.inner_text()


CUT_BUTTONS = """() => [...document.querySelectorAll('.memexplore-memoom button')]
    .filter(button => button.checkVisibility() && button.scrollWidth > button.clientWidth)
    .map(button => button.textContent)"""

# Lines of code scroll by themselves.
CUT_TEXTS = """() => [...document.querySelectorAll('.memexplore-memoom .widget-html')]
    .filter(text => text.checkVisibility() && text.scrollWidth > text.clientWidth + 1)
    .map(text => text.textContent)"""


def shot(book: Any, name: str) -> None:
    """Write a picture of the page into the folder MEMOOM_SHOTS, where that is set: for eyes, not for a test."""
    if folder := os.environ.get("MEMOOM_SHOTS"):
        book.page.screenshot(path=f"{folder}/{name}.png")


def test_the_kernel_goes_on_and_everything_is_given_back(notebook: Callable[..., Any]) -> None:
    book = open_failed(
        notebook,
        "step(300)\nprint('fits')",
        "model.zero_grad()\n%memoom free\nprint(torch.cuda.memory_allocated() - before)",
    )
    kinds = [output["output_type"] for output in book.outputs(2)]
    assert kinds[-1] == "error"  # the ordinary traceback, below the answer
    assert book.page.locator(".memexplore-post-mortem").count() == 1
    assert "Out of memory." in book.page.locator(".memexplore-post-mortem").inner_text()
    shot(book, "failed")
    book.page.get_by_role("button", name="Free what the failed cell holds").click()
    assert "Freed" in note_of(book, "Freed")
    book.run(3)
    assert book.text(3) == "fits\n"
    book.run(4)
    assert int(book.text(4).split()[-1]) == 0


def test_settings_are_found_and_one_is_applied_and_undone(notebook: Callable[..., Any]) -> None:
    book = open_failed(notebook, FAILS, "print(sum('forward' in vars(each) for each in model.modules()))")
    book.page.get_by_role("button", name="Find what would have fitted").click()
    assert "Done after" in note_of(book, "Done after")
    # The list of settings is drawn again after the note: a row clicked before that does nothing.
    book.run(4)
    assert int(book.text(4)) == 0
    row = book.page.locator(ROW).filter(has_text="checkpoint").first
    shot(book, "found")
    book.page.set_viewport_size({"width": 800, "height": 1000})
    book.settle()
    assert book.page.evaluate(CUT_BUTTONS) == []
    book.page.set_viewport_size({"width": 1400, "height": 1000})
    row.get_by_role("button", name="Apply").click()
    assert note_of(book, "Applied to the model").endswith("Run the cell again.")
    assert "Applied to the model" in row.get_by_role("status").inner_text()  # beside its button
    shot(book, "applied")
    book.run(3)
    assert len(book.errors()) == 1  # that of the first run
    book.run(4)
    assert int(book.text(4)) > 0
    book.page.get_by_role("button", name="Undo", exact=True).click()
    note_of(book, "The model is as it was.")
    book.run(4)
    assert int(book.text(4)) == 0


TRAINING = """for _ in range(3):
    loss = model(torch.randn(3000, 1024, device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()"""


@pytest.mark.parametrize("magic", ["", "%%memprofile\n"])
def test_the_failed_cell_comes_again_changed_and_runs_to_its_end(notebook: Callable[..., Any], magic: str) -> None:
    book = notebook(SET_UP, MODEL, f"{magic}{TRAINING}", "%memoom cell")
    for number in range(4):
        book.run(number)
    assert [error.partition(":")[0] for error in book.errors()] == ["OutOfMemoryError"]
    shot(book, "changed_cell")
    changed = book.sources()[4]
    assert changed.startswith(f"{magic}%memoom free\n")
    assert "\n+ " in book.text(3)
    book.run(4)
    assert len(book.errors()) == 1  # that of the first run


CONVOLUTIONS = """model = torch.nn.Sequential(
    *(layer for n in (3, 32, 32, 32) for layer in (torch.nn.Conv2d(n, 32, 3, padding=1), torch.nn.ReLU())),
    torch.nn.Flatten(), torch.nn.Linear(32 * 32 * 32, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())"""
LOADER = """from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(1024, 3, 32, 32), torch.randint(10, (1024,)))
loader = DataLoader(data, batch_size=512, shuffle=True)
for epoch in range(2):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
        loss.backward()
        optimizer.step()
print("trained")"""
BATCH = """batch_size = 3000
for _ in range(3):
    optimizer.zero_grad()
    x = torch.randn(batch_size, 1024, device="cuda")
    loss = model(x)
    loss.backward()
    optimizer.step()
print("trained")"""
LANGUAGE = """from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=5000, n_positions=256)
model = GPT2LMHeadModel(config).cuda()
optimizer = torch.optim.AdamW(model.parameters())"""
TOKENS = """for step in range(3):
    tokens = torch.randint(5000, (16, 256), device="cuda")
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")"""
FUNCTION = """def train(model, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(3000, 1024, device="cuda"))
        loss.backward()
        optimizer.step()
train(model, 3)
print("trained")"""
HAS_RUN = f"number => {{ {Notebook.CURRENT} return panel.content.widgets[number].model.executionState === 'idle' }}"
PROGRAMS = {
    "a loop": (MODEL, f"{TRAINING}\nprint('trained')"),
    "a profiled loop": (MODEL, f"%%memprofile\n{TRAINING}\nprint('trained')"),
    "a loop with a variable for its batch": (MODEL, BATCH),
    "a loop over a data loader": (CONVOLUTIONS, LOADER),
    "a language model": (LANGUAGE, TOKENS),
    "a loop in a function": (MODEL, FUNCTION),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_from_the_button_to_the_finished_cell(notebook: Callable[..., Any], name: str) -> None:
    book = notebook(SET_UP, *PROGRAMS[name])
    for number in range(3):
        book.run(number)
    assert [error.partition(":")[0] for error in book.errors()] == ["OutOfMemoryError"]
    # What to do stands above the traceback.
    assert [output["output_type"] for output in book.outputs(2)][-1] == "error"
    book.page.get_by_role("button", name="Change the cell so that it fits").click()
    run = book.page.get_by_role("button", name="Put it below and run it")
    run.wait_for(timeout=120_000)
    run.scroll_into_view_if_needed()
    book.page.set_viewport_size({"width": 800, "height": 1000})
    book.settle()
    assert book.page.evaluate(CUT_TEXTS) == []
    book.page.set_viewport_size({"width": 1400, "height": 1000})
    book.settle()
    shot(book, f"changed_{name.replace(' ', '_')}")
    run.click()
    expect(book.page.get_by_role("button", name="It runs below")).to_be_visible()
    book.page.wait_for_function(HAS_RUN, arg=3)
    shot(book, f"ran_{name.replace(' ', '_')}")
    assert "trained" in book.text(3)
    assert len(book.errors()) == 1  # that of the first run


def test_a_search_is_stopped_and_keeps_what_it_has_found(notebook: Callable[..., Any]) -> None:
    book = open_failed(notebook, "print('a cell runs meanwhile')")
    book.page.get_by_role("button", name="Find what would have fitted").click()
    book.page.get_by_role("button", name="Stop", exact=True).click()
    assert "Stopped after" in note_of(book, "Stopped after")
    book.run(3)
    assert book.text(3) == "a cell runs meanwhile\n"


def test_settings_of_a_cell_with_two_models_are_found(notebook: Callable[..., Any]) -> None:
    second = "critic = Net().cuda()\nof_critic = torch.optim.SGD(critic.parameters(), lr=0.1)"
    cell = """batch_size = 1500
optimizer.zero_grad()
of_critic.zero_grad()
x = torch.randn(batch_size, 1024, device="cuda")
(model(x) + critic(x)).backward()
optimizer.step()
of_critic.step()"""
    book = notebook(SET_UP, MODEL, second, cell)
    for number in range(4):
        book.run(number)
    assert [error.partition(":")[0] for error in book.errors()] == ["OutOfMemoryError"]
    book.page.get_by_role("button", name="Find what would have fitted").click()
    assert "Done after" in note_of(book, "Done after")
    shot(book, "cell")
    expect(book.page.locator(ROW).filter(has_text="batch_size = ")).to_have_count(1)
    assumed = book.page.locator(".memexplore-memoom", has_text="Assumed: The cell was run again from its first line")
    expect(assumed).to_have_count(1)
    book.page.locator(ROW).filter(has_text="checkpoint").first.get_by_role("button", name="Apply").click()
    assert note_of(book, "Applied to 2 models").endswith("Run the cell again.")
    book.run(3)
    assert book.errors() == []
