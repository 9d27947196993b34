"""Waiting for what the page shows, which follows messages of the kernel in promises and animation frames."""

from __future__ import annotations

from typing import Any


def expect(locator: Any) -> Any:
    """Return Playwright's assertions about a locator, each of which waits until it is true."""
    # Where playwright is missing, the modules of the tests are imported all the same.
    from playwright.sync_api import expect as assertions

    assertions.set_options(timeout=60_000)
    return assertions(locator)


def wait_for_output(book: Any, number: int, text: str) -> None:
    """Wait until the outputs of a cell contain a text, also while the cell runs."""
    book.page.wait_for_function(
        f"""([number, text]) => {{ {book.CURRENT}
            return JSON.stringify(panel.content.widgets[number].model.outputs.toJSON()).includes(text) }}""",
        arg=[number, text],
    )
