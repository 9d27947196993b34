"""The browser tabs of the tests, which share a loaded JupyterLab."""

from __future__ import annotations

from typing import Any

VIEWPORT = {"width": 1400, "height": 1000}
MOST_TESTS_OF_A_PAGE = 12
"""Views that are closed leave some memory to the page."""

MARK_AS_FIRST = "() => { globalThis.memexploreTests = 'not loaded again' }"
"""Marks a page, until it is loaded again."""

# A page that was loaded again, or has another theme, an open dialog or a value that a test left, is not used again.
CLOSE_DOCUMENTS = """async () => {
    const app = window.jupyterapp;
    const isAsLoaded = () => app && document.body.dataset.jpThemeLight === 'true' && !('Plotly' in globalThis)
        && !matchMedia('(prefers-color-scheme: dark)').matches && !document.querySelector('.jp-Dialog');
    if (!isAsLoaded() || !globalThis.memexploreTests) return false;
    for (const document of [...app.shell.widgets('main')]) {
        if (document.context?.model) document.context.model.dirty = false;  // else a dialog asks whether to save it
        document.close();
    }
    for (let frames = 0; frames < 100; frames++) {
        if (![...app.shell.widgets('main')].some((widget) => widget.context)) return isAsLoaded();
        await new Promise(done => setTimeout(done, 20));
    }
    return false }"""


class Pages:
    """The browser tab of a test: a page is loaded once and given to the next test if this one left it as it was.

    JupyterLab takes 4 s to load on a slow machine, and opens a notebook in 0.1 s.
    """

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium
        self._free: Any = None
        self._uses = 0

    def take(self, is_fresh: bool) -> Any:
        """Return a page: one that shows JupyterLab without a document if there is one, else an empty one."""
        if self._free is None or is_fresh or self._uses == MOST_TESTS_OF_A_PAGE:
            self.close()
            self._free = self._chromium.new_context(viewport=VIEWPORT).new_page()
            self._free.set_default_timeout(60_000)
            self._uses = 0
        self._uses += 1
        page, self._free = self._free, None
        return page

    def give_back(self, page: Any, is_reusable: bool) -> None:
        """Keep the page for the next test, or close it if it is not reusable or was changed."""
        if is_reusable and page.context.pages == [page] and page.evaluate(CLOSE_DOCUMENTS):
            page.context.clear_permissions()
            page.set_viewport_size(VIEWPORT)
            page.mouse.move(0, 0)
            self._free = page
        else:
            page.context.close()

    def close(self) -> None:
        """Close the page that no test has."""
        if self._free is not None:
            self._free.context.close()
            self._free = None
