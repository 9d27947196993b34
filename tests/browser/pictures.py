"""`pytest tests/browser/pictures.py` takes the pictures of the README and the docs: look at each before a commit."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import REPOSITORY

pytestmark = [pytest.mark.browser, pytest.mark.slow]

IMAGES = REPOSITORY / "notebooks" / "images"
_CELL_WITH_UNET, _CELL_WITH_TRAINING = 3, 7
_GPT_2 = """import torch, transformers
import memexplore as mx
build = lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config())
tokens = torch.zeros(16, 1024, dtype=torch.long)
step = mx.Step(build, {"input_ids": tokens, "labels": tokens}, optimizer=torch.optim.AdamW)
explorer = mx.explore(step, gpu="T4")"""


def take(page: Any, name: str, height: int) -> None:
    """Write the picture of the view in a page, cut to a height in pixels."""
    box = page.locator(".memexplore").last.bounding_box()
    page.mouse.move(0, 0)
    page.screenshot(path=IMAGES / name, clip={**box, "height": min(box["height"], height)})


@pytest.fixture
def wide_page(notebook: Callable[..., Any]) -> Callable[..., Any]:
    """A function that opens a notebook of some cells in a high window without sidebars, and runs all but the last."""

    def opened(*cells: str, width: int) -> Any:
        book = notebook(*cells)
        book.page.set_viewport_size({"width": width, "height": 1600})
        book.page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
        for number in range(len(cells)):
            book.run(number)
        book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
        book.settle()
        book.page.locator(".memexplore").last.evaluate("view => view.scrollIntoView({ block: 'start' })")
        return book

    return opened


def test_a_cell(wide_page: Callable[..., Any]) -> None:
    notebook = json.loads((REPOSITORY / "notebooks" / "01_where_does_memory_go.ipynb").read_text())
    unet, training = ("".join(notebook["cells"][number]["source"]) for number in (_CELL_WITH_UNET, _CELL_WITH_TRAINING))
    imports = (
        "%load_ext memexplore\nimport memexplore as mx, torch\nimport torch.nn.functional as F\nfrom torch import nn"
    )
    book = wide_page(imports, unet, training, width=1180)
    take(book.page, "unet_on_a_virtual_t4.png", 665)


def test_the_explorer(wide_page: Callable[..., Any]) -> None:
    book = wide_page(_GPT_2, "explorer", width=1400)
    book.page.get_by_role("button", name="What would fit?").click()
    book.page.get_by_text("Done after").wait_for(timeout=900_000)
    book.page.get_by_text("precision fp16, accumulation 2", exact=True).first.click()
    book.settle()
    take(book.page, "explorer.png", 880)
