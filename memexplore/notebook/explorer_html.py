"""HTML of the explorer: headline, error, hints and the selected layer, from sentences and reports."""

from __future__ import annotations

import html

from memexplore.knobs.report import ApplyReport

_MAX_ERROR_LENGTH = 400


def headline(sentence: str) -> str:
    """Return the sentence about the setting shown.

    >>> headline("Peak 3 GiB < 4 GiB")
    '<p>Peak 3 GiB &lt; 4 GiB</p>'
    """
    return f"<p>{html.escape(sentence)}</p>"


def error(text: str, sentence: str) -> str:
    """Return why a setting could not be run, and the sentence about the earlier setting that is still shown."""
    problem = " ".join(text.split())
    if len(problem) > _MAX_ERROR_LENGTH:
        problem = problem[: _MAX_ERROR_LENGTH - 1] + "…"
    return (
        f'<p class="memexplore-problem">{html.escape(problem)}</p>'
        f"<p>The chart still shows the previous setting: {html.escape(sentence)}</p>"
    )


def hints(applied: ApplyReport) -> str:
    """Return notes on the applied knobs, and the skipped sites with reasons."""
    parts = [f"<p>{html.escape(note)}</p>" for note in applied.note_texts]
    if applied.skipped:
        items = "".join(
            f"<li><b>{html.escape(site.site)}</b>: {html.escape(site.reason)}</li>" for site in applied.skipped
        )
        parts.append(f"<p>Not changed:</p><ul>{items}</ul>")
    return "".join(parts)


def selected(layer: str | None) -> str:
    """Return the name of the selected layer, or how to select a layer."""
    if layer is None:
        return "Click a layer in the Layers tab."
    return f"Selected: <b>{html.escape(layer)}</b>"
