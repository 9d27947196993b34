"""Static outputs of a view for notebooks without a running kernel: an SVG image in HTML, and plain text."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from typing import Any

from IPython.display import display

from memexplore.analysis.verdict_content import verdict_content
from memexplore.figures.static import svg
from memexplore.figures.text import timeline_text
from memexplore.tape import Tape


def image_html(tape: Tape, class_name: str) -> str:
    """Return the timeline as an ``<img>`` element with a CSS class."""
    data = base64.b64encode(svg(tape).encode()).decode()
    verdict = html.escape(verdict_content(tape).text)
    source = f"data:image/svg+xml;base64,{data}"
    return f'<img class="{class_name}" style="max-width: 100%" alt="{verdict}" src="{source}">'


def static_output(tape: Tape, class_name: str, sentence: str = "") -> dict[str, str]:
    """Return the MIME bundle of an output that follows a widget, and hides it in a notebook without a kernel.

    JupyterLab shows an error in place of a widget without a kernel, and ignores the widget's other formats. `sentence`
    stands above the image. The widget, while it is alive, hides the output (`frontend/page.js`).
    """
    live, dead = ".memexplore", f".jp-OutputArea-child:has(+ .jp-OutputArea-child .{class_name})"
    style = f"<style>{dead}:not(:has({live})) {{ display: none }}</style>"
    paragraph = f"<p>{html.escape(sentence)}</p>" if sentence else ""
    text = timeline_text(tape)
    return {
        "text/html": f"{style}{paragraph}{image_html(tape, class_name)}",
        "text/plain": f"{sentence}\n\n{text}" if sentence else text,
    }


class StaticOutputs:
    """The static outputs of one widget in a notebook, which change with it."""

    def __init__(self) -> None:
        self._shown: list[Any] = []

    def display(self, output: dict[str, str]) -> None:
        """Add a static output to the cell that runs."""
        shown = display(output, raw=True, display_id=True)
        if shown is not None:
            self._shown.append(shown)

    def update(self, make: Callable[[], dict[str, str]]) -> None:
        """Replace all of them; without one nothing is made."""
        output = make() if self._shown else {}
        for shown in self._shown:
            shown.update(output, raw=True)
